"""Models that classify whole texts: which token their head reads, and the logits of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._heads import CheckpointHead, load_with_head
from sie_adapters_torch._options import Activation, LoadOptions, Pooling
from sie_adapters_torch._pooling import pool

__all__ = ["SequenceHead", "activated", "load_sequence", "softmax"]

_READS: tuple[Pooling, ...] = ("cls", "last_token", "mean")


class SequenceHead(torch.nn.Module):
    """A classifier's head on packed tokens. Safe on several threads at once. Raises ValueError for one that is odd."""

    def __init__(self, head: CheckpointHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.head = head
        self.dtype = dtype
        self.reads = _reads(head, dtype)
        self.first_only = self.reads == "cls"

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits, float32 (texts, labels), of the tokens of all texts, one after the other; of their first ones alone
        where those are all that the head reads (``first_only``)."""
        rows = hidden if self.first_only else pool(hidden, lengths, self.reads, [0] * len(lengths)).to(self.dtype)
        result: torch.Tensor = self.head(rows[:, None])
        return result.float()


def _reads(head: CheckpointHead, dtype: torch.dtype) -> Pooling:
    """What of a text the head reads: what gives the same logits alone as among others."""
    length = 5
    draws = torch.Generator().manual_seed(0)
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    with torch.inference_mode():
        hidden = torch.randn(length, head.width, generator=draws).to(dtype)
        whole = head(hidden[None])
        for reads in _READS:
            alone = head(pool(hidden, [length], reads, [0]).to(dtype)[:, None])
            if alone.shape == whole.shape and torch.allclose(alone, whole, rtol=tolerance, atol=tolerance / 10):
                return reads
    raise ValueError("its head reads neither the first token, nor the last one, nor their mean")


def load_sequence(files: ModelFiles, options: LoadOptions) -> tuple[torch.nn.Module, SequenceHead, Any]:
    """The encoder, the head and the configuration of a classifier, on the CPU. Raises LoadError."""
    encoder, head, config = load_with_head(files, options, "sequence_classification")
    inner: Any = head.rest
    text_config = inner.config.get_text_config()
    if text_config.pad_token_id is None:
        text_config.pad_token_id = 0  # decoders refuse batches without one, though here nothing is padded
    try:
        return encoder, SequenceHead(head, next(encoder.parameters()).dtype).eval(), config
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise ModelSourceInvalid(f"{files.folder}: {type(inner).__name__} is not supported: {error}") from error


def activated(logits: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Scores of logits, float32 (..., labels)."""
    if activation == "softmax":
        return softmax(logits)
    if activation == "sigmoid":
        # Both halves without an overflow.
        small = np.exp(-np.abs(logits))
        share: NDArray[np.float32] = np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
        return share
    return logits


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    share: NDArray[np.float32] = powers / powers.sum(-1, keepdims=True)
    return share
