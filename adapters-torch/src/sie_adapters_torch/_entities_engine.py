"""The running token classifier: scores of tokens, put together to entities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EngineEvents,
    ExtractOutput,
    InputTooLong,
    InvalidInput,
    ModelSpec,
    Output,
    TransitionContext,
)

from sie_adapters_torch._asked import asked, chosen, no_instruction, no_schema, number, one_of
from sie_adapters_torch._engine import Parts
from sie_adapters_torch._entities_files import EntityFiles
from sie_adapters_torch._heads import load_with_head
from sie_adapters_torch._options import AGGREGATIONS, Aggregation, EntityOptions, options_of
from sie_adapters_torch._several import Scored, Several, SeveralTexts
from sie_adapters_torch._spans import Place, entities, without_overlaps
from sie_adapters_torch._text_engine import Known, Reading, Text, Weights, bring_up_text
from sie_adapters_torch._tokenise import Tokens
from sie_adapters_torch.entities import capabilities_of, size_of

__all__ = ["EntitiesEngine", "load_entities"]


def load_entities(model: ModelSpec, files: EntityFiles, ctx: TransitionContext, events: EngineEvents) -> EntitiesEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, EntityOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options))

    def read() -> Weights:
        encoder, head, config = load_with_head(files.model, options, "token_classification")
        return [encoder, head], config

    return bring_up_text(known, ctx, events, read, partial(EntitiesEngine, files=files, options=options))


@frozen
class _Wish:
    """What a request asks for."""

    names: frozenset[str]
    threshold: float
    how: Aggregation


@frozen(eq=False)
class _About:
    """An item's text, and where the tokens of each of its windows are in it."""

    text: str
    windows: tuple[Sequence[Place], ...]
    wish: _Wish


class EntitiesEngine(SeveralTexts):
    """Entities of each text, in its order."""

    def __init__(
        self, parts: Parts, account: str, reading: Reading, files: EntityFiles, options: EntityOptions
    ) -> None:
        super().__init__(parts, account, reading)
        self._files = files
        self._given = options

    # --- from a request to tokens ------------------------------------------------------------------

    def pieces(self, request: BatchRequest) -> Sequence[Several]:
        wish = self.wish(request)
        texts = []
        for index, item in enumerate(request.items):
            if item.text is None:
                what = "token ids have no places in a text: send" if item.token_ids is not None else "the item has no"
                raise InvalidInput(f"{what} text", index=index, param="input")
            texts.append(item.text)
        truncate = self._given.truncate if request.params.truncate is None else request.params.truncate
        stride = None if request.params.truncate else self._given.stride
        encodings = self._tokeniser.encodings(texts)
        return [
            self._several(text, encoding, index, wish, truncate=truncate, stride=stride)
            for index, (text, encoding) in enumerate(zip(texts, encodings, strict=True))
        ]

    def wish(self, request: BatchRequest) -> _Wish:
        super().wish(request)
        no_instruction(self._model.name, request.params)
        no_schema(self._model.name, request)
        known = {"aggregation": one_of(AGGREGATIONS), "threshold": number}
        given: dict[str, Any] = {"aggregation": self._given.aggregation, "threshold": self._given.threshold}
        given |= asked(request.params, known)
        return _Wish(
            chosen(self._model.name, request.labels, self._files.names), given["threshold"], given["aggregation"]
        )

    def _several(
        self, text: str, encoding: Any, index: int, wish: _Wish, *, truncate: bool, stride: int | None
    ) -> Several:
        ids: list[int] = encoding.ids
        before, after = self._tokeniser.around
        limit, extra = self._tokeniser.limit, len(before) + len(after)
        windows = [range(len(ids))]
        if limit is not None and len(ids) + extra > limit:
            room = limit - extra
            if stride is not None and stride < room:
                windows = _windows(len(ids), room, stride)
            elif truncate and room > 0:
                windows = [range(len(ids) - room, len(ids)) if self._tokeniser.cuts_left else range(room)]
            else:
                raise InputTooLong(tokens=len(ids) + extra, limit=limit, index=index)
        if not len(ids) + extra:
            raise InvalidInput("the text has no tokens", index=index, param="input")
        texts = tuple(self._text([*before, *ids[span.start : span.stop], *after], index) for span in windows)
        places = self._places(text, encoding)
        return Several(texts, _About(text, tuple(places[span.start : span.stop] for span in windows), wish))

    def _text(self, ids: list[int], index: int) -> Text:
        array = np.asarray(ids, dtype=np.int64)
        self._tokeniser.check_known(array, index)
        return Text(Tokens(array), None)

    def _places(self, text: str, encoding: Any) -> list[Place]:
        """Which tokens go on with a word: by the mark that the tokenizer puts before them, else where no space is."""
        marked, unknown = self._tokeniser.marks_subwords, self._tokeniser.unknown_id
        places = []
        for token, word, (start, end) in zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True):
            if token == unknown:
                subword = False
            elif marked:
                subword = len(word) != end - start
            else:
                subword = start > 0 and " " not in text[start - 1 : start + 1]
            places.append(Place(start, end, subword))
        return places

    # --- from hidden states to entities --------------------------------------------------------------

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        scores: NDArray[np.float32] = self._placed.modules[1](hidden[None])[0].float().softmax(1).cpu().numpy()
        found, row = [], 0
        for text in texts:
            length = len(text.tokens.ids)
            found.append(Scored(length, scores=scores[row : row + length]))
            row += length
        return found

    def combined(self, item: Several, scores: Sequence[NDArray[np.float32]]) -> Output:
        about: _About = item.about
        first, wish = len(self._tokeniser.around[0]), about.wish
        found = []
        for places, rows in zip(about.windows, scores, strict=True):
            found += entities(about.text, places, rows[first : first + len(places)], self._files.tags, wish.how)
        if len(scores) > 1:
            found = without_overlaps(found)
        kept = [each for each in found if each.label in wish.names and each.score >= wish.threshold]
        return ExtractOutput(item.tokens, entities=tuple(kept))


def _windows(count: int, room: int, stride: int) -> list[range]:
    """Windows of ``room`` tokens that share ``stride`` with the next, until the last token is in one."""
    starts = [0, *range(room - stride, max(count - stride, 1), room - stride)]
    return [range(start, min(start + room, count)) for start in starts]
