"""The running classifier: a text's classes, by the model's labels or by those of a request."""

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
    Classification,
    EngineEvents,
    ExtractOutput,
    InvalidInput,
    ModelSpec,
    Output,
    TransitionContext,
)

from sie_adapters_torch._asked import asked, boolean, chosen, count, no_instruction, no_schema, one_of, template
from sie_adapters_torch._classifier_files import ClassifierFiles
from sie_adapters_torch._engine import Parts
from sie_adapters_torch._options import ACTIVATIONS, Activation, ClassifierOptions, options_of
from sie_adapters_torch._pairs import PairTokeniser, takes_types
from sie_adapters_torch._sequence import SequenceHead, activated, load_sequence, softmax
from sie_adapters_torch._several import Scored, Several, SeveralTexts
from sie_adapters_torch._text_engine import Known, Reading, Text, Weights, bring_up_text
from sie_adapters_torch.classifier import capabilities_of, size_of

__all__ = ["ClassifierEngine", "load_classifier"]

_MAX_TOKENS = 1_000_000
"""Tokens that an item may come to with all of its labels: 8 MB of ids."""


def load_classifier(
    model: ModelSpec, files: ClassifierFiles, ctx: TransitionContext, events: EngineEvents
) -> ClassifierEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, ClassifierOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options))

    def read() -> Weights:
        encoder, head, config = load_sequence(files.model, options)
        return [encoder, head], config

    return bring_up_text(known, ctx, events, read, partial(ClassifierEngine, files=files, options=options))


@frozen
class _Wish:
    """What a request asks for. ``hypotheses``: what is said of a text for each of ``labels``; none: they are the
    model's own."""

    labels: tuple[str, ...]
    hypotheses: tuple[str, ...]
    activation: Activation
    top_k: int | None
    multi_label: bool


class ClassifierEngine(SeveralTexts):
    """Classifications of each text, best first."""

    def __init__(
        self, parts: Parts, account: str, reading: Reading, files: ClassifierFiles, options: ClassifierOptions
    ) -> None:
        super().__init__(parts, account, reading)
        self.first_only = bool(parts.modules[1].first_only)
        self._files = files
        self._given = options
        self._pairs: PairTokeniser | None = None
        if files.entails is not None:
            self._pairs = PairTokeniser(self._tokeniser, types=takes_types(parts.modules[0], self._tokeniser))

    # --- from a request to tokens ------------------------------------------------------------------

    def wish(self, request: BatchRequest) -> _Wish:
        super().wish(request)
        no_instruction(self._model.name, request.params)
        no_schema(self._model.name, request)
        known: dict[str, Any] = {"activation": one_of(ACTIVATIONS), "top_k": count}
        given: dict[str, Any] = {"activation": self._files.activation, "top_k": self._given.top_k}
        if self._pairs is not None:
            known |= {"hypothesis_template": template("{}"), "multi_label": boolean}
        given |= {"hypothesis_template": self._given.hypothesis_template, "multi_label": self._given.multi_label}
        given |= asked(request.params, known)
        labels, hypotheses = request.labels, tuple[str, ...]()
        if labels and self._pairs is not None:
            hypotheses = tuple(given["hypothesis_template"].replace("{}", label) for label in labels)
        else:
            names = chosen(self._model.name, labels, self._files.labels)
            labels = tuple(label for label in self._files.labels if label in names)
        return _Wish(labels, hypotheses, given["activation"], given["top_k"], given["multi_label"])

    def pieces(self, request: BatchRequest) -> Sequence[Several]:
        wish = self.wish(request)
        if not wish.hypotheses:
            texts = self.tokenise(request.items, request.params, "")
            return [Several((Text(tokens, None),), wish) for tokens in texts]
        assert self._pairs is not None
        truncate = self._given.truncate if request.params.truncate is None else request.params.truncate
        try:
            hypotheses = self._tokeniser.plain(wish.hypotheses)
        except InvalidInput as error:
            raise InvalidInput(str(error), index=error.index, param="labels") from error
        found = []
        for index, premise in enumerate(self._premises(request)):
            self._check_work(len(premise), hypotheses, index)
            texts = [
                self._pairs(premise, said, index=index, truncate=truncate, cut="only_first") for said in hypotheses
            ]
            found.append(Several(tuple(Text(tokens, None) for tokens in texts), wish))
        return found

    def _check_work(self, premise: int, hypotheses: Sequence[Sequence[int]], index: int) -> None:
        length = premise + max(map(len, hypotheses))
        tokens = min(length, self._tokeniser.limit or length) * len(hypotheses)
        if tokens > _MAX_TOKENS:
            raise InvalidInput(
                f"read with each of {len(hypotheses)} labels, the text comes to {tokens} tokens, and {_MAX_TOKENS} is "
                "the most: ask for fewer labels at a time",
                index=index, param="labels",
            )  # fmt: skip

    def _premises(self, request: BatchRequest) -> list[list[int]]:
        for index, item in enumerate(request.items):
            if item.text is None and item.token_ids is None:
                raise InvalidInput("the item has neither text nor token ids", index=index, param="input")
        found = self._tokeniser.plain([item.text or "" for item in request.items])
        for index, item in enumerate(request.items):
            if item.text is None and item.token_ids is not None:
                found[index] = self._tokeniser.check_ids(item.token_ids, index)
        return found

    # --- from hidden states to classes ----------------------------------------------------------------

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        lengths = [len(text.tokens.ids) for text in texts]
        head: SequenceHead = self._placed.modules[1]  # type: ignore[assignment]
        logits: NDArray[np.float32] = head(hidden, lengths).cpu().numpy()
        return [Scored(length, scores=row) for length, row in zip(lengths, logits, strict=True)]

    def combined(self, item: Several, scores: Sequence[NDArray[np.float32]]) -> Output:
        wish: _Wish = item.about
        if wish.hypotheses:
            shares = self._entailed(np.stack(scores), alone=wish.multi_label or len(wish.labels) == 1)
            every = dict(zip(wish.labels, shares.tolist(), strict=True))
        else:
            every = dict(zip(self._files.labels, activated(scores[0], wish.activation).tolist(), strict=True))
        best = sorted(wish.labels, key=lambda label: -every[label])[: wish.top_k]
        return ExtractOutput(item.tokens, classifications=tuple(Classification(label, every[label]) for label in best))

    def _entailed(self, logits: NDArray[np.float32], *, alone: bool) -> NDArray[np.float32]:
        """How likely each label's text follows: ``alone``, against its contradiction; else against the others."""
        assert self._files.entails is not None
        if not alone:
            return softmax(logits[:, self._files.entails])
        return softmax(logits[:, [self._files.contradicts, self._files.entails]])[:, 1]
