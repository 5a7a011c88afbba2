"""What only a GPU can show: what parks and wakes cost there, and what pressure and kills leave. Run by ``nox -s gpu``.

Each part prints its lines as soon as it has them; one that fails says so, and the next begins. What was measured
on a GPU replaces the same parts in docs/benchmarks.md. ``--device emulated:0`` rehearses it without a GPU, with a
stand-in for SGLang; what only a GPU has is left out then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gpu_kills
import gpu_pressure
import gpu_wakes
import psutil
import torch
from attrs import define
from gpu_alone import GIB, bulk, graph, minilm
from gpu_models import make_models
from gpu_stage import Stage, is_running
from launched import installed
from results import HEAD, Row, machine, write_table
from sie_core import Device
from sie_core.memory.emulated import EmulatedDevice
from sie_core.plugins import Plugins
from sie_core.units import format_bytes, parse_bytes
from stage import absolute


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
