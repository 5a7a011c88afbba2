"""The running BGE-M3: one pass of the encoder, and of its hidden states whatever the requests ask for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

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
from torch.nn.functional import normalize

from sie_adapters_torch._bge_m3_files import COLBERT, SPARSE, BgeM3Files
from sie_adapters_torch._engine import Parts
from sie_adapters_torch._options import BgeM3Options, options_of
from sie_adapters_torch._text_engine import Known, Reading, Text, TextEngine, Weights, bring_up_text
from sie_adapters_torch._weights import load_linear, load_model
from sie_adapters_torch.bge_m3 import capabilities_of, size_of

__all__ = ["BgeM3Engine", "load_bge_m3"]

_UNSCORED = ("cls_token", "eos_token", "pad_token", "unk_token")


def load_bge_m3(model: ModelSpec, files: BgeM3Files, ctx: TransitionContext, events: EngineEvents) -> BgeM3Engine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, BgeM3Options)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options), files.prompts)

    def read() -> Weights:
        encoder, config = load_model(files.model, options)
        folder, hidden = files.model.folder, files.model.hidden_size
        heads = [load_linear(folder, SPARSE, hidden, 1), load_linear(folder, COLBERT, hidden, files.dims)]
        return [encoder, *heads], config

    return bring_up_text(known, ctx, events, read, BgeM3Engine)


class BgeM3Engine(TextEngine):
    """A text's ``wish`` are the outputs that are wanted of it; ``None``: all."""

    def __init__(self, parts: Parts, account: str, reading: Reading) -> None:
        super().__init__(parts, account, reading)
        specials = reading.tokeniser.special_ids
        unscored = {specials[name] for name in _UNSCORED if name in specials}
        self._scored = ~np.isin(np.arange(reading.tokeniser.vocabulary), list(unscored))

    def wish(self, request: BatchRequest) -> tuple[str, ...]:
        super().wish(request)
        return tuple(request.params.output_types)

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        _, sparse, colbert = self._placed.modules
        lengths = [len(text.tokens.ids) for text in texts]
        starts = list(accumulate(lengths[:-1], initial=0))
        wanted = [text.wish or self.capabilities.outputs for text in texts]
        asked = {name for names in wanted for name in names}
        hidden = hidden.float()
        dense = weights = vectors = None
        if "dense" in asked:
            dense = _numpy(normalize(hidden[torch.tensor(starts, device=hidden.device)], dim=1))
        if "sparse" in asked:
            weights = _numpy(torch.relu(sparse(hidden)).squeeze(1))
        if "multivector" in asked:
            vectors = _numpy(normalize(colbert(hidden), dim=1))
        found: list[Output] = []
        for index, (text, start, length) in enumerate(zip(texts, starts, lengths, strict=True)):
            rows, names = slice(start, start + length), wanted[index]
            one = EncodeOutput(
                tokens=length,
                dense=np.array(dense[index]) if dense is not None and "dense" in names else None,
                sparse=self._sparse(text.tokens.ids, weights[rows])
                if weights is not None and "sparse" in names
                else None,
                # The first token stands for the whole text; its vector is the dense one's.
                multivector=np.array(vectors[rows][1:]) if vectors is not None and "multivector" in names else None,
            )
            found.append(one)
        return found

    def _sparse(self, ids: NDArray[np.int64], weights: NDArray[np.float32]) -> SparseVector:
        """The largest weight that each word has, special tokens left out."""
        kept = self._scored[ids] & ~(weights <= 0)  # what is not a number stays: the core refuses the text for it
        order = np.argsort(ids[kept], kind="stable")
        ids, weights = ids[kept][order], weights[kept][order]
        first = np.flatnonzero(np.diff(ids, prepend=-1))
        largest = np.maximum.reduceat(weights, first) if len(first) else weights
        return SparseVector(ids[first].astype(np.int32), largest)


def _numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = tensor.cpu().numpy()
    return found
