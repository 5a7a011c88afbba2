"""``torch-cross-encoder``: how well documents answer a query. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._cross_encoder_files import CrossEncoderFiles, read_cross_encoder
from sie_adapters_torch._labels import counted_head
from sie_adapters_torch._options import CrossEncoderOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token

__all__ = ["CrossEncoderAdapter", "CrossEncoderOptions"]


class CrossEncoderAdapter(TorchAdapter[CrossEncoderFiles]):
    """Sequence classification of a query and a document together, as CrossEncoder of sentence-transformers does it."""

    options: ClassVar[type] = CrossEncoderOptions
    declares = Capabilities(tasks=frozenset({Task.SCORE}), outputs=())

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> CrossEncoderFiles:
        return read_cross_encoder(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: CrossEncoderFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: CrossEncoderFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: CrossEncoderFiles, entry: TensorEntry) -> bool | None:
        return counted_head(entry)

    def build(self, model: ModelSpec, files: CrossEncoderFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._cross_encoder_engine import load_cross_encoder

        return load_cross_encoder(model, files, ctx, events)


def capabilities_of(files: CrossEncoderFiles) -> Capabilities:
    """What a cross-encoder takes and gives."""
    return Capabilities(tasks=frozenset({Task.SCORE}), outputs=(), max_sequence_length=files.model.max_length)


def size_of(files: CrossEncoderFiles, options: CrossEncoderOptions) -> Size:
    """What it takes beside its weights."""
    return Size(token_bytes=activation_bytes_per_token(files.model, options))
