"""A pretend accelerator: a budget of RAM, set aside and touched at start as a device's memory is.

::

    budget = reserve (touched, nobody's) + live blocks + cached blocks (freed, kept for the next of that size)

Every byte is in one of the three, so the process's size stays what it was at start, and an allocation succeeds
whenever the bytes suffice: blocks are mappings of their own and can't be fragmented. What is cached is handed out again
as it is, because touching fresh pages costs six times what copying into touched ones does.

A block that was never freed comes back when nobody looks into it any more: its mapping goes to the system at once, and
the next allocation takes as much into the reserve.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import OrderedDict
from typing import Literal

from sie_core.errors import DeviceOutOfMemory
from sie_core.memory._pages import is_exported, map_touched, round_up, touch
from sie_core.units import format_bytes

__all__ = ["EmulatedBuffer", "EmulatedDevice"]


class EmulatedBuffer:
    """Bytes on an emulated device; ``view`` is writable, page-aligned and as long as was asked for.

    After ``free`` (idempotent) the view is released. Arrays that still look into it read zeros from then on and can't
    touch what others keep on the device. A buffer that is let go of is freed with the last view or array of it.
    """

    def __init__(self, device: EmulatedDevice, block: mmap.mmap | None, nbytes: int) -> None:
        self._device = device
        self._block = block
        self.nbytes = nbytes
        self.view = memoryview(block)[:nbytes] if block is not None else memoryview(bytearray())
        self._lost = None if block is None else weakref.finalize(block, device._dropped.append, len(block))
        if self._lost is not None:
            self._lost.atexit = False

    def free(self) -> None:
        """Give the bytes back."""
        self._device._take_back(self)


class EmulatedDevice:
    """An accelerator of ``nbytes`` bytes (rounded up to pages) in this process's RAM. Thread-safe.

    Raises:
        HostOutOfMemory: there is not so much RAM to map.
    """

    kind: Literal["cuda", "cpu", "emulated"] = "emulated"

    def __init__(self, name: str, nbytes: int) -> None:
        if nbytes <= 0:
            raise ValueError(f"an emulated device needs a size, and this is {nbytes}")
        self.name = name
        self._total = round_up(nbytes)
        self.description = f"emulated accelerator, {format_bytes(self._total)} of RAM"
        self._lock = threading.Lock()
        self._live = 0
        self._dropped: list[int] = []
        """Sizes of blocks that went with the last who looked into them. Garbage collection may add to it at any point,
        in a thread that holds the lock, too."""
        self._closed = False
        self._cache: OrderedDict[int, list[mmap.mmap]] = OrderedDict()
        """Freed blocks by size; the size that was used longest ago first."""
        self._reserve_map = map_touched(self._total, self.name)
        self._reserve = self._total

    def total(self) -> int:
        """Bytes of the device."""
        return self._total

    def used(self) -> int | None:
        """Bytes in live buffers, each rounded up to pages."""
        return self._live - sum(self._dropped)

    def allocate(self, nbytes: int) -> EmulatedBuffer:
        """Take ``nbytes``; what they hold is undefined, as on a device.

        Raises:
            DeviceOutOfMemory: fewer are free.
        """
        if nbytes < 0:
            raise ValueError(f"a buffer can't have {nbytes} bytes")
        size = round_up(nbytes)
        if not size:
            return EmulatedBuffer(self, None, 0)
        with self._lock:
            self._take_in_dropped()
            free = self._total - self._live if not self._closed else 0
            if size > free:
                raise DeviceOutOfMemory(
                    f"{self.name} has {format_bytes(free)} free and {format_bytes(size)} were asked for",
                    account=self.name,
                    needed=size,
                    free=free,
                )
            block = self._pop_cached(size)
            if block is None:
                self._make_way(size)
                block = map_touched(size, self.name)
            self._live += size
            return EmulatedBuffer(self, block, nbytes)

    def close(self) -> None:
        """Give the RAM that no live buffer holds back to the system. The device can't be used any more."""
        with self._lock:
            self._closed = True
            self._cache.clear()
            self._reserve = 0
            self._reserve_map.close()

    # --- inside, under the lock --------------------------------------------------------------------

    def _take_back(self, buffer: EmulatedBuffer) -> None:
        with self._lock:
            block, buffer._block = buffer._block, None
            if block is None:
                return
            with contextlib.suppress(BufferError):  # an array looks into it: then the block is exported too
                buffer.view.release()
            assert buffer._lost is not None
            buffer._lost.detach()
            size = len(block)
            self._live -= size
            if self._closed:
                return
            if is_exported(block):
                # Whoever still looks must not see the next owner's bytes: the pages go, the mapping stays for the
                # looker, and the reserve grows by as much.
                block.madvise(mmap.MADV_DONTNEED)
                touch(self._reserve_map, self._reserve, self._reserve + size)
                self._reserve += size
                return
            self._cache.setdefault(size, []).append(block)
            self._cache.move_to_end(size)

    def _take_in_dropped(self) -> None:
        """Their mappings are gone: the reserve grows by as much."""
        sizes = self._dropped[:]
        if not sizes:
            return
        del self._dropped[: len(sizes)]
        self._live -= sum(sizes)
        if not self._closed:
            touch(self._reserve_map, self._reserve, self._reserve + sum(sizes))
            self._reserve += sum(sizes)

    def _pop_cached(self, size: int) -> mmap.mmap | None:
        blocks = self._cache.get(size)
        if not blocks:
            return None
        block = blocks.pop()
        if not blocks:
            del self._cache[size]
        return block

    def _make_way(self, size: int) -> None:
        """Take ``size`` bytes out of the reserve, and of the cache when the reserve is too small."""
        touched = self._reserve
        while self._reserve < size:
            oldest = next(iter(self._cache))
            block = self._pop_cached(oldest)
            assert block is not None
            block.close()
            self._reserve += oldest
        self._reserve -= size
        if self._reserve < touched:
            self._reserve_map.madvise(mmap.MADV_DONTNEED, self._reserve, touched - self._reserve)
        else:
            touch(self._reserve_map, touched, self._reserve)
