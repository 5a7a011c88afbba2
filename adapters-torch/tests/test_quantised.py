"""Packed vectors are those of sentence-transformers, bit for bit."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from sentence_transformers import quantize_embeddings
from sie_core.http.vectors import convert

VECTORS = np.random.default_rng(3).normal(size=(64, 100)).astype(np.float32)
RANGES = np.stack([VECTORS[:16].min(axis=0), VECTORS[:16].max(axis=0)])
RANGES[:, 5] = 0.25
"""Some numbers are outside of their range, and one dimension has none."""


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_signs(dtype: Literal["binary", "ubinary"]) -> None:
    expected = np.asarray(quantize_embeddings(VECTORS, precision=dtype))
    found = convert(VECTORS, dtype)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_steps_of_given_ranges(dtype: Literal["int8", "uint8"]) -> None:
    expected = np.asarray(quantize_embeddings(VECTORS, precision=dtype, ranges=RANGES))
    found = np.stack([convert(vector, dtype, RANGES) for vector in VECTORS])
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
