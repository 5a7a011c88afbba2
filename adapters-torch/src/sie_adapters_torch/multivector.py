"""``torch-multivector``: a vector a token, compared by MaxSim. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._multivector_files import INLINE, MultivectorFiles, read_multivector
from sie_adapters_torch._options import MultivectorOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token, head_bytes

__all__ = ["MultivectorAdapter", "MultivectorOptions"]


class MultivectorAdapter(TorchAdapter[MultivectorFiles]):
    """ColBERT and its kin: the vectors of all tokens, projected and scaled to length 1."""

    options: ClassVar[type] = MultivectorOptions
    declares = Capabilities(tasks=frozenset({Task.ENCODE, Task.SCORE}), outputs=("multivector",))

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> MultivectorFiles:
        return read_multivector(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: MultivectorFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: MultivectorFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: MultivectorFiles, entry: TensorEntry) -> bool | None:
        return False if entry.name == INLINE else None  # it is among the steps, in float32

    def build(self, model: ModelSpec, files: MultivectorFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._multivector_engine import load_multivector

        return load_multivector(model, files, ctx, events)


def capabilities_of(files: MultivectorFiles) -> Capabilities:
    """What a multi-vector model takes and gives."""
    return Capabilities(
        tasks=frozenset({Task.ENCODE, Task.SCORE}),
        outputs=("multivector",),
        dims={"multivector": files.dims},
        max_sequence_length=files.document.length,
        compares="multivector",
    )


def size_of(files: MultivectorFiles, options: MultivectorOptions) -> Size:
    """What it takes beside the encoder's weights."""
    widest = max([files.model.hidden_size, *(step.outputs for step in files.head)])
    return Size(
        # The head works in float32: what goes into a step and what comes out of it.
        token_bytes=activation_bytes_per_token(files.model, options) + 2 * 4 * widest,
        head_bytes=head_bytes(files.head, files.model.hidden_size),
    )
