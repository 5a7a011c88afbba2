"""Serving: the facade that HTTP and the CLI call, and the batcher behind it."""

from sie_core.serving.batcher import Batcher, BatchLimits

__all__ = ["BatchLimits", "Batcher"]
