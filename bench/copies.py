"""Parks and wakes through the plugins' own hooks, on weights of any size, beside plain copies of as many bytes."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import define, field, frozen
from sie_adapters_torch.offload import OffloadsTensors, forget
from sie_core import Device, DeviceBuffer, HostOffload, HostResidue, MemoryReport, TransitionContext
from sie_core.memory._pages import map_touched
from sie_core.memory.arena import Arena, ArenaBlock
from sie_core.plugins import Plugins

__all__ = ["BulkEngine", "Hooks", "Memcpy", "Turn", "huge_bytes", "take_turn"]

_WIDTH = 1024
_TENSORS = 64
_STEP = _TENSORS * _WIDTH * 4


class Memcpy:
    """A plain copy between two buffers on huge pages, both touched before: as fast as memory is here."""

    def __init__(self, nbytes: int) -> None:
        self._blocks = [map_touched(nbytes, "the benchmark") for _ in range(2)]
        self._addresses = [address_of(memoryview(block)) for block in self._blocks]
        self.nbytes = nbytes

    def seconds(self) -> float:
        """Time of one copy."""
        began = time.perf_counter()
        ctypes.memmove(self._addresses[0], self._addresses[1], self.nbytes)
        return time.perf_counter() - began


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


class BulkEngine(OffloadsTensors):
    """An engine with random weights and little to say: 64 tensors, on an emulated device in one buffer."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.devices = (device.name,)
        self.nbytes = nbytes // _STEP * _STEP
        self.buffer: DeviceBuffer | None = None
        parts: Sequence[torch.Tensor]
        if device.kind == "emulated":
            self.buffer = device.allocate(self.nbytes)
            parts = torch.from_numpy(np.frombuffer(self.buffer.view, dtype=np.float32)).chunk(_TENSORS)
        else:
            count = self.nbytes // _TENSORS // 4
            parts = [torch.empty(count, dtype=torch.float32, device=device.name) for _ in range(_TENSORS)]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(part.uniform_(-1, 1).view(-1, _WIDTH), requires_grad=False) for part in parts
        )

    def memory(self) -> MemoryReport:
        return MemoryReport({self.devices[0]: sum(each.nbytes for each in self.weights)})

    def answer(self) -> torch.Tensor:
        """A look at all the weights, float64 (64,); the same bits as long as they are the same."""
        return torch.stack([each.sum(dtype=torch.float64) for each in self.weights]).cpu()

    def close(self, ctx: TransitionContext) -> None:
        forget(self)
        self.weights = torch.nn.ParameterList()
        if self.buffer is not None:
            self.buffer.free()


@define
class Hooks:
    """The core's part of a park and a wake, as far as bytes are concerned: the arena, the device, the hooks."""

    engine: OffloadsTensors
    device: Device
    arena: Arena = field(factory=Arena)
    plugins: Plugins = field(factory=Plugins.load)
    _block: ArenaBlock | None = None

    def park(self) -> float:
        """Seconds that the park took, the taking of host memory included."""
        return self._timed("offload_to_host", HostOffload)

    def wake(self) -> float:
        """Seconds that the wake took."""
        return self._timed("restore_from_host", HostResidue)

    def drop_backup(self) -> None:
        """Drop the copy that survived the wake: its memory lies idle in the arena then, touched."""
        if self.engine.drop_backup() and self._block is not None:
            self.arena.give_back(self._block)
            self._block = None

    def _timed(self, hook: str, answer: type) -> float:
        ctx = TransitionContext(host_buffer=self._take, device_buffer=self._allocate)
        began = time.perf_counter()
        found = self.plugins.ask(hook, owner=None, engine=self.engine, ctx=ctx)
        took = time.perf_counter() - began
        if not isinstance(found, answer):
            raise RuntimeError(f"{hook} answered {found!r}")
        return took

    def _take(self, nbytes: int) -> memoryview:
        if self._block is not None:
            raise RuntimeError("a second host buffer was asked for: this copy was to be kept")
        self._block = self.arena.take(nbytes)
        return self._block.view

    def _allocate(self, account: str, nbytes: int) -> DeviceBuffer:
        return self.device.allocate(nbytes)


@frozen
class Turn:
    """Seconds, each beside those of a plain copy of as many bytes that was made just before."""

    first_park: tuple[float, float]
    """Into fresh host memory."""
    again: tuple[float, float]
    """Into host memory that lay idle in the arena."""
    kept: tuple[float, float]
    """With a backup that survived the wake."""
    wake: tuple[float, float]
    huge: float
    """What part of the fresh host memory was on huge pages."""


def take_turn(hooks: Hooks, copy: Memcpy) -> Turn:
    """Park into fresh memory, with a kept backup, and into idle memory; the wake is the middle of three."""
    wakes: list[tuple[float, float]] = []

    def wake() -> None:
        wakes.append((hooks.wake(), copy.seconds()))

    beside, before = copy.seconds(), huge_bytes()
    first = (hooks.park(), beside)
    huge = (huge_bytes() - before) / copy.nbytes
    wake()
    beside = copy.seconds()
    kept = (hooks.park(), beside)
    wake()
    hooks.drop_backup()
    beside = copy.seconds()
    again = (hooks.park(), beside)
    wake()
    hooks.drop_backup()
    hooks.arena.trim(hooks.arena.idle)
    return Turn(first, again, kept, sorted(wakes)[1], huge)


def huge_bytes() -> int:
    """Bytes of this process that are on huge pages; 0 where the kernel does not say."""
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return sum(int(kib) for kib in re.findall(r"^AnonHugePages:\s+(\d+) kB", text, re.MULTILINE)) * 1024
