"""Host memory for copies of parked engines: blocks of exact size, on huge pages, touched once and reused.

The speed of a copy is decided by page faults: into memory that was touched before it runs at the speed of memory, into
fresh memory at a fraction of that. So blocks that come back are kept for the next copy of their size. A fresh block is
touched by the first copy itself: clearing its pages and filling them in one go costs less than one after the other.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

from sie_core.memory._pages import is_exported, map_pages, round_up

__all__ = ["Arena", "ArenaBlock"]


class ArenaBlock:
    """``view``: writable, page-aligned, as long as was asked for."""

    __slots__ = ("_map", "size", "view")

    def __init__(self, mapping: mmap.mmap, nbytes: int) -> None:
        self._map = mapping
        self.size = len(mapping)
        self.view = memoryview(mapping)[:nbytes]


class Arena:
    """Blocks by size. Thread-safe: taking runs on engines' threads, trimming on the event loop."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self.idle = 0
        """Bytes of blocks that nobody uses."""

    def take_idle(self, nbytes: int) -> ArenaBlock | None:
        """An idle block of that size, if there is one."""
        size = round_up(nbytes)
        with self._lock:
            for position, mapping in enumerate(self._idle):
                if len(mapping) == size:
                    del self._idle[position]
                    self.idle -= size
                    return ArenaBlock(mapping, nbytes)
        return None

    def take(self, nbytes: int) -> ArenaBlock:
        """A block, idle or fresh (then its pages are not there yet). Raises HostOutOfMemory."""
        return self.take_idle(nbytes) or ArenaBlock(map_pages(round_up(nbytes), "the host arena"), nbytes)

    def give_back(self, block: ArenaBlock) -> None:
        """Keep a block for the next taker; one that is still looked into goes back to the system when that ends."""
        with contextlib.suppress(BufferError):
            block.view.release()
        if not is_exported(block._map):
            with self._lock:
                self._idle.append(block._map)
                self.idle += block.size

    def trim(self, nbytes: int) -> None:
        """Give at least ``nbytes`` of idle blocks back to the system, as far as there are any; the oldest first."""
        with self._lock:
            while nbytes > 0 and self._idle:
                mapping = self._idle.pop(0)
                nbytes -= len(mapping)
                self.idle -= len(mapping)
                mapping.close()
