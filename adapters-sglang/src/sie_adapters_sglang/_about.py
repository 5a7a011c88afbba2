"""What a model can do, from its files alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sie_core import Capabilities, Task

from sie_adapters_sglang._options import EmbeddingOptions, EngineOptions

__all__ = ["capabilities_of"]

_LIMITS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings",
           "n_positions", "n_ctx")  # fmt: skip
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")


def capabilities_of(config: Mapping[str, Any], options: EngineOptions) -> Capabilities:
    """Of a model with this ``config.json``."""
    limit = options.context_length or _number(config, _LIMITS)
    if not isinstance(options, EmbeddingOptions):
        return Capabilities(tasks=frozenset({Task.GENERATE}), outputs=("text",), max_sequence_length=limit)
    width = _number(config, _WIDTHS)
    return Capabilities(
        dims={"dense": width} if width is not None else {},
        max_sequence_length=limit,
        matryoshka=_sizes(config, options),
    )


def _sizes(config: Mapping[str, Any], options: EmbeddingOptions) -> tuple[int, ...] | None:
    if options.matryoshka is not None:
        return options.matryoshka
    declared = config.get("matryoshka_dimensions")
    if isinstance(declared, list):
        return tuple(int(size) for size in declared)
    return None if config.get("is_matryoshka") else ()


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((value for key in keys if isinstance(value := config.get(key), int) and value > 0), None)
