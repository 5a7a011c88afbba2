"""The running multi-vector encoder: which tokens there are, and which of their vectors count."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from attrs import evolve
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EncodeOutput,
    EngineEvents,
    ModelSourceInvalid,
    ModelSpec,
    Output,
    TransitionContext,
)

from sie_adapters_torch._engine import Parts
from sie_adapters_torch._multivector_files import INLINE, MultivectorFiles
from sie_adapters_torch._options import MultivectorOptions, options_of
from sie_adapters_torch._pooling import Head, load_head
from sie_adapters_torch._text_engine import Known, Reading, Text, TextEngine, Weights, bring_up_text
from sie_adapters_torch._tokenise import Tokens
from sie_adapters_torch._weights import checkpoint_tensors, load_model
from sie_adapters_torch.multivector import capabilities_of, size_of

__all__ = ["MultivectorEngine", "load_multivector"]


def load_multivector(
    model: ModelSpec, files: MultivectorFiles, ctx: TransitionContext, events: EngineEvents
) -> MultivectorEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, MultivectorOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options), files.prompts)

    def read() -> Weights:
        encoder, config = load_model(files.model, options)
        inline = checkpoint_tensors(files.model, [INLINE])[INLINE] if files.inline else None
        return [encoder, load_head(files.head, files.model.hidden_size, inline)], config

    return bring_up_text(known, ctx, events, read, partial(MultivectorEngine, files=files))


class MultivectorEngine(TextEngine):
    """One matrix a text. A text's ``wish`` is whether it is a query."""

    def __init__(self, parts: Parts, account: str, reading: Reading, files: MultivectorFiles) -> None:
        super().__init__(parts, account, reading)
        self._files = files
        self._markers = {True: self._marker(files.query.prefix), False: self._marker(files.document.prefix)}
        self._filler = reading.tokeniser.filler_id
        if files.expansion is not None and files.expansion.token is not None:
            filler = reading.tokeniser.id_of(files.expansion.token)
            if filler is None:
                raise ModelSourceInvalid(f"{parts.folder}: the tokenizer has no token {files.expansion.token!r}")
            self._filler = filler
        # A word without a token of its own is left in: leaving out the one for unknown words would be too much.
        ids = [reading.tokeniser.id_of(word) for word in files.skipped]
        self._kept = np.ones(reading.tokeniser.vocabulary, dtype=np.bool_)
        self._kept[[each for each in ids if each is not None]] = False

    def _marker(self, prefix: str) -> int | None:
        found = self._tokeniser.id_of(prefix) if prefix else None
        if prefix and found is None:
            raise ModelSourceInvalid(
                f"{self._folder}: {prefix!r} goes before a text and is no token of the model; set query_prefix and "
                "document_prefix, which may be empty"
            )
        return found

    def wish(self, request: BatchRequest) -> bool:
        super().wish(request)
        return bool(request.params.is_query)

    def sample_text(self) -> Text:
        return evolve(super().sample_text(), wish=True)  # no vector of a query is left out

    def tokens(self, request: BatchRequest) -> list[Tokens]:
        params, files = request.params, self._files
        side = files.query if params.is_query else files.document
        found = self.tokenise(
            request.items, params, self.prompt(params), limit=side.length, marker=self._markers[bool(params.is_query)]
        )
        if not params.is_query or files.expansion is None:
            return found
        return [self._expanded(tokens, files.expansion.length, attend=files.expansion.attend) for tokens in found]

    def _expanded(self, tokens: Tokens, length: int, *, attend: bool) -> Tokens:
        missing = (self._tokeniser.within(length) or length) - len(tokens.ids)
        if missing <= 0:
            return tokens
        ids = np.concatenate([tokens.ids, np.full(missing, self._filler, np.int64)])
        return evolve(tokens, ids=ids, seen=None if attend else len(tokens.ids), read=len(tokens.ids))

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        head: Head = self._placed.modules[1]  # type: ignore[assignment]
        vectors: NDArray[np.float32] = head(hidden.float()).cpu().numpy()
        found, start = [], 0
        for text in texts:
            ids = text.tokens.ids
            rows, start = vectors[start : start + len(ids)], start + len(ids)
            kept = self._kept[ids] if not text.wish or self._files.skips_queries else slice(None)
            # A copy in either case: a part would keep the whole batch.
            found.append(EncodeOutput(tokens=text.tokens.read_tokens, multivector=np.array(rows[kept])))
        return found
