"""Scores of documents from their vectors and the query's, for models that encode both. Pure, for any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sie_core.errors import InferenceError
from sie_core.types import EncodeOutput, ScoreOutput

__all__ = ["compare", "work"]

_EACH: Final = 20_000
"""What a document costs by itself, in multiplications."""
_ROWS: Final = 32_768
"""Document tokens compared at a time."""
_TABLE: Final = 4 * 1024 * 1024
"""Similarities held at a time, 16 MiB of them: a long query is compared a part at a time."""


def compare(kind: str, query: EncodeOutput, documents: Sequence[EncodeOutput]) -> list[ScoreOutput]:
    """One score a document, in order: MaxSim for ``multivector``, cosine for ``dense``, dot product for ``sparse``.

    Raises:
        InferenceError: the engine gave no such output, or vectors that can't be compared.
    """
    score = _SCORES.get(kind)
    if score is None:
        raise InferenceError(f"outputs of kind {kind!r} can't be compared: a bug in the adapter")
    if any(getattr(output, kind) is None for output in (query, *documents)):
        raise InferenceError(f"the engine gave no {kind} output to compare: a bug in the adapter")
    try:
        scores = score(query, documents)
    except ValueError as error:  # numpy, of shapes that do not go together
        raise InferenceError(f"the engine's vectors can't be compared: {error}") from error
    values = scores.astype(float).tolist()
    return [ScoreOutput(output.tokens, value) for output, value in zip(documents, values, strict=True)]


def work(kind: str, query: EncodeOutput, documents: Sequence[EncodeOutput]) -> int:
    """How long comparing takes, roughly, in multiplications (some 14 of them a nanosecond)."""
    size = _EACH * len(documents)
    if kind == "multivector" and query.multivector is not None:
        size += query.multivector.size * sum(len(one.multivector) for one in documents if one.multivector is not None)
    return size


def _maxsim(query: EncodeOutput, documents: Sequence[EncodeOutput]) -> NDArray[np.float32]:
    """Sum over the query's tokens of the largest dot product with any of the document's; 0 for one without tokens."""
    asked = query.multivector
    assert asked is not None
    scores = np.zeros(len(documents), dtype=np.float32)
    for places, matrices in _batches(documents):
        starts = np.cumsum([0, *(len(matrix) for matrix in matrices[:-1])])
        tokens = np.concatenate(matrices).T
        step = max(1, _TABLE // tokens.shape[1])
        for first in range(0, len(asked), step):
            likeness = asked[first : first + step] @ tokens
            scores[places] += np.maximum.reduceat(likeness, starts, axis=1).sum(axis=0)
    return scores


def _batches(documents: Sequence[EncodeOutput]) -> Iterator[tuple[list[int], list[NDArray[np.float32]]]]:
    places: list[int] = []
    matrices: list[NDArray[np.float32]] = []
    rows = 0
    for place, output in enumerate(documents):
        matrix = output.multivector
        if matrix is None or not len(matrix):
            continue
        if matrices and rows + len(matrix) > _ROWS:
            yield places, matrices
            places, matrices, rows = [], [], 0
        places.append(place)
        matrices.append(matrix)
        rows += len(matrix)
    if matrices:
        yield places, matrices


def _cosine(query: EncodeOutput, documents: Sequence[EncodeOutput]) -> NDArray[np.float32]:
    asked = query.dense
    assert asked is not None
    matrix = np.stack([output.dense for output in documents if output.dense is not None])
    lengths = np.linalg.norm(matrix, axis=1) * np.linalg.norm(asked)
    lengths[lengths == 0] = 1.0
    scores: NDArray[np.float32] = matrix @ asked / lengths
    return scores


def _dot(query: EncodeOutput, documents: Sequence[EncodeOutput]) -> NDArray[np.float32]:
    asked = query.sparse
    assert asked is not None
    found = [output.sparse for output in documents if output.sparse is not None]
    size = max((int(one.indices.max()) + 1 for one in (asked, *found) if one.indices.size), default=1)
    weights = np.zeros(size, dtype=np.float32)
    weights[asked.indices] = asked.values
    return np.array([weights[one.indices] @ one.values for one in found], dtype=np.float32)


_SCORES: Final[Mapping[str, Callable[[EncodeOutput, Sequence[EncodeOutput]], NDArray[np.float32]]]] = {
    "multivector": _maxsim,
    "dense": _cosine,
    "sparse": _dot,
}
