"""Pages of anonymous memory: mapped on huge pages where the kernel has them, and touched."""

from __future__ import annotations

import contextlib
import mmap
import sys

from sie_core.errors import HostOutOfMemory
from sie_core.units import format_bytes

__all__ = ["is_exported", "map_pages", "map_touched", "round_up", "touch"]

_PAGE = mmap.PAGESIZE
_PIECE = 4 * 1024**2
_POPULATE_WRITE = 23 if sys.platform == "linux" else -1
"""MADV_POPULATE_WRITE, which the mmap module does not name: has the pages made in one call."""


def round_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def touch(block: mmap.mmap, start: int, end: int) -> None:
    """Have every page there. In pieces, because each keeps Python's other threads waiting."""
    for piece in range(start, end, _PIECE):
        size = min(_PIECE, end - piece)
        try:
            block.madvise(_POPULATE_WRITE, piece, size)
        except OSError:  # not Linux, or older than 5.14
            block[piece : piece + size : _PAGE] = bytes(-(-size // _PAGE))


def is_exported(block: mmap.mmap) -> bool:
    """Whether anybody looks into the block: then it refuses to be resized, even to the size it has."""
    try:
        block.resize(len(block))
    except BufferError:
        return True
    except (SystemError, OSError, ValueError):
        pass  # no resizing on this platform; the check comes first
    return False


def map_pages(nbytes: int, whose: str) -> mmap.mmap:
    """A fresh mapping, whose pages are made when they are first written. Raises HostOutOfMemory."""
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
    return block


def map_touched(nbytes: int, whose: str) -> mmap.mmap:
    """A fresh mapping, every page of it there. Raises HostOutOfMemory."""
    block = map_pages(nbytes, whose)
    touch(block, 0, nbytes)
    return block
