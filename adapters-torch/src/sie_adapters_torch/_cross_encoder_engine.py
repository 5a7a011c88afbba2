"""The running cross-encoder: query and document as one input, the head's logit as the score."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EngineEvents,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSpec,
    Output,
    RequestParams,
    ScoreOutput,
    TransitionContext,
)

from sie_adapters_torch._asked import asked, one_of
from sie_adapters_torch._cross_encoder_files import CrossEncoderFiles
from sie_adapters_torch._engine import Parts
from sie_adapters_torch._options import ACTIVATIONS, Activation, CrossEncoderOptions, options_of
from sie_adapters_torch._pairs import PairTokeniser, takes_types
from sie_adapters_torch._sequence import SequenceHead, activated, load_sequence
from sie_adapters_torch._text_engine import Known, Reading, Text, TextEngine, Weights, bring_up_text
from sie_adapters_torch._tokenise import Tokens
from sie_adapters_torch.cross_encoder import capabilities_of, size_of

__all__ = ["CrossEncoderEngine", "load_cross_encoder"]


def load_cross_encoder(
    model: ModelSpec, files: CrossEncoderFiles, ctx: TransitionContext, events: EngineEvents
) -> CrossEncoderEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, CrossEncoderOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options), files.prompts)

    def read() -> Weights:
        encoder, head, config = load_sequence(files.model, options)
        return [encoder, head], config

    return bring_up_text(known, ctx, events, read, partial(CrossEncoderEngine, files=files, options=options))


class CrossEncoderEngine(TextEngine):
    """One score a document. A text's ``wish`` is its activation."""

    def __init__(
        self, parts: Parts, account: str, reading: Reading, files: CrossEncoderFiles, options: CrossEncoderOptions
    ) -> None:
        super().__init__(parts, account, reading)
        self.first_only = bool(parts.modules[1].first_only)
        self._files = files
        self._options_given = options
        before, _, after = (options.document_template or "{document}").partition("{document}")
        self._before_document = files.prompts.document + before
        suffix = self._tokeniser.plain([after])[0] if after else ()
        types = takes_types(parts.modules[0], self._tokeniser)
        self._pairs = PairTokeniser(self._tokeniser, types=types, suffix=suffix)

    # --- from a request to tokens ------------------------------------------------------------------

    def wish(self, request: BatchRequest) -> Activation:
        super().wish(request)
        if request.query is None:
            raise InvalidInput("there is no query to score the items against", param="query")
        if request.query.images:
            raise InvalidInput(f"{self._model.name} takes text only", param="query")
        found: Activation = asked(request.params, {"activation": one_of(ACTIVATIONS)}).get(
            "activation", self._files.activation
        )
        return found

    def tokens(self, request: BatchRequest) -> list[Tokens]:
        assert request.query is not None
        query = self._query(request.query, request.params)
        documents = self._documents(request.items)
        truncate = request.params.truncate
        truncate = self._options_given.truncate if truncate is None else truncate
        limit, least = self._tokeniser.limit, min(map(len, documents), default=0)
        if limit is not None and not truncate and len(query) + self._pairs.extra >= limit and least:
            # Whatever the documents are: none of them is to blame.
            raise InputTooLong(tokens=len(query) + self._pairs.extra, limit=limit, param="query")
        pair = partial(self._pairs, truncate=truncate)
        return [pair(query, document, index=index) for index, document in enumerate(documents)]

    def _query(self, query: Item, params: RequestParams) -> list[int]:
        prompts, wanted = self._files.prompts, params.instruction
        template = self._options_given.query_template or "{query}"
        if "{instruction}" in template:
            instruction = self._options_given.instruction if wanted is None else wanted
            # In one go: an instruction may hold {query}, and a query {instruction}.
            before, _, after = (part.replace("{instruction}", instruction) for part in template.partition("{query}"))
            before = prompts.query + before
        else:
            before, _, after = template.partition("{query}")
            before = (prompts.query if wanted is None else prompts.named.get(wanted, wanted)) + before
        if query.text is not None:
            return self._plain([before + query.text + after], param="query")[0]
        if query.token_ids is None:
            raise InvalidInput("the query has neither text nor token ids", param="query")
        ids = self._tokeniser.check_ids(query.token_ids, None, "query")
        first, last = self._plain([before, after], param="query")
        return [*first, *ids, *last]

    def _documents(self, items: Sequence[Item]) -> list[list[int]]:
        before, given = self._before_document, [item.text for item in items]
        for index, item in enumerate(items):
            if item.text is None and item.token_ids is None:
                raise InvalidInput("the item has neither text nor token ids", index=index, param="input")
        found = self._plain([before + (text or "") for text in given])
        for index, item in enumerate(items):
            if item.text is None and item.token_ids is not None:
                found[index] = [*found[index], *self._tokeniser.check_ids(item.token_ids, index)]
        return found

    def _plain(self, texts: Sequence[str], param: str | None = None) -> list[list[int]]:
        try:
            return self._tokeniser.plain(texts)
        except InvalidInput as error:
            if param is None:
                raise
            raise InvalidInput(str(error), param=param) from error

    # --- from hidden states to scores ---------------------------------------------------------------

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        lengths = [len(text.tokens.ids) for text in texts]
        head: SequenceHead = self._placed.modules[1]  # type: ignore[assignment]
        logits: NDArray[np.float32] = head(hidden, lengths).cpu().numpy()
        found = {wish: self._scores(logits, wish or "identity") for wish in {text.wish for text in texts}}
        return [
            ScoreOutput(tokens=length, score=float(found[text.wish][row]))
            for row, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]

    def _scores(self, logits: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = activated(logits, activation)[:, self._files.label]
        return np.where(np.isfinite(logits).all(1), scores, np.nan)  # a sigmoid would make a 1 of infinity

    def disagreement(self, output: Output) -> str | None:
        assert isinstance(output, ScoreOutput)
        return None if np.isfinite(output.score) else "its score is not finite"
