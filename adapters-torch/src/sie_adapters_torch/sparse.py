"""``torch-sparse``: weights of words of the vocabulary. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, Engine, EngineEvents, ModelSpec, Task, TensorEntry, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._options import SparseOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token
from sie_adapters_torch._sparse_files import SparseFiles, read_sparse

__all__ = ["LOGIT_BYTES", "SparseAdapter", "SparseOptions"]

LOGIT_BYTES = 64 * 1024 * 1024
"""Bytes of logits that an engine holds at a time, and of pooled ones: a whole batch's would be gigabytes."""


class SparseAdapter(TorchAdapter[SparseFiles]):
    """SPLADE: masked language models whose logits are pooled to one weight a word."""

    options: ClassVar[type] = SparseOptions
    declares = Capabilities(tasks=frozenset({Task.ENCODE, Task.SCORE}), outputs=("sparse",))

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> SparseFiles:
        return read_sparse(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: SparseFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: SparseFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: SparseFiles, entry: TensorEntry) -> bool | None:
        """All but what training had beside it. An output matrix is counted even where it is the embeddings' twin:
        only their contents tell."""
        return "pooler." not in entry.name and not entry.name.startswith(("cls.seq_relationship.", "discriminator_"))

    def build(self, model: ModelSpec, files: SparseFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._sparse_engine import load_sparse

        return load_sparse(model, files, ctx, events)


def capabilities_of(files: SparseFiles) -> Capabilities:
    """What a sparse model takes and gives."""
    return Capabilities(
        tasks=frozenset({Task.ENCODE, Task.SCORE}),
        outputs=("sparse",),
        dims={"sparse": files.vocabulary},
        max_sequence_length=files.model.max_length,
        compares="sparse",
    )


def size_of(files: SparseFiles, options: SparseOptions) -> Size:
    """What it takes beside its weights: logits, and what they are pooled to, which is no more than they are."""
    token = activation_bytes_per_token(files.model, options)
    # The head's features, their activation and their norm, while the encoder's own activations are gone.
    features = 4 * 4 * files.model.hidden_size
    return Size(token_bytes=max(token, features), fixed_bytes=2 * max(LOGIT_BYTES, 4 * files.vocabulary))
