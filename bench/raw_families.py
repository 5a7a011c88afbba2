"""The raw models of other families in this process: a few lines of user code with transformers and torch, no server.

As ``raw_model.py`` for dense vectors. They are what the server is measured against.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from family_models import DOCUMENT_MARKER
from numpy.typing import NDArray
from raw_model import RawModel
from workload import reranks, texts, windows

__all__ = ["FAMILIES", "RERANKS", "Family", "RawMultivector", "RawReranker", "RawSparse"]

RERANKS = 24
"""Requests to be ranked; they come round again."""
_PAIRS = 32

Floats = NDArray[np.float32]


class RawReranker:
    """Scores of pairs, the longest first, in padded batches: as ``CrossEncoder.predict`` of sentence-transformers."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()

    def encode(self, request: tuple[str, Sequence[str]]) -> list[float]:
        query, documents = request
        order = sorted(range(len(documents)), key=lambda index: -len(documents[index]))
        scores = [0.0] * len(documents)
        with self._torch.inference_mode():
            for first in range(0, len(order), _PAIRS):
                chosen = order[first : first + _PAIRS]
                batch = self._tokenizer(
                    [query] * len(chosen), [documents[index] for index in chosen],
                    padding=True, truncation=True, return_tensors="pt",
                )  # fmt: skip
                found = self._model(**batch).logits.sigmoid()[:, 0].tolist()
                for index, score in zip(chosen, found, strict=True):
                    scores[index] = score
        return scores


class RawSparse:
    """SPLADE's formula: the largest log(1 + relu(logit)) of each word over a text's tokens."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModelForMaskedLM.from_pretrained(folder, local_files_only=True).eval()

    def encode(self, given: Sequence[str]) -> list[tuple[NDArray[np.int64], Floats]]:
        """Words and their weights, a text at a time."""
        torch = self._torch
        with torch.inference_mode():
            batch = self._tokenizer(list(given), padding=True, truncation=True, max_length=512, return_tensors="pt")
            logits = self._model(**batch).logits
            weights = torch.log1p(torch.relu(logits)) * batch["attention_mask"][..., None]
            rows = weights.amax(1).numpy()
        return [(words, row[words]) for row in rows for words in (np.flatnonzero(row),)]


class RawMultivector:
    """ColBERT's documents: a marker after the first token, a projection, vectors of length 1, no punctuation."""

    def __init__(self, folder: str) -> None:
        import torch
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoTokenizer, BertModel

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tensors = load_file(Path(folder) / "model.safetensors")
        self._projection = tensors.pop("linear.weight").t().contiguous()
        inner = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._model: Any = BertModel(config, add_pooling_layer=False)
        self._model.load_state_dict(inner)
        self._model.train(False)
        known = self._tokenizer.get_vocab()
        self._marker = known[DOCUMENT_MARKER]
        self._skipped = torch.tensor([known[sign] for sign in string.punctuation if sign in known])

    def encode(self, given: Sequence[str]) -> list[Floats]:
        torch = self._torch
        with torch.inference_mode():
            batch = self._tokenizer(list(given), padding=True, truncation=True, max_length=179, return_tensors="pt")
            ids, mask = batch["input_ids"], batch["attention_mask"]
            marker = torch.full((len(ids), 1), self._marker)
            ids = torch.cat([ids[:, :1], marker, ids[:, 1:]], dim=1)
            mask = torch.cat([mask[:, :1], torch.ones_like(marker), mask[:, 1:]], dim=1)
            hidden = self._model(input_ids=ids, attention_mask=mask)[0]
            vectors = torch.nn.functional.normalize(hidden @ self._projection, dim=2)
            kept = (mask.bool() & ~torch.isin(ids, self._skipped)).numpy()
            return [rows[those] for rows, those in zip(vectors.numpy(), kept, strict=True)]


# --- what a turn needs to know of each ------------------------------------------------------------------


@frozen
class Family:
    """``windows(size)``: what ``model(folder).encode`` is called with. ``figures``: a result in a few numbers."""

    model: Callable[[str], Any]
    windows: Callable[[int], Iterable[Any]]
    figures: Callable[[Any], list[float]]


def _texts(size: int) -> Iterable[list[str]]:
    return windows(texts(), size)


FAMILIES = {
    "dense": Family(RawModel, _texts, lambda found: [float(number) for number in found[0]]),
    "rerank": Family(RawReranker, lambda size: reranks(RERANKS, size), lambda found: list(found)),
    "sparse": Family(RawSparse, _texts, lambda found: [float(number) for number in found[0][1]]),
    "multivector": Family(RawMultivector, _texts, lambda found: [float(number) for number in found[0].ravel()]),
}
