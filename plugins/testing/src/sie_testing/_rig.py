"""Loads, parks, wakes and closes one engine as the core does, and counts what it is given."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field
from sie_core import (
    Adapter,
    AdmissionReserve,
    Device,
    DeviceBuffer,
    Engine,
    HostOffload,
    HostResidue,
    ModelSpec,
    TransitionContext,
    format_bytes,
)

from sie_testing._lifecycle import Events, LifecycleConformance, call_hook, make_context, park, parkable

__all__ = ["Rig", "process_memory", "process_peak", "shown", "start_of_peak"]

_PAGE = mmap.PAGESIZE
_ALIGN = 64
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20


@define(eq=False)
class Rig:
    """One engine at a time, on the suite's device."""

    suite: type[LifecycleConformance]
    adapter: Adapter
    model: ModelSpec
    plugin: Any
    reserve: AdmissionReserve
    device: Device | None
    engine: Engine = field(init=False)
    announced: int = 0
    """Host bytes that the plugin said a park would take."""
    taken: int = 0
    """Host bytes that were asked for since then."""
    peak: int = 0
    """The most that was in buffers of the device."""
    _base: int = 0
    _buffers: int = 0
    _copies: list[weakref.ref[mmap.mmap]] = field(factory=list)
    _open: bool = False

    # --- what the core does ---

    def load(self) -> Engine:
        """A new engine; the one before must be closed."""
        assert not self._open
        self._base = self._used()
        self.announced = self.taken = self.peak = self._buffers = 0
        self.engine = self.suite.blocking(self.adapter.load, self.model, self.context(), Events())
        assert isinstance(self.engine, self.suite.engine_class)
        self._open = True
        return self.engine

    def announce(self) -> int:
        """Host bytes that a park will take, or the test is skipped."""
        self.announced = parkable(self.plugin, self.engine)
        return self.announced

    def park(self) -> HostOffload:
        return self.suite.blocking(park, self.plugin, self.engine, self.context())

    def wake(self) -> HostResidue:
        residue = self.suite.blocking(
            lambda: call_hook(self.plugin, "restore_from_host", engine=self.engine, ctx=self.context())
        )
        assert isinstance(residue, HostResidue), (
            "restore_from_host must answer for an engine that offload_to_host parked"
        )
        if not residue.host_bytes:
            self.taken = 0  # the core gives its buffers to the next
        return residue

    def drop(self) -> int:
        self.taken = 0
        return self.suite.blocking(self.engine.drop_backup)

    def probe(self) -> bytes | None:
        return self.suite.blocking(self.engine.probe, self.context())

    def alive(self) -> object:
        return self.suite.blocking(self.engine.alive)

    def close(self) -> None:
        """Close it, if it is open."""
        if self._open:
            self._open = False
            self.suite.shut(self.engine, self.context())

    def context(self) -> TransitionContext:
        """The reserve granted in full; buffers are counted."""
        ctx = make_context(self.reserve, self.device, account=self.model.device or "cpu")
        ctx.host_buffer = self._host_buffer
        if self.device is not None and self.device.kind == "emulated":
            give = ctx.device_buffer
            ctx.device_buffer = lambda account, nbytes: self._device_buffer(give, account, nbytes)
        return ctx

    # --- what it was given ---

    @property
    def promised(self) -> int:
        """Device bytes that were reserved for good, on all its devices."""
        return sum(max(need.min_bytes, need.want_bytes) + need.context_bytes for need in self.reserve.ranks)

    @property
    def slack(self) -> int:
        """What rounding to pages may add to the device bytes."""
        return _PAGE * self._buffers

    def on_device(self) -> int:
        """Bytes that its buffers hold on the emulated device; the test is skipped where the device can't tell."""
        if self.device is None or self.device.kind != "emulated":
            pytest.skip(
                "only on an emulated device is it known what an engine holds: leave the fixture `device` as it is"
            )
        gc.collect()
        return self._used() - self._base

    def said(self) -> int | None:
        """Device bytes that the engine says it holds; ``None``: it can't tell."""
        held = self.suite.blocking(self.engine.memory).devices.values()
        return None if None in held else sum(nbytes or 0 for nbytes in held)

    def on_host(self) -> int:
        """Bytes of its host buffers that somebody still looks into."""
        gc.collect()
        return sum(len(block) for block in self._live())

    def damage_copy(self) -> bool:
        """Change every number of the parked copy; ``False``: there is none in the host buffers.

        Signs and lowest exponents or highest mantissas: floats of any size stay finite.
        """
        blocks = self._live()
        for block in blocks:
            flipped = bytes(each ^ 0x80 for each in range(256))
            for start in range(0, len(block), 1 << 20):
                piece = block[start : start + (1 << 20)]
                block[start : start + len(piece)] = piece.translate(flipped)
        return bool(blocks)

    # --- inside ---

    def _used(self) -> int:
        used = self.device.used() if self.device is not None else None
        return used or 0

    def _live(self) -> Sequence[mmap.mmap]:
        blocks = [(ref, ref()) for ref in self._copies]
        self._copies = [ref for ref, block in blocks if block is not None]
        return [block for _, block in blocks if block is not None]

    def _host_buffer(self, nbytes: int) -> memoryview:
        self.taken = -(-self.taken // _ALIGN) * _ALIGN + nbytes
        block = mmap.mmap(-1, max(nbytes, 1))
        self._copies.append(weakref.ref(block))
        return memoryview(block)[:nbytes]

    def _device_buffer(self, give: Callable[[str, int], DeviceBuffer], account: str, nbytes: int) -> DeviceBuffer:
        buffer = give(account, nbytes)
        self._buffers += 1
        self.peak = max(self.peak, self._used() - self._base)
        return buffer


# --- the process's own memory ----------------------------------------------------------------------

_STATUS = Path("/proc/self/status")


def process_memory() -> int:
    """Bytes of this process that are in no file; the test is skipped where the system does not tell."""
    gc.collect()
    _trim()
    return _field("RssAnon")


def start_of_peak() -> int:
    """Forget the process's peak. Returns what it has now, files included."""
    gc.collect()
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not let a process forget its peak (/proc/self/clear_refs)")
    return _field("VmRSS")


def process_peak() -> int:
    """The most that the process has had since, files included."""
    return _field("VmHWM")


def _field(name: str) -> int:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        pytest.skip("this system does not tell a process's memory (/proc/self/status)")
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    pytest.skip(f"this system does not tell {name} (/proc/self/status)")


def _trim() -> None:
    """Have the allocator give back what it keeps, where it can."""
    trim = _allocator()
    if trim is not None:
        trim(0)


@cache
def _allocator() -> Callable[[int], object] | None:
    """glibc's ``malloc_trim``, once large blocks are told to go back to the system as soon as they are free.

    By itself it keeps more and more of them, and what is leaked then hides in what was kept.
    """
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    trim: Callable[[int], object] | None = getattr(library, "malloc_trim", None)
    if trim is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
    return trim


def shown(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"
