"""Running a transformers model over texts of different lengths without paying for padding.

Everything above works on *packed* rows: the hidden states of all tokens of a batch, one after the other, ``(tokens,
hidden)``, with the texts' lengths beside them. How they are computed depends on the model and the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from attrs import frozen

__all__ = ["Backbone", "Packed", "PaddedBackbone", "cut_evenly", "split_by_length"]


@frozen(eq=False)
class Packed:
    """Token ids of a batch, int64 (tokens,), and each text's length; longest first.

    ``types``: token type ids like ``ids``; ``None``: all 0. ``attended``: how many of each text's leading tokens are
    attended to; ``None``: all of them. ``first_only``: whether only the first token of each text is wanted.
    """

    ids: torch.Tensor
    lengths: tuple[int, ...]
    types: torch.Tensor | None = None
    attended: tuple[int, ...] | None = None
    first_only: bool = False


class Backbone(Protocol):
    """Computes hidden states."""

    module: torch.nn.Module
    side_by_side: bool
    """Whether ``hidden`` may run on several threads at once."""

    def groups(self, lengths: Sequence[int], limit: int, lanes: int) -> list[range]:
        """Cut texts, given by length, longest first, into groups, of which ``lanes`` can run at the same time.

        ``limit``: tokens (padding included) a group may hold; a longer text is a group of its own.
        """

    def hidden(self, batch: Packed) -> torch.Tensor:
        """Hidden states of the last layer, in the order of ``batch.ids``: (tokens, hidden), or (texts, hidden) of the
        first tokens if only those are wanted."""


class PaddedBackbone:
    """Any transformers model, in padded batches of texts of similar length.

    ``overhead``: what a further batch costs, in tokens' worth of time. ``fewest``: as how many tokens a text counts at
    least in what a batch may hold.
    """

    side_by_side = False  # models may keep tables that they fill as they run

    def __init__(self, module: torch.nn.Module, *, pad_id: int, overhead: int, fewest: int = 1) -> None:
        self.module = module
        self._pad_id = pad_id
        self._overhead = overhead
        self._fewest = fewest

    def groups(self, lengths: Sequence[int], limit: int, lanes: int) -> list[range]:
        return split_by_length(lengths, limit=limit, overhead=self._overhead, fewest=self._fewest)

    def hidden(self, batch: Packed) -> torch.Tensor:
        count, longest = len(batch.lengths), batch.lengths[0]
        if batch.lengths[-1] == longest and batch.attended is None:
            types = None if batch.types is None else batch.types.view(count, longest)
            whole = self._forward(batch.ids.view(count, longest), None, types)
            return whole[:, 0] if batch.first_only else whole.reshape(count * longest, -1)
        device = batch.ids.device
        places = torch.arange(longest, device=device)
        there = places < torch.tensor(batch.lengths, device=device)[:, None]
        mask = there if batch.attended is None else places < torch.tensor(batch.attended, device=device)[:, None]
        ids = torch.full((count, longest), self._pad_id, dtype=torch.int64, device=device)
        ids[there] = batch.ids
        types = None
        if batch.types is not None:
            types = torch.zeros_like(ids)
            types[there] = batch.types
        hidden = self._forward(ids, mask.to(torch.int64), types)
        return hidden[:, 0] if batch.first_only else hidden[there]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, types: torch.Tensor | None) -> torch.Tensor:
        more = {} if types is None else {"token_type_ids": types}
        output: Any = self.module(input_ids=ids, attention_mask=mask, **more)
        hidden: torch.Tensor = output[0]
        return hidden


def split_by_length(lengths: Sequence[int], *, limit: int, overhead: int, fewest: int = 1) -> list[range]:
    """Cut a descending list of lengths where the padding saved is worth more than another batch (``overhead``).

    The cheapest cut there is, for a cost of ``overhead + rows * longest`` a batch.
    """
    count = len(lengths)
    best: list[float] = [0.0] + [float("inf")] * count
    cut = [0] * (count + 1)
    for end in range(1, count + 1):
        for start in range(end - 1, -1, -1):
            padded = (end - start) * lengths[start]
            if max(padded, (end - start) * fewest) > limit and end - start > 1:
                break  # going further left only makes it larger
            cost = best[start] + overhead + padded
            if cost < best[end]:
                best[end], cut[end] = cost, start
    groups, end = [], count
    while end:
        groups.append(range(cut[end], end))
        end = cut[end]
    return groups[::-1]


def cut_evenly(lengths: Sequence[int], count: int) -> list[range]:
    """Cut a list of lengths into up to ``count`` groups of about as many tokens each."""
    total, done, start = sum(lengths), 0, 0
    groups: list[range] = []
    for index, length in enumerate(lengths):
        done += length
        # The half: a group ends with the text that crosses its border only if most of that text is on this side.
        after = lengths[index + 1] if index + 1 < len(lengths) else 0
        if (done + after / 2) * count >= total * (len(groups) + 1):
            groups.append(range(start, index + 1))
            start = index + 1
    return groups if start == len(lengths) else [*groups, range(start, len(lengths))]
