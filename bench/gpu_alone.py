"""Parks and wakes in this process, on a GPU or an emulated device: of many bytes, of a CUDA graph, of MiniLM."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from copies import BulkEngine, Hooks, Memcpy
from inprocess import registry_on
from results import Ratio, Row
from sie_adapters_torch.dense import DenseAdapter
from sie_core import BatchEngine, BatchRequest, Device, Item, Task
from sie_core.residency import Registry
from sie_core.units import format_bytes
from workload import texts

__all__ = ["GIB", "bulk", "graph", "minilm"]

GIB = 1024**3
TOLERANCE = 1e-5
"""Kernels of a GPU may sum in another order from one run to the next: see the documentation of the wake check."""


class GraphEngine(BulkEngine):
    """Runs its weights in a CUDA graph, recorded when asked to."""

    def __init__(self, device: Device, nbytes: int) -> None:
        super().__init__(device, nbytes)
        self.graph: Any = None
        self.input = torch.ones(4, self.weights[0].shape[1], device=device.name)
        self.output: Any = None

    def run(self) -> torch.Tensor:
        """float32 (64, 4)."""
        return torch.stack([torch.nn.functional.linear(self.input, each).sum(1) for each in self.weights])

    def record(self) -> None:
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # what is set up on first use can't be recorded
            self.run()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            self.output = self.run()
        self.graph = graph

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        torch.cuda.synchronize()
        output: torch.Tensor = self.output.cpu()
        return output

    def clear(self) -> None:
        """Drop the graph: called before the engine is parked."""
        self.graph = self.output = None


class PlainCopy:
    """A copy between a GPU and page-locked memory of torch's own, of the same size; or a memcpy in RAM."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._memcpy = Memcpy(nbytes) if device.kind == "emulated" else None
        if self._memcpy is None:
            self._host = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
            self._device = torch.empty(nbytes, dtype=torch.uint8, device=device.name)

    def seconds(self, *, out: bool) -> float:
        """Time of one copy, to the host or back."""
        if self._memcpy is not None:
            return self._memcpy.seconds()
        target, source = (self._host, self._device) if out else (self._device, self._host)
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


@frozen
class Turn:
    """Seconds; ``plain_*`` beside them; ``freed`` in bytes, as the driver counts."""

    first_park: float
    copy_out: float
    plain_out: float
    kept_park: float
    wake: float
    plain_in: float
    freed: int


def turn(hooks: Hooks, plain: PlainCopy) -> Turn:
    """A first park (host memory is taken and page-locked), one with a kept backup, one that only copies."""
    engine = hooks.engine
    before = used(hooks.device)
    first = hooks.park()
    freed = before - used(hooks.device)
    plain_in = plain.seconds(out=False)
    wake = hooks.wake()
    kept = hooks.park()
    hooks.wake()
    engine.mark_stale()
    plain_out = plain.seconds(out=True)
    out = hooks.park()
    hooks.wake()
    hooks.drop_backup()
    hooks.arena.trim(hooks.arena.idle)
    return Turn(first, out, plain_out, kept, wake, plain_in, freed)


def used(device: Device) -> int:
    """Bytes in use on the device by the driver's count (NVML). Raises RuntimeError where it does not tell."""
    found = device.used()
    if found is None:
        raise RuntimeError(f"the driver does not tell how much of {device.name} is in use")
    return found


def bulk(device: Device, nbytes: int, turns: int) -> list[Row]:
    """Parks and wakes of many bytes, by the plugins' hooks."""
    engine = BulkEngine(device, nbytes)
    before = engine.answer()
    hooks, plain = Hooks(engine, device), PlainCopy(device, engine.nbytes)
    turn(hooks, plain)
    found = [turn(hooks, plain) for _ in range(turns)]
    same = torch.equal(engine.answer(), before)
    nbytes, size = engine.nbytes, format_bytes(engine.nbytes)
    what = "page-locked copy" if device.kind == "cuda" else "memcpy"

    def rate(measure: str, ours: Callable[[Turn], float], theirs: Callable[[Turn], float]) -> Row:
        mine, plains = [ours(one) for one in found], [theirs(one) for one in found]
        gib = nbytes / GIB
        return Row(
            f"{measure}, {size}",
            f"{gib / statistics.median(mine):.1f} GiB/s",
            f"plain {what} {gib / statistics.median(plains):.1f} GiB/s",
            str(Ratio.of(plains, mine)),
        )

    freed = statistics.median([one.freed for one in found])
    kept = statistics.median([one.kept_park for one in found]) * 1e3
    rows = [
        rate("wake", lambda one: one.wake, lambda one: one.plain_in),
        rate("park that copies, host memory is there", lambda one: one.copy_out, lambda one: one.plain_out),
        rate("first park, host memory is taken", lambda one: one.first_park, lambda one: one.plain_out),
        Row(f"park with a kept backup, {size}", f"{kept:.2f} ms", "", "", "≤ 5 ms", kept <= 5),
        Row(
            "freed by a park, by the driver's count",
            format_bytes(int(freed)),
            f"held {size}",
            f"{freed / nbytes:.2f}",
            "≥ 0.9",
            freed >= 0.9 * nbytes,
        ),
        Row("weights after the last wake", "the same bits" if same else "others", "", "", "the same bits", same),
    ]
    del hooks, plain, engine
    _empty_cache()
    return rows


def graph(device: Device, nbytes: int) -> list[Row]:
    """An engine with a CUDA graph: cleared by the park, recorded again after the wake."""
    engine = GraphEngine(device, nbytes)
    hooks = Hooks(engine, device)
    engine.record()
    before = engine.replay()
    hooks.park()
    cleared = engine.graph is None
    hooks.wake()
    engine.record()
    after = engine.replay()
    row = Row(
        "CUDA graph: cleared by the park; recorded again, it answers",
        f"{'cleared' if cleared else 'left'}; {_difference(before, after)}",
        "",
        "",
        f"cleared; within {TOLERANCE:g}",
        cleared and torch.allclose(before, after, rtol=TOLERANCE, atol=TOLERANCE),
    )
    engine.clear()
    hooks.drop_backup()
    del hooks, engine
    _empty_cache()
    return [row]


async def minilm(device: Device, turns: int) -> list[Row]:
    """MiniLM in a registry: what a request for a parked model waits for, what came free, how it answers."""
    spec = evolve(DenseAdapter().default_models()[0].spec, name="minilm", device=device.name)
    async with registry_on(device, spec) as registry:
        await registry.load(spec.name)
        before = await _vectors(registry, spec.name)
        # What the device still had to set up, and the first park, which takes host memory, are none of it.
        await registry.park(spec.name)
        await registry.wake(spec.name)
        parks, wakes, freed = [], [], []
        for _ in range(turns):
            held = used(device)
            parks.append(await _timed(registry.park, spec.name))
            freed.append(held - used(device))
            wakes.append(await _timed(registry.wake, spec.name))
        weights = registry.status(spec.name).host_bytes
        after = await _vectors(registry, spec.name)
    came_free = int(statistics.median(freed))
    close = np.allclose(before, after, rtol=TOLERANCE, atol=TOLERANCE)
    return [
        Row("MiniLM, registry: wake", f"{statistics.median(wakes) * 1e3:.1f} ms", format_bytes(weights)),
        Row("MiniLM, registry: park with a kept backup", f"{statistics.median(parks) * 1e3:.1f} ms", ""),
        Row(
            "MiniLM, registry: freed by a park, by the driver's count",
            format_bytes(came_free),
            f"held {format_bytes(weights)}",
            f"{came_free / weights:.2f}",
            "≥ 0.9",
            came_free >= 0.9 * weights,
        ),
        Row(
            "MiniLM, registry: 64 vectors before and after",
            _difference(torch.from_numpy(before), torch.from_numpy(after)),
            "",
            "",
            f"the same bits, or within {TOLERANCE:g}",
            close,
        ),
    ]


async def _timed(act: Callable[[str], Any], name: str) -> float:
    began = time.perf_counter()
    await act(name)
    return time.perf_counter() - began


async def _vectors(registry: Registry, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32 (64, dims)."""
    with await registry.acquire(name) as lease:
        engine = lease.engine
        assert isinstance(engine, BatchEngine)
        batch = engine.prepare(BatchRequest(Task.ENCODE, [Item(text) for text in texts(64)]))
        outputs = await lease.worker.call(engine.run, batch)
    return np.stack([output.dense for output in outputs])


def _difference(before: torch.Tensor, after: torch.Tensor) -> str:
    if torch.equal(before, after):
        return "the same bits"
    return f"up to {float((before - after).abs().max()):.1e} apart"


def _empty_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
