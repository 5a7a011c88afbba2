"""Serving: the facade that HTTP and the CLI call, and the batcher behind it."""

from __future__ import annotations

from sie_core.serving._allowance import Allowance
from sie_core.serving.batcher import Batcher, BatchLimits
from sie_core.serving.explain import Departure, Explanation
from sie_core.serving.generate import Emit, GenerateResult
from sie_core.serving.service import EncodeResult, ExtractResult, ScoreResult, ServerStatus, Service

__all__ = [
    "Allowance",
    "BatchLimits",
    "Batcher",
    "Departure",
    "Emit",
    "EncodeResult",
    "Explanation",
    "ExtractResult",
    "GenerateResult",
    "ScoreResult",
    "ServerStatus",
    "Service",
]
