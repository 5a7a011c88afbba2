"""Two texts as one input: as the tokenizer's pair encoding, with the first text tokenised once for all of its pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import InputTooLong, InvalidInput, ModelSourceInvalid

from sie_adapters_torch._tokenise import Tokeniser, Tokens

__all__ = ["Cut", "PairTokeniser", "takes_types"]

Cut = Literal["longest_first", "only_first"]
"""What is shortened when a pair is too long, as in the tokenizers library."""

Ids = Sequence[int]


def takes_types(encoder: Any, tokeniser: Tokeniser) -> bool:
    """Whether a model is told which of the two texts a token is of."""
    import inspect

    return "token_type_ids" in tokeniser.inputs and "token_type_ids" in inspect.signature(encoder.forward).parameters


@frozen(eq=False)
class _Shape:
    """The special ids around two texts, and the types of all five parts."""

    before: Ids
    between: Ids
    after: Ids
    types: tuple[Ids, int, Ids, int, Ids]


class PairTokeniser:
    """Makes pairs of ids that the tokenizer gave without special ones. Thread-safe. Raises ModelSourceInvalid.

    ``types``: whether the model takes token type ids. ``suffix``: ids that follow on the second text, however short it
    is cut.
    """

    def __init__(self, tokeniser: Tokeniser, *, types: bool, suffix: Ids = ()) -> None:
        self._tokeniser = tokeniser
        self._shape = _shape(tokeniser)
        self._types = types
        self._suffix = tuple(suffix)

    @property
    def extra(self) -> int:
        """Tokens of a pair that are of neither text."""
        shape = self._shape
        return len(shape.before) + len(shape.between) + len(self._suffix) + len(shape.after)

    def __call__(self, first: Ids, second: Ids, *, index: int, truncate: bool, cut: Cut = "longest_first") -> Tokens:
        """Raises InputTooLong and InvalidInput with ``index``."""
        limit, shape = self._tokeniser.limit, self._shape
        total = len(first) + len(second) + self.extra
        if limit is not None and total > limit:
            room = limit - self.extra
            if not truncate or room < 0 or (cut == "only_first" and len(second) >= room):
                raise InputTooLong(tokens=total, limit=limit, index=index)
            kept = _longest_first(len(first), len(second), room) if cut == "longest_first" else (room - len(second),)
            first = self._shortened(first, kept[0])
            second = second if len(kept) == 1 else self._shortened(second, kept[1])
        parts = (shape.before, first, shape.between, (*second, *self._suffix), shape.after)
        ids = np.asarray([one for part in parts for one in part], dtype=np.int64)
        if not len(ids):
            raise InvalidInput("the texts have no tokens", index=index, param="input")
        self._tokeniser.check_known(ids, index)
        return Tokens(ids, types=self._types_of(len(first), len(second)) if self._types else None)

    def _shortened(self, ids: Ids, kept: int) -> Ids:
        return ids[len(ids) - kept :] if self._tokeniser.cuts_left else ids[:kept]

    def _types_of(self, first: int, second: int) -> NDArray[np.int64]:
        before, one, between, two, after = self._shape.types
        second += len(self._suffix)
        return np.asarray([*before, *[one] * first, *between, *[two] * second, *after], dtype=np.int64)


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts is kept, as the tokenizers library does it: the longer is cut until both are as long."""
    short, long = sorted((first, second))
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return (short, long) if first <= second else (long, short)


def _shape(tokeniser: Tokeniser) -> _Shape:
    one, two = "a", "b"
    pair = tokeniser.pair(one, two)
    places: list[int | None] = list(pair.sequence_ids)
    starts = [places.index(text) if text in places else -1 for text in (0, 1)]
    ends = [start + places.count(text) for text, start in enumerate(starts)]
    ids, types = list(pair.ids), list(pair.type_ids)
    first, second = (tokeniser.plain([text])[0] for text in (one, two))
    whole = -1 < starts[0] < ends[0] <= starts[1] < ends[1]
    if not whole or ids[starts[0] : ends[0]] != first or ids[starts[1] : ends[1]] != second:
        raise ModelSourceInvalid("the tokenizer does more to a pair of texts than to put ids around them")
    before, between, after = (slice(0, starts[0]), slice(ends[0], starts[1]), slice(ends[1], None))
    return _Shape(
        tuple(ids[before]), tuple(ids[between]), tuple(ids[after]),
        (types[before], types[starts[0]], types[between], types[starts[1]], types[after]),
    )  # fmt: skip
