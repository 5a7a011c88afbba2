"""How much host memory there is: the machine's, and no more than the process's cgroups leave.

A container's limit may sit on any ancestor, in either version of cgroups, and the page cache counts as used there
although the kernel gives it back on demand. So for every level: headroom = limit - (usage - reclaimable page cache).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, Protocol

import psutil  # type: ignore[import-untyped, unused-ignore]
from attrs import frozen

from sie_core.memory._cgroups import Level, find_levels, read_pressure
from sie_core.memory._hugepages import free_huge_pages, set_aside

__all__ = ["CgroupLevel", "HostMemory", "host_cache_budget"]

_AUTO_SHARE = 4
_SOME_AVG10 = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)


class _Virtual(Protocol):
    """What is read of ``psutil.virtual_memory()``, in bytes."""

    @property
    def total(self) -> int: ...

    @property
    def available(self) -> int: ...


@frozen
class CgroupLevel:
    """One limited level of the process's cgroups. Bytes; ``headroom`` may be negative (over ``memory.high``)."""

    path: str
    version: Literal[1, 2]
    limit: int
    usage: int
    reclaimable: int

    @property
    def headroom(self) -> int:
        return self.limit - (self.usage - self.reclaimable)


class HostMemory:
    """The memory of this process's host. ``root`` and ``virtual_memory`` let it read a made-up machine.

    Every method reads anew, and raises HostMemoryError when a level has a limit whose usage can't be read: taking that
    for "no limit" is how servers get killed.
    """

    def __init__(
        self, root: str | Path = "/", *, virtual_memory: Callable[[], _Virtual] = psutil.virtual_memory
    ) -> None:
        self._root = Path(root)
        self._virtual_memory = virtual_memory

    def available(self, *, reclaim: bool = True) -> int:
        """Bytes that this process can still take before the machine or any of its cgroups runs out. At least 0.

        ``reclaim=False``: as programs count that take a cgroup's page cache for used.
        """
        headrooms = [level.headroom - (0 if reclaim else level.reclaimable) for level in self.levels()]
        return max(0, min([self._virtual_memory().available, *headrooms]))

    def limit(self) -> int | None:
        """The smallest limit of the process's cgroups, in bytes; ``None``: there is none."""
        return min((limit for _, limit in self._limits()), default=None)

    def physical(self) -> int:
        """Bytes of RAM in the machine, without the huge pages that were set aside: only who asks for those has them."""
        return max(0, int(self._virtual_memory().total) - set_aside(self._root))

    def free_huge_pages(self, page_bytes: int) -> int:
        """Bytes of the huge pages of this size that are set aside, and neither in use nor reserved."""
        return free_huge_pages(self._root, page_bytes)

    def total(self) -> int:
        """Bytes that this process may ever have: the limit, or the machine's RAM."""
        limit = self.limit()
        return self.physical() if limit is None else min(limit, self.physical())

    def pressure(self) -> float | None:
        """Percent of the last 10 s in which some task waited for memory; ``None``: the kernel does not say.

        Of the process's own cgroup where that keeps count (version 2), else of the whole machine, whose other
        containers may wait for memory that is none of ours to give.
        """
        own = (level.pressure() for level in find_levels(self._root))
        texts = (*own, read_pressure(self._root / "proc/pressure/memory"))
        found = next((match for text in texts if text and (match := _SOME_AVG10.search(text))), None)
        return float(found[1]) if found else None

    def levels(self) -> list[CgroupLevel]:
        """Every level with a limit, innermost first."""
        found = []
        for level, limit in self._limits():
            usage = level.usage()
            # The cache can't be larger than what it is part of; the two files are not read at the same instant.
            reclaimable = min(usage, level.reclaimable())
            found.append(CgroupLevel(str(level.path), level.version, limit, usage, reclaimable))
        return found

    def _limits(self) -> Iterator[tuple[Level, int]]:
        for level in find_levels(self._root):
            limit = level.limit()
            if limit is not None:
                yield level, limit


def host_cache_budget(setting: Literal["auto"] | int, *, accelerator: bool, limit: int | None, physical: int) -> int:
    """Bytes for parked engines and backups. ``auto``: a quarter of the host with an accelerator, else 0 (off).

    ``limit`` is the container's (``None``: none), ``physical`` the machine's RAM.

    Raises:
        ValueError: neither ``auto`` nor a number of bytes.
    """
    if setting == "auto":
        # Without an accelerator a parked engine sits in the same RAM as a resident one: nothing is won.
        return (min(limit, physical) if limit is not None else physical) // _AUTO_SHARE if accelerator else 0
    if isinstance(setting, bool) or not isinstance(setting, int) or setting < 0:
        raise ValueError(f"the host cache budget is {setting!r}: give 'auto', 0 for off, or a number of bytes")
    return setting
