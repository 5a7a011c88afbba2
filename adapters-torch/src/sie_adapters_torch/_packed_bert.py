"""BERT and its kin without padding: the linear layers see all tokens of a batch as one matrix.

Only the attention knows where a text ends, and there texts of one length go together. The weights are those of the
transformers model; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sie_adapters_torch._backbone import Packed, cut_evenly

__all__ = ["PackedBert"]

# Classes whose encoder is BERT's, layer for layer.
_KIN = {"BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel"}
_WORTH_A_LANE = 48  # tokens: fewer are done faster by all threads together


class PackedBert:
    """Runs a BERT on packed tokens. ``chunk``: tokens that go through together, so that activations stay in cache."""

    side_by_side = True

    def __init__(self, module: torch.nn.Module, *, chunk: int) -> None:
        self.module = module
        self._model: Any = module
        config: Any = module.config
        self._heads = int(config.num_attention_heads)
        self._chunk = chunk
        offset = 0 if config.model_type == "bert" else int(config.pad_token_id) + 1
        self._first_position = offset

    @staticmethod
    def supports(module: torch.nn.Module) -> bool:
        """Whether this is a BERT, and one whose attention knows nothing but the tokens."""
        config: Any = getattr(module, "config", None)
        return (
            type(module).__name__ in _KIN
            and type(module).__module__.startswith("transformers.models.")
            and getattr(config, "position_embedding_type", "absolute") in (None, "absolute")
            and not getattr(config, "is_decoder", False)
            and not getattr(config, "add_cross_attention", False)
            and getattr(config, "_attn_implementation", "sdpa") == "sdpa"
        )

    def groups(self, lengths: Sequence[int], limit: int, lanes: int) -> list[range]:
        tokens = sum(lengths)
        count = -(-tokens // min(limit, self._chunk))
        if lanes > 1 and tokens >= lanes * _WORTH_A_LANE:
            count = -(-count // lanes) * lanes
        return cut_evenly(lengths, count)

    def hidden(self, batch: Packed) -> torch.Tensor:
        longest = torch.arange(self._first_position, self._first_position + batch.lengths[0], device=batch.ids.device)
        positions = torch.cat([longest[:length] for length in batch.lengths])
        embedded = self._model.embeddings(
            input_ids=batch.ids[None],
            token_type_ids=torch.zeros_like(batch.ids)[None],
            position_ids=positions[None],
        )
        hidden: torch.Tensor = embedded[0]
        attention = _PackedAttention(hidden, batch.lengths, self._heads)
        for layer in self._model.encoder.layer:
            attended = layer.attention.output(attention(layer.attention.self, hidden), hidden)
            hidden = layer.output(layer.intermediate(attended), attended)
        return hidden


class _PackedAttention:
    """Self-attention over packed rows; texts of one length are a batch of their own, so nothing is masked.

    Query, key, value and result of all layers go through the same memory, so that the views of each batch into it are
    made once: with dozens of lengths, making them in every layer would cost more than the attention.
    """

    def __init__(self, like: torch.Tensor, lengths: Sequence[int], heads: int) -> None:
        width = like.shape[1]
        self._inputs = [torch.empty_like(like) for _ in range(3)]
        self._result = torch.empty_like(like)
        self._batches = []
        start = 0
        for length, same in groupby(lengths):
            count = len(list(same))
            rows, shape = slice(start, start + length * count), (count, length, heads, width // heads)
            views = [whole[rows].view(shape).transpose(1, 2) for whole in (*self._inputs, self._result)]
            self._batches.append(views)
            start = rows.stop

    def __call__(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        for part, whole in zip((layer.query, layer.key, layer.value), self._inputs, strict=True):
            torch.addmm(part.bias, hidden, part.weight.t(), out=whole)
        for query, key, value, result in self._batches:
            result.copy_(scaled_dot_product_attention(query, key, value))
        return self._result
