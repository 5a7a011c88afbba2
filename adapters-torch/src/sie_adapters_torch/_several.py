"""Items that take several texts through the model each: windows of a long one, or one text a label."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray
from sie_core import BatchRequest, Classification, ExtractOutput, Output, Prepared

from sie_adapters_torch._text_engine import Text, TextEngine

__all__ = ["Scored", "Several", "SeveralTexts", "not_finite"]


@frozen(eq=False)
class Several:
    """One item. ``about``: what ``combined`` has to know of it and of its request."""

    texts: tuple[Text, ...]
    about: Any

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens.ids) for text in self.texts)


@frozen(eq=False)
class Scored(ExtractOutput):
    """What the model makes of one text, before anything is made of that: float32, labels last."""

    scores: NDArray[np.float32] = field(kw_only=True)


class SeveralTexts(TextEngine):
    """``outputs`` gives one ``Scored`` a text; ``combined`` makes an item's answer of those of its texts."""

    @abstractmethod
    def pieces(self, request: BatchRequest) -> Sequence[Several]:
        """One an item, in order. Task and images have been looked at."""

    @abstractmethod
    def combined(self, item: Several, scores: Sequence[NDArray[np.float32]]) -> Output:
        """The item's answer."""

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        self._check(request)
        return [Prepared(item.tokens, item) for item in self.pieces(request)]

    def run(self, batch: Sequence[Prepared]) -> Sequence[Output]:
        items: list[Several] = [each.payload for each in batch]
        rows = iter(super().run([Prepared(len(text.tokens.ids), text) for item in items for text in item.texts]))
        return [self._answer(item, [scores_of(next(rows)) for _ in item.texts]) for item in items]

    def _answer(self, item: Several, scores: Sequence[NDArray[np.float32]]) -> Output:
        if all(bool(np.isfinite(rows).all()) for rows in scores):
            return self.combined(item, scores)
        return not_finite(item.tokens)

    # --- the wake check, on the scores as the model gives them ---------------------------------------

    def sample(self) -> Output:
        text = self.sample_text()
        return super().run([Prepared(len(text.tokens.ids), text)])[0]

    def numbers(self, output: Output) -> NDArray[np.float32]:
        return scores_of(output).ravel()

    def disagreement(self, output: Output) -> str | None:
        return None if np.isfinite(scores_of(output)).all() else "its scores are not finite"


def not_finite(tokens: int) -> ExtractOutput:
    """For scores that are not numbers, of which nothing would be found: an answer that the core refuses."""
    return ExtractOutput(tokens, classifications=(Classification("", float("nan")),))


def scores_of(output: Output) -> NDArray[np.float32]:
    assert isinstance(output, Scored)
    return output.scores
