"""The running dense encoder: pooling, the steps after it, and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EncodeOutput,
    EngineEvents,
    ModelSpec,
    Output,
    RequestParams,
    TransitionContext,
    Unsupported,
)

from sie_adapters_torch._dense_files import DenseFiles
from sie_adapters_torch._engine import Parts
from sie_adapters_torch._options import DenseOptions, options_of
from sie_adapters_torch._pooling import Head, load_head, pool
from sie_adapters_torch._text_engine import Known, Reading, Text, TextEngine, Weights, bring_up_text
from sie_adapters_torch._weights import load_model
from sie_adapters_torch.dense import capabilities_of, size_of

__all__ = ["DenseEngine", "load_dense"]


def load_dense(model: ModelSpec, files: DenseFiles, ctx: TransitionContext, events: EngineEvents) -> DenseEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, DenseOptions)

    known = Known(model, options, files.model, capabilities_of(files), size_of(files, options), files.prompts)

    def read() -> Weights:
        encoder, config = load_model(files.model, options)
        return [encoder, load_head(files.head, files.model.hidden_size)], config

    return bring_up_text(known, ctx, events, read, partial(DenseEngine, files=files, options=options))


class DenseEngine(TextEngine):
    """One vector a text."""

    def __init__(self, parts: Parts, account: str, reading: Reading, files: DenseFiles, options: DenseOptions) -> None:
        super().__init__(parts, account, reading)
        self._files = files
        self._templates = (options.document_instruction_template, options.instruction_template)

    def prompt(self, params: RequestParams) -> str:
        """With templates an instruction is what they are filled with, or still the name of one of the prompts."""
        wanted, prompts = params.instruction, self._files.prompts
        if wanted is None or wanted in prompts.named or not any(self._templates):
            return super().prompt(params)
        template = self._templates[bool(params.is_query)]
        if template is None:
            return prompts.of(params.is_query)
        return template.replace("{instruction}", wanted)

    def wish(self, request: BatchRequest) -> int | None:
        """How many dimensions; ``None``: all."""
        wanted, full, sizes = request.params.dimensions, self._files.dims, self._files.matryoshka
        if wanted is None or wanted == full:
            return None
        if 0 < wanted < full and (sizes is None or wanted in sizes):
            return wanted
        offered = [str(full)] if not sizes else [*map(str, sizes), str(full)]
        known = f"any size up to {full}" if sizes is None else " or ".join(offered)
        raise Unsupported(
            f"{self._model.name} gives {known} dimensions, not {wanted}", supported=offered, param="dimensions"
        )

    def outputs(self, hidden: torch.Tensor, texts: Sequence[Text]) -> Sequence[Output]:
        lengths = [len(text.tokens.ids) for text in texts]
        skips = [0 if self._files.include_prompt else text.tokens.prompt for text in texts]
        pooled = pool(hidden, lengths, self._files.pooling, skips)
        head: Head = self._placed.modules[1]  # type: ignore[assignment]
        vectors: NDArray[np.float32] = head(pooled).cpu().numpy()
        return [
            EncodeOutput(tokens=len(text.tokens.ids), dense=_resized(vector, text.wish))
            for text, vector in zip(texts, vectors, strict=True)
        ]


def _resized(vector: NDArray[Any], dims: int | None) -> NDArray[np.float32]:
    """The first ``dims`` numbers, scaled to length 1 as Matryoshka models are trained to be used."""
    if dims is None:
        return vector
    if not np.isfinite(vector).all():
        return np.full(dims, np.nan, np.float32)  # also where only what is cut off is damaged
    cut = vector[:dims]
    return (cut / max(float(np.linalg.norm(cut)), 1e-12)).astype(np.float32)
