"""Outputs of every kind, looked at alike: are they sound, are they the same, and how far are they apart?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sie_core import (
    BatchEngine,
    Capabilities,
    EncodeOutput,
    Engine,
    ExtractOutput,
    Output,
    ScoreOutput,
    SparseVector,
    Task,
)

__all__ = ["assert_same", "assert_sound", "difference", "main_task", "numbers_of", "only", "tasks_of"]

_KINDS: Final[Mapping[Task, type]] = {
    Task.ENCODE: EncodeOutput,
    Task.SCORE: ScoreOutput,
    Task.EXTRACT: ExtractOutput,
}


def tasks_of(engine: Engine) -> list[Task]:
    """What the core asks a batch engine for. One whose vectors are compared encodes, and is never asked to score."""
    known = engine.capabilities
    found = [task for task in _KINDS if task in known.tasks]
    return [task for task in found if not (task is Task.SCORE and known.compares is not None)]


def main_task(engine: BatchEngine) -> Task:
    """What the suite asks for where any task will do."""
    tasks = tasks_of(engine)
    assert tasks, "a batch engine must encode, score or extract"
    return tasks[0]


def numbers_of(output: Output) -> NDArray[np.float32]:
    """Every number of an output, one after the other."""
    parts: list[NDArray[np.float32]] = []
    if isinstance(output, ScoreOutput):
        parts = [np.array([output.score], dtype=np.float32)]
    elif isinstance(output, ExtractOutput):
        kinds = (output.entities, output.relations, output.classifications, output.objects)
        parts = [np.array([one.score for found in kinds for one in found], dtype=np.float32)]
    else:
        if output.dense is not None:
            parts.append(output.dense)
        if output.sparse is not None:
            parts += [output.sparse.indices.astype(np.float32), output.sparse.values]
        if output.multivector is not None:
            parts.append(output.multivector.reshape(-1))
    return np.concatenate(parts)


def assert_sound(output: Output, task: Task, known: Capabilities, text: str, wanted: Sequence[str]) -> None:
    """Of the kind that ``task`` asks for, finite, in the shapes and dtypes that the capabilities and the types say."""
    assert type(output) is _KINDS[task]
    assert output.tokens > 0
    assert np.isfinite(numbers_of(output)).all()
    if isinstance(output, ScoreOutput):
        assert type(output.score) is float
    elif isinstance(output, ExtractOutput):
        for entity in output.entities:
            if entity.start is not None:
                assert text[entity.start : entity.end] == entity.text, "an entity must be where it says it is"
    else:
        _assert_vectors(output, known, wanted)


def _assert_vectors(output: EncodeOutput, known: Capabilities, wanted: Sequence[str]) -> None:
    for name in wanted:
        assert getattr(output, name) is not None, f"{name} was asked for"
    if output.dense is not None:
        assert output.dense.dtype == np.float32
        assert output.dense.shape == (known.dims["dense"],)
    if output.multivector is not None:
        assert output.multivector.dtype == np.float32
        assert output.multivector.ndim == 2
        assert output.multivector.shape[1] == known.dims["multivector"]
    if output.sparse is not None:
        indices, values = output.sparse.indices, output.sparse.values
        assert indices.dtype == np.int32
        assert values.dtype == np.float32
        assert indices.shape == values.shape == (indices.size,)
        assert (np.diff(indices) > 0).all(), "the indices must ascend"
        assert not indices.size or 0 <= indices[0] <= indices[-1] < known.dims["sparse"]


def difference(output: Output, other: Output) -> float:
    """The largest difference of two numbers that belong together; infinite where something has no counterpart."""
    if type(output) is not type(other):
        return float("inf")
    if isinstance(output, EncodeOutput) and isinstance(other, EncodeOutput):
        return max(
            _apart(output.dense, other.dense),
            _apart(output.multivector, other.multivector),
            _apart(_spread(output.sparse, other.sparse), _spread(other.sparse, output.sparse)),
        )
    if isinstance(output, ExtractOutput) and isinstance(other, ExtractOutput) and _names(output) != _names(other):
        return float("inf")
    return _apart(numbers_of(output), numbers_of(other))


def only(output: Output, name: str) -> EncodeOutput:
    """The output named, without those beside it."""
    assert isinstance(output, EncodeOutput)
    return EncodeOutput(output.tokens, **{name: getattr(output, name)})


def _apart(array: NDArray[np.float32] | None, other: NDArray[np.float32] | None) -> float:
    if array is None or other is None:
        return 0.0 if array is other else float("inf")
    if array.shape != other.shape:
        return float("inf")
    return float(np.abs(array - other).max()) if array.size else 0.0


def _spread(vector: SparseVector | None, beside: SparseVector | None) -> NDArray[np.float32] | None:
    """A sparse vector as a dense one, as long as both need: a weight may fall out that is next to nothing."""
    if vector is None:
        return None
    indices = vector.indices if beside is None else np.concatenate([vector.indices, beside.indices])
    whole = np.zeros(int(indices.max(initial=-1)) + 1, dtype=np.float32)
    whole[vector.indices] = vector.values
    return whole


def _names(output: ExtractOutput) -> list[object]:
    """All but the scores; of classifications without their order, which scores that are alike may change."""
    return [
        *((one.text, one.label, one.start, one.end, one.bbox) for one in output.entities),
        *((one.head, one.tail, one.relation) for one in output.relations),
        *sorted(one.label for one in output.classifications),
        *((one.label, one.bbox) for one in output.objects),
    ]


def assert_same(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Bit for bit."""
    assert len(outputs) == len(expected)
    for output, other in zip(outputs, expected, strict=True):
        assert difference(output, other) == 0.0
        assert numbers_of(output).tobytes() == numbers_of(other).tobytes()
