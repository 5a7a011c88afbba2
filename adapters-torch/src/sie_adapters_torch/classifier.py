"""``torch-classifier``: classes of whole texts. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._classifier_files import ClassifierFiles, read_classifier
from sie_adapters_torch._labels import counted_head
from sie_adapters_torch._options import ClassifierOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token

__all__ = ["ClassifierAdapter", "ClassifierOptions"]


class ClassifierAdapter(TorchAdapter[ClassifierFiles]):
    """Sequence classification by the model's own labels; and by any labels, for models of language inference."""

    options: ClassVar[type] = ClassifierOptions
    declares = Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=())

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> ClassifierFiles:
        return read_classifier(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: ClassifierFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: ClassifierFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: ClassifierFiles, entry: TensorEntry) -> bool | None:
        return counted_head(entry)

    def build(self, model: ModelSpec, files: ClassifierFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._classifier_engine import load_classifier

        return load_classifier(model, files, ctx, events)


def capabilities_of(files: ClassifierFiles) -> Capabilities:
    """What it takes and gives."""
    return Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=(), max_sequence_length=files.model.max_length)


def size_of(files: ClassifierFiles, options: ClassifierOptions) -> Size:
    """What it takes beside its weights."""
    return Size(token_bytes=activation_bytes_per_token(files.model, options))
