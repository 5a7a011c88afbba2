"""The fake engine's answers: from a hash of the text, so that a test can tell whose answer it got."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray
from sie_core import SparseVector

__all__ = ["constant", "dense", "multivector", "sparse"]


def dense(text: str, dims: int, salt: str = "") -> NDArray[np.float32]:
    """float32 (dims,), of length 1."""
    seed = hashlib.blake2b(f"{salt}\0{text}".encode("utf-8", "surrogatepass"), digest_size=32).digest()
    stream = hashlib.shake_128(seed).digest(2 * dims)
    vector = (np.frombuffer(stream, dtype="<u2").astype(np.float32) + 1.0) / 32768.0 - 1.0
    length = np.linalg.norm(vector)
    unit: NDArray[np.float32] = (vector / length).astype(np.float32)
    return unit


def constant(dims: int) -> NDArray[np.float32]:
    """float32 (dims,), of length 1, the same for every text."""
    return np.full(dims, dims**-0.5, dtype=np.float32)


def sparse(words: list[str], salt: str = "") -> SparseVector:
    """One weight a distinct word."""
    weights: dict[int, float] = {}
    for word in words:
        digest = hashlib.blake2b(f"{salt}\0{word}".encode("utf-8", "surrogatepass"), digest_size=4).digest()
        index = int.from_bytes(digest, "little") % 30_522
        weights[index] = weights.get(index, 0.0) + 1.0
    indices = np.array(sorted(weights), dtype=np.int32)
    return SparseVector(indices=indices, values=np.array([weights[i] for i in sorted(weights)], dtype=np.float32))


def multivector(words: list[str], dims: int, salt: str = "") -> NDArray[np.float32]:
    """float32 (words, dims)."""
    return np.stack([dense(f"{place}:{word}", dims, salt) for place, word in enumerate(words)])
