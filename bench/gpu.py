"""What only a GPU can show: what parks and wakes cost there, and what pressure and kills leave. Run by ``nox -s gpu``.

Each part prints its lines as soon as it has them; one that fails says so, and the next begins. What was measured
on a GPU replaces the same parts in docs/benchmarks.md. ``--device emulated:0`` rehearses it without a GPU, with a
stand-in for SGLang; what only a GPU has is left out then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_kills
import gpu_pressure
import gpu_wakes
import numpy as np
import psutil
import torch
from attrs import define, evolve, frozen
from copies import BulkEngine, Hooks, Memcpy
from gpu_models import make_models
from gpu_stage import Stage, is_running
from inprocess import registry_on
from launched import installed
from results import HEAD, Ratio, Row, machine, write_table
from sie_adapters_torch.dense import DenseAdapter
from sie_core import BatchEngine, BatchRequest, Device, Item, Task
from sie_core.memory.emulated import EmulatedDevice
from sie_core.plugins import Plugins
from sie_core.residency import Registry
from sie_core.units import format_bytes, parse_bytes
from stage import absolute
from workload import texts

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


def find_device(name: str, nbytes: int) -> Device | None:
    """The device of that name; an emulated one is made for ``nbytes`` and MiniLM."""
    if name.startswith("emulated"):
        return EmulatedDevice(name, nbytes + 128 * 1024**2)
    return next((device for device in Plugins.load().probe_devices() if device.name == name), None)


# --- one command -------------------------------------------------------------------------------------------

ALONE: dict[str, Callable[[Device, argparse.Namespace], list[Row]]] = {
    "bulk": lambda device, options: bulk(device, options.weights, options.turns),
    "graph": lambda device, options: graph(device, options.weights // 4) if device.kind == "cuda" else [],
    "minilm": lambda device, options: asyncio.run(minilm(device, options.turns)),
}
"""In this process."""
DRILLS: dict[str, Callable[[Stage, argparse.Namespace], list[Row]]] = {
    "engine": lambda stage, options: gpu_wakes.engine(stage, options.turns),
    "encoder": lambda stage, options: gpu_wakes.encoder(stage, options.turns),
    "pressure": lambda stage, options: gpu_pressure.pressure(stage, options.seconds),
    "kill_parked": lambda stage, _: gpu_kills.parked_engine(stage),
    "kill_resident": lambda stage, _: gpu_kills.resident_engine(stage),
    "kill_server": lambda stage, _: gpu_kills.server(stage),
}
"""In a server, one and the same for all as long as none fails."""
PARTS = [*ALONE, *DRILLS]
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
QUICK_S = 280.0
"""No part of a quick run begins later."""
_MARK = "SIE_BENCH_RUN"


def run(device: Device, options: argparse.Namespace) -> dict[str, list[Row]]:
    """Every part that was asked for. One that fails gives a line that says so."""
    found: dict[str, list[Row]] = {}
    began = time.monotonic()
    print("\n".join(HEAD), flush=True)
    with contextlib.ExitStack() as stack:
        staged = Staged(device, options, stack)
        for name in options.parts or PARTS:
            if name in DRILLS and device.kind == "cuda" and options.sglang_python is None:
                continue
            if options.quick and time.monotonic() - began > QUICK_S:
                found[name] = [Row("left out: no time is left", "", "")]
            else:
                found[name] = _part(name, device, options, staged)
            for row in found[name]:
                print(row.line(name), flush=True)
    return found


def _part(name: str, device: Device, options: argparse.Namespace, staged: Staged) -> list[Row]:
    try:
        return DRILLS[name](staged.stage(), options) if name in DRILLS else ALONE[name](device, options)
    except Exception as error:
        traceback.print_exc()
        print(staged.log_tail(), file=sys.stderr, flush=True)
        staged.drop()
        said = " ".join(str(error).split())[:200].replace("|", "/")
        return [Row(f"failed: {type(error).__name__}: {said}", "", "", "", "no failure", False)]


@define
class Staged:
    """What the drills share, made when the first of them begins; in the end nothing of it is left."""

    device: Device
    options: argparse.Namespace
    stack: contextlib.ExitStack
    _stage: Stage | None = None

    def stage(self) -> Stage:
        """Raises RuntimeError: its models can't be made."""
        if self._stage is None:
            options = self.options
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            python = None if self.device.kind == "emulated" else options.sglang_python
            models = make_models(
                folder, self.device, options.weights, python=python, model=options.model, quick=options.quick
            )
            self._stage = Stage(self.device, models, folder, wait_s=options.wait)
            self.stack.callback(self._stage.drop)
        return self._stage

    def drop(self) -> None:
        """Stop the server: the next drill gets another one."""
        if self._stage is not None:
            self._stage.drop()

    def log_tail(self) -> str:
        return self._stage.log_tail() if self._stage is not None else ""


def _left_behind(mark: str) -> list[psutil.Process]:
    """Processes that this run started and that are still there; they are ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark and is_running(process):
                found.append(process)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return found


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of: {', '.join(PARTS)} (default: all of them)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or emulated:0 for a rehearsal (default: cuda:0)")
    parser.add_argument("--weights", type=_bytes, default=GIB, help="bytes to park and wake (default: 1GiB)")
    parser.add_argument("--turns", type=int, help="how often (default: 5; quick: 3)")
    parser.add_argument("--seconds", type=float, help="how long the pressure lasts (default: 120; quick: 30)")
    parser.add_argument("--sglang-python", type=absolute, metavar="PATH", help="an interpreter that has SGLang")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a causal model to take instead of random weights")
    parser.add_argument("--quick", action="store_true", help="fits in five minutes: no CUDA graphs, fewer turns")
    parser.add_argument("--print", action="store_true", help="print what was measured, and leave the page alone")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    options.turns = options.turns or (3 if options.quick else 5)
    options.seconds = options.seconds or (30.0 if options.quick else 120.0)
    options.wait = 120.0 if options.quick else 600.0
    return options


def _note(device: Device, options: argparse.Namespace) -> str:
    engine = f", SGLang {installed(options.sglang_python)}" if options.sglang_python is not None else ""
    of = (
        f"model of {options.model.name}" if options.model is not None else f"{format_bytes(options.weights)} of weights"
    )
    return f"On {device.description}{engine}; {of}, {options.turns} turns{', quick' if options.quick else ''}."


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    device = find_device(options.device, options.weights)
    if device is None:
        print(f"skipped: there is no device {options.device} here")
        return 0
    if device.kind == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} can't use {device.description}: install a build for CUDA")
        return 1
    note = _note(device, options)
    print(f"{machine()}. {note}\n", flush=True)
    if device.kind == "cuda" and options.sglang_python is None:
        print("Without --sglang-python there are no drills: they take an engine.\n", flush=True)
    mark = f"{os.getpid()}-{time.time_ns()}"
    with _marked(mark):
        found = run(device, options)
    left = _left_behind(mark)
    if left:
        print(f"{len(left)} processes were left behind, and have been ended", flush=True)
    measured = {name: rows for name, rows in found.items() if any(row.ours for row in rows)}
    if device.kind == "cuda" and not options.print and measured:
        write_table(PAGE, "gpu", measured, order=PARTS, note=note)
    return int(bool(left) or any(row.met is False for rows in found.values() for row in rows))


@contextlib.contextmanager
def _marked(mark: str) -> Iterator[None]:
    """Whatever is started meanwhile carries the mark in its environment; a signal to end unwinds everything."""
    os.environ[_MARK] = mark
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)) if main_thread else None
    try:
        yield
    finally:
        del os.environ[_MARK]
        if main_thread:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
