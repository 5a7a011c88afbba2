"""Pages of anonymous memory: mapped on huge pages where the kernel has them, and touched."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from sie_core.errors import HostOutOfMemory
from sie_core.units import format_bytes

__all__ = ["is_exported", "map_touched", "round_up", "touch"]

_PAGE = mmap.PAGESIZE
_PIECE = 4 * 1024**2
_MOST_THREADS = 4
_WORTH_A_THREAD = 32 * 1024**2
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux: has the pages made in one call."""


def round_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def touch(block: mmap.mmap, start: int, end: int) -> None:
    """Have every page there. Clearing pages is the kernel's work on the caller's core, so several cores share it."""
    helpers = min(_MOST_THREADS, os.cpu_count() or 1, (end - start) // _WORTH_A_THREAD)
    if helpers < 2:
        _touch(block, start, end)
        return
    share = round_up(-(-(end - start) // helpers))
    starts = range(start, end, share)
    try:
        with ThreadPoolExecutor(len(starts), "sie-pages") as pool:
            list(pool.map(lambda first: _touch(block, first, min(first + share, end)), starts))
    except RuntimeError:  # no more threads are to be had: slower, nothing else
        _touch(block, start, end)


def _touch(block: mmap.mmap, start: int, end: int) -> None:
    advise = _madvise()
    if advise is not None:
        first = ctypes.c_char.from_buffer(block, start)
        try:
            if advise(ctypes.addressof(first), end - start, _POPULATE_WRITE) == 0:
                return
        finally:
            del first  # it keeps the block from being closed
    for piece in range(start, end, _PIECE):  # not Linux, or older than 5.14
        size = min(_PIECE, end - piece)
        block[piece : piece + size : _PAGE] = bytes(-(-size // _PAGE))


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C library's, called without the interpreter's lock: that of the mmap module holds it for seconds."""
    if sys.platform != "linux":
        return None
    function: Any = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function  # type: ignore[no-any-return]


def is_exported(block: mmap.mmap) -> bool:
    """Whether anybody looks into the block: then it refuses to be resized, even to the size it has."""
    try:
        block.resize(len(block))
    except BufferError:
        return True
    except (SystemError, OSError, ValueError):
        pass  # no resizing on this platform; the check comes first
    return False


def map_touched(nbytes: int, whose: str) -> mmap.mmap:
    """A fresh mapping, every page of it there. Raises HostOutOfMemory."""
    try:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise HostOutOfMemory(
            f"{whose}: {format_bytes(nbytes)} of RAM can't be had: {error}", account="host", needed=nbytes
        ) from error
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
            block.madvise(advice)
    touch(block, 0, nbytes)
    return block
