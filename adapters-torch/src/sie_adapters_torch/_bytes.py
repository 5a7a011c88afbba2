"""Bulk copies in RAM, by several threads.

One core reaches a part of what the memory can do, and into fresh memory most of its time goes into the kernel's
clearing of pages. Small pieces are copied while what was just cleared is still in the cache.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

__all__ = ["copy_bytes"]

_PIECE = 4 * 1024**2
_MOST_THREADS = 4


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, without the interpreter's lock."""
    helpers = min(_MOST_THREADS, _cores(), nbytes // (2 * _PIECE)) - 1
    if helpers < 1:
        ctypes.memmove(target, source, nbytes)
        return
    pieces = iter(range(0, nbytes, _PIECE))  # shared: each takes the next one
    sides = [_pool().submit(_copy_pieces, target, source, nbytes, pieces) for _ in range(helpers)]
    _copy_pieces(target, source, nbytes, pieces)
    for side in sides:
        # One that has not begun has nothing left to do: a busy pool makes a copy slower, and nothing else.
        if not side.cancel():
            side.result()


def _copy_pieces(target: int, source: int, nbytes: int, pieces: Iterator[int]) -> None:
    for start in pieces:
        ctypes.memmove(target + start, source + start, min(_PIECE, nbytes - start))


@cache
def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS - 1, "sie-copy")
