"""The running sparse encoder: the logits of a masked language model, pooled to one weight a word."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EncodeOutput,
    EngineEvents,
    ModelSpec,
    Output,
    SparseVector,
    TransitionContext,
)

from sie_adapters_torch._engine import Parts
from sie_adapters_torch._heads import VocabularyHead, load_masked_lm
from sie_adapters_torch._options import SparseOptions, options_of
from sie_adapters_torch._sparse_files import SparseFiles
from sie_adapters_torch._text_engine import Known, Reading, Text, TextEngine, Weights, bring_up_text
from sie_adapters_torch.sparse import LOGIT_BYTES, capabilities_of, size_of

__all__ = ["SparseEngine", "load_sparse"]

_CPU_BLOCK = 1024 * 1024  # bytes of logits that stay in a core's cache until they are pooled


def load_sparse(model: ModelSpec, files: SparseFiles, ctx: TransitionContext, events: EngineEvents) -> SparseEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, SparseOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options), files.prompts)

    def read() -> Weights:
        encoder, head, config = load_masked_lm(files.model, options)
        return [encoder, head], config

    return bring_up_text(known, ctx, events, read, partial(SparseEngine, files=files, options=options))


class SparseEngine(TextEngine):
    """One sparse vector a text. A text's ``wish`` is whether ``top_k`` and ``threshold`` are applied to it."""

    def __init__(
        self, parts: Parts, account: str, reading: Reading, files: SparseFiles, options: SparseOptions
    ) -> None:
        super().__init__(parts, account, reading)
        self._files = files
        self._top_k, self._threshold = options.top_k, options.threshold
        self._block = self._texts = 1

    def begin(self) -> None:
        super().begin()
        share = LOGIT_BYTES // (self._lanes.threads if self._lanes is not None else 1)
        self._texts = max(1, share // (4 * self._files.vocabulary))
        self._block = min(share, _CPU_BLOCK) if self._lanes is not None else share

    def wish(self, request: BatchRequest) -> bool:
        super().wish(request)
        return True

    def disagreement(self, output: Output) -> str | None:
        assert isinstance(output, EncodeOutput)
        assert output.sparse is not None
        return None if np.isfinite(output.sparse.values).all() else "its weights are not finite"

    # --- from hidden states to weights -------------------------------------------------------------

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        lengths = [len(text.tokens.ids) for text in texts]
        found: list[Output] = []
        for first in range(0, len(texts), self._texts):
            chosen, tokens = slice(first, first + self._texts), sum(lengths[first : first + self._texts])
            pooled, hidden = self._pooled(hidden[:tokens], lengths[chosen]), hidden[tokens:]
            found += [self._output(text, row) for text, row in zip(texts[chosen], pooled.cpu().numpy(), strict=True)]
        return found

    def _pooled(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The weights of a few texts, float32 (texts, vocabulary): a part of the vocabulary at a time."""
        head: VocabularyHead = self._placed.modules[1]  # type: ignore[assignment]
        features, matrix, bias = head.features(hidden[None])[0], head.output.weight, head.output.bias
        words = min(self._files.vocabulary, max(1, self._block // (4 * len(hidden))))
        space = features.new_empty(len(hidden) * words)
        pooled = torch.empty(len(lengths), self._files.vocabulary, device=hidden.device)
        for first in range(0, self._files.vocabulary, words):
            part = matrix[first : first + words]
            logits = space[: len(hidden) * len(part)].view(len(hidden), len(part))
            if bias is None:
                torch.mm(features, part.t(), out=logits)
            else:
                torch.addmm(bias[first : first + words], features, part.t(), out=logits)
            self._pool(logits, lengths, pooled[:, first : first + words])
        return self._activated(pooled) if self._files.pooling == "max" else pooled

    def _pool(self, logits: torch.Tensor, lengths: Sequence[int], pooled: torch.Tensor) -> None:
        if self._files.pooling == "sum":
            logits = self._activated(logits)
        text = row = 0
        for length, same in groupby(lengths):
            count = len(list(same))
            rows = logits[row : row + count * length].view(count, length, -1)
            # The activation keeps the order: of the largest it is the largest, so it can wait.
            pooled[text : text + count] = rows.amax(1) if self._files.pooling == "max" else rows.sum(1)
            text, row = text + count, row + count * length

    def _activated(self, values: torch.Tensor) -> torch.Tensor:
        values = values.float().relu_().log1p_()
        return values.log1p_() if self._files.activation == "log1p_relu" else values

    def _output(self, text: Text, weights: NDArray[np.float32]) -> EncodeOutput:
        top_k, threshold = (self._top_k, self._threshold) if text.wish else (None, 0.0)
        # What is not a number is above every threshold and among every top: the core refuses the text for it.
        indices = np.flatnonzero(~(weights <= threshold))
        if top_k is not None and len(indices) > top_k and np.isfinite(weights).all():
            # Of equal weights the first ones.
            indices = np.sort(indices[np.argsort(-weights[indices], kind="stable")[:top_k]])
        vector = SparseVector(indices.astype(np.int32), weights[indices])
        return EncodeOutput(tokens=len(text.tokens.ids), sparse=vector)
