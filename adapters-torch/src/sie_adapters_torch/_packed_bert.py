"""BERT and its kin without padding: the linear layers see all tokens of a batch as one matrix.

Only the attention knows where a text ends, and there texts of one length go together. The weights are those of the
transformers model; nothing is copied. LoRA layers in place of linear ones are called as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
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
        self._wide = int(config.intermediate_size)
        self._chunk = chunk
        offset = 0 if type(module).__name__ == "BertModel" else int(config.pad_token_id) + 1
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
        lanes = max(1, min(lanes, tokens // _WORTH_A_LANE))
        count = -(-count // lanes) * lanes
        return cut_evenly(lengths, count)

    def hidden(self, batch: Packed) -> torch.Tensor:
        longest = torch.arange(self._first_position, self._first_position + batch.lengths[0], device=batch.ids.device)
        positions = torch.cat([longest[:length] for length in batch.lengths])
        embedded = self._model.embeddings(
            input_ids=batch.ids[None],
            token_type_ids=(torch.zeros_like(batch.ids) if batch.types is None else batch.types)[None],
            position_ids=positions[None],
        )
        hidden: torch.Tensor = embedded[0]
        work = _Workspace(hidden, batch, self._heads, self._wide, at_least=self._chunk)
        layers = list(self._model.encoder.layer)
        for layer in layers[:-1]:
            attended = layer.attention.output(work.attend(layer.attention.self, hidden), hidden)
            hidden = layer.output(work.widen(layer.intermediate, attended), attended)
        layer, last = layers[-1], layers[-1].attention.self
        if batch.first_only:
            # Of the other tokens nothing but keys and values is needed: a model of two layers takes 2/3 of the time.
            firsts = hidden[[0, *accumulate(batch.lengths[:-1])]]
            attended = layer.attention.output(work.attend_first(last, hidden, firsts), firsts)
        else:
            attended = layer.attention.output(work.attend(last, hidden), hidden)
        return layer.output(work.widen(layer.intermediate, attended), attended)  # type: ignore[no-any-return]


class _Workspace:
    """The memory of one pass, used again by every layer, and the layers' steps that need much of it.

    Query, key, value and the attention's result lie where the widened rows do later in the layer. The size is that of a
    full chunk, so that the allocator has one size to keep instead of the many that texts come in.

    Texts of one length are a batch of their own in the attention, so nothing is masked. The views of each batch are
    made once a pass: with dozens of lengths, making them in every layer would cost more than the attention.
    """

    def __init__(self, like: torch.Tensor, batch: Packed, heads: int, wide: int, *, at_least: int) -> None:
        tokens, width = like.shape
        block = like.new_empty(max(tokens, at_least) * max(4 * width, wide))
        *self._inputs, self._result = block[: 4 * tokens * width].view(4, tokens, width).unbind()
        self._wide = block[: tokens * wide].view(tokens, wide)
        self._batches = []
        start = 0
        for (length, attended), same in groupby(zip(batch.lengths, batch.attended or batch.lengths, strict=True)):
            count = len(list(same))
            rows, shape = slice(start, start + length * count), (count, length, heads, width // heads)
            query, key, value, result = (
                whole[rows].view(shape).transpose(1, 2) for whole in (*self._inputs, self._result)
            )
            self._batches.append((query, key[:, :, :attended], value[:, :, :attended], result))
            start = rows.stop

    def attend(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Self-attention before its projection; valid until the next call of anything here."""
        for part, whole in zip((layer.query, layer.key, layer.value), self._inputs, strict=True):
            _linear(part, hidden, out=whole)
        for query, key, value, result in self._batches:
            result.copy_(scaled_dot_product_attention(query, key, value))
        return self._result

    def attend_first(self, layer: Any, hidden: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """The same for the first token of each text, ``firsts`` of ``hidden``: (texts, width)."""
        texts = len(firsts)
        for part, given, whole in zip(
            (layer.query, layer.key, layer.value), (firsts, hidden, hidden), self._inputs, strict=True
        ):
            _linear(part, given, out=whole[: len(given)])
        heads, start = self._batches[0][0].shape[1], 0
        queries, results = (
            whole[:texts].view(texts, 1, heads, -1).transpose(1, 2) for whole in (self._inputs[0], self._result)
        )
        for _, key, value, _ in self._batches:
            rows = slice(start, start + len(key))
            results[rows].copy_(scaled_dot_product_attention(queries[rows], key, value))
            start = rows.stop
        return self._result[:texts]

    def widen(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The widening half of the feed-forward; valid until the next call of anything here."""
        wide = _linear(layer.dense, hidden, out=self._wide[: len(hidden)])
        activation = layer.intermediate_act_fn
        if type(activation).__name__ == "GELUActivation":
            return torch.ops.aten.gelu.out(wide, out=wide)  # type: ignore[no-any-return]
        result: torch.Tensor = activation(wide)
        return result


def _linear(layer: Any, hidden: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, torch.nn.Linear):
        return torch.addmm(layer.bias, hidden, layer.weight.t(), out=out)
    return out.copy_(layer(hidden))  # a LoRA layer around one, which has the weights of the one alone
