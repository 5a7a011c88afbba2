"""What happens off the event loop: preparing, running, checking. One call, one answer; errors come back as values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from sie_core._traces import empty_frames
from sie_core.errors import InferenceError, InvalidInput
from sie_core.serving._choose import Sizing, Slot, choose
from sie_core.serving._job import Chunk, translate
from sie_core.serving._sound import listed, oddity, unready
from sie_core.types import ExtractOutput, ScoreOutput

if TYPE_CHECKING:
    from sie_core.adapter import BatchEngine, Prepared
    from sie_core.types import Output

__all__ = ["Hop", "PreparedChunk", "not_finite", "prepare", "run", "run_chosen"]


@define(eq=False)
class PreparedChunk:
    """What became of a chunk: its items, or why not."""

    chunk: Chunk
    items: Sequence[Prepared] = ()
    error: BaseException | None = None
    seconds: float = 0.0


@define(eq=False)
class Hop:
    """What one visit to the engine's thread brought."""

    prepared: list[PreparedChunk] = field(factory=list)
    chosen: list[Slot] = field(factory=list)
    outputs: Sequence[Output] = ()
    error: BaseException | None = None
    not_finite: Sequence[int] = ()
    """Positions in ``chosen``."""
    began: float = 0.0
    seconds: float = 0.0


def _is_fault(error: BaseException) -> bool:
    """Errors, and panics of Rust extensions (tokenizers), which are no ``Exception``."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def prepare(engine: BatchEngine, chunks: Sequence[Chunk], owner: str) -> list[PreparedChunk]:
    """Prepare chunks, each by itself: an error of one is no other's. ``owner``: whose engine it is, for errors."""
    what = f"prepare of {owner}"
    done: list[PreparedChunk] = []
    for chunk in chunks:
        result = PreparedChunk(chunk)
        if chunk.job.dead:
            done.append(result)
            continue
        began = time.perf_counter()
        try:
            result.items = engine.prepare(chunk.request)
            came = listed(result.items, what, "Prepared")
            if came != len(chunk.request.items):
                raise InferenceError(f"{what} returned {came} of {len(chunk.request.items)} items")
            if (odd := unready(result.items)) is not None:
                raise InferenceError(f"{what} returned {odd}")
        except BaseException as error:
            if not _is_fault(error):
                raise
            if chunk.first and isinstance(error, InvalidInput) and error.index is not None:
                error.index += chunk.first
            empty_frames(error)
            result.items, result.error = (), translate(error, what)
        result.seconds = time.perf_counter() - began
        done.append(result)
    return done


def run(engine: BatchEngine, chunks: Sequence[Chunk], window: list[Slot], sizing: Sizing, owner: str) -> Hop:
    """Prepare what is not prepared yet, choose, run, check: one hop to the engine's thread and back."""
    hop = Hop()
    if chunks:
        hop.prepared = prepare(engine, chunks, owner)
        for part in hop.prepared:
            job, first = part.chunk.job, part.chunk.first
            window += [Slot(job, first + i, item, item.tokens) for i, item in enumerate(part.items)]
    hop.chosen = choose(window, sizing)
    if hop.chosen:
        run_chosen(engine, hop, owner)
    return hop


def run_chosen(engine: BatchEngine, hop: Hop, owner: str) -> Hop:
    """Run ``hop.chosen``. ``owner``: whose engine it is, for errors."""
    hop.began = time.perf_counter()
    try:
        hop.outputs = engine.run([slot.prepared for slot in hop.chosen])
        hop.seconds = time.perf_counter() - hop.began
        came, due = listed(hop.outputs, f"run of {owner}", "outputs"), len(hop.chosen)
        if came != due:
            raise InferenceError(f"{owner} answered {came} of {due} items: a bug in the adapter")
        requests = [slot.job.request for slot in hop.chosen]
        odd = oddity(zip(hop.outputs, requests, strict=True), engine.capabilities)
        if odd is not None:
            raise InferenceError(f"{owner} {odd}")
        hop.not_finite = not_finite(hop.outputs)
    except BaseException as error:
        if not _is_fault(error):
            raise
        empty_frames(error)
        hop.error = translate(error, f"run of {owner}")
        hop.outputs = ()
    return hop


def not_finite(outputs: Sequence[Output]) -> Sequence[int]:
    """Positions whose numbers are not all finite. The usual case costs one pass over one joined array."""
    parts = [part for output in outputs for part in _numbers(output)]
    if not parts or np.isfinite(np.concatenate(parts) if len(parts) > 1 else parts[0]).all():
        return ()
    return [
        position
        for position, output in enumerate(outputs)
        if not all(bool(np.isfinite(part).all()) for part in _numbers(output))
    ]


def _numbers(output: Output) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    if isinstance(output, ScoreOutput):
        return [np.asarray([output.score], dtype=np.float32)]
    if isinstance(output, ExtractOutput):
        kinds = (output.entities, output.relations, output.classifications, output.objects)
        return [np.asarray([one.score for found in kinds for one in found], dtype=np.float32)]
    parts = []
    if output.dense is not None:
        parts.append(output.dense)
    if output.sparse is not None:
        parts.append(output.sparse.values)
    if output.multivector is not None:
        parts.append(output.multivector.reshape(-1))
    return parts
