"""``torch-bge-m3``: dense, sparse and multi-vector in one pass. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._bge_m3_files import BgeM3Files, read_bge_m3
from sie_adapters_torch._options import BgeM3Options
from sie_adapters_torch._reserve import Size, activation_bytes_per_token

__all__ = ["BgeM3Adapter", "BgeM3Options"]


class BgeM3Adapter(TorchAdapter[BgeM3Files]):
    """BGE-M3 and models made like it: an encoder and two linear layers on its tokens."""

    options: ClassVar[type] = BgeM3Options
    declares = Capabilities(tasks=frozenset({Task.ENCODE, Task.SCORE}), outputs=("dense", "sparse", "multivector"))

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> BgeM3Files:
        return read_bge_m3(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: BgeM3Files) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: BgeM3Files, options: Any) -> Size:
        return size_of(files, options)

    def build(self, model: ModelSpec, files: BgeM3Files, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._bge_m3_engine import load_bge_m3

        return load_bge_m3(model, files, ctx, events)


def capabilities_of(files: BgeM3Files) -> Capabilities:
    """What the model takes and gives."""
    return Capabilities(
        tasks=frozenset({Task.ENCODE, Task.SCORE}),
        outputs=("dense", "sparse", "multivector"),
        dims={"dense": files.model.hidden_size, "sparse": files.vocabulary, "multivector": files.dims},
        max_sequence_length=files.model.max_length,
        compares=files.compares,
    )


def size_of(files: BgeM3Files, options: BgeM3Options) -> Size:
    """What it takes beside the encoder's weights: the heads, which are kept in float32."""
    hidden = files.model.hidden_size
    return Size(
        token_bytes=activation_bytes_per_token(files.model, options) + 4 * (hidden + 2 * files.dims),
        head_bytes=4 * (files.dims + 1) * (hidden + 1) + 4 * 64,
    )
