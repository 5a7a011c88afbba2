"""``torch-entities``: names in texts, by the labels of a model. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._entities_files import EntityFiles, read_entities
from sie_adapters_torch._labels import counted_head
from sie_adapters_torch._options import EntityOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token

__all__ = ["EntitiesAdapter", "EntityOptions"]


class EntitiesAdapter(TorchAdapter[EntityFiles]):
    """Token classification, with the tokens put together as the pipeline of transformers does it."""

    options: ClassVar[type] = EntityOptions
    declares = Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=())

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> EntityFiles:
        return read_entities(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: EntityFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: EntityFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: EntityFiles, entry: TensorEntry) -> bool | None:
        return False if "pooler." in entry.name else counted_head(entry)

    def build(self, model: ModelSpec, files: EntityFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._entities_engine import load_entities

        return load_entities(model, files, ctx, events)


def capabilities_of(files: EntityFiles) -> Capabilities:
    """What it takes and gives."""
    return Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=(), max_sequence_length=files.model.max_length)


def size_of(files: EntityFiles, options: EntityOptions) -> Size:
    """What it takes beside its weights: logits and scores of every token, in float32."""
    scores = 2 * 4 * len(files.tags)
    return Size(token_bytes=activation_bytes_per_token(files.model, options) + scores)
