"""The soak: hours in minutes. Eight models on a device for two, sixteen clients, and all that goes wrong in between.

Once a minute everybody waits while a witness asks each model for the same things in the same order: those answers must
have the same bits every time, and what the process then holds can be compared from one minute to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import contestants
import numpy as np
import psutil
from attrs import define, field, frozen
from client import Client as Control
from client import metric
from contestants import Server
from results import Row
from soak_clients import CLOSE, Client, Gate, Operator, Seen, ask, numbers_of
from soak_models import DEVICE, NAMES, VISITOR, Ask, asks, configuration, save_models
from stage import Bench

__all__ = ["Look", "Soak", "rows_of", "soak"]

MIB = 1024 * 1024
CLIENTS = 16
_WITNESSED = 4
"""Of which the witness asks so many, alone."""
_SLOPE = 0.01
"""By which memory may grow in an hour, of what it is."""
_WARM_UP_S = 600.0
"""What is held before is not looked at, unless the soak is shorter than three times that."""
_SETTLE_S = 60.0
_CLOSING_S = 0.5
"""For the server to notice that connections were closed."""
_IN_MEMORY = ("resident", "parked")
_MOVES = ("park", "wake")


@frozen
class Look:
    """What the server's process holds while nobody asks. ``at``: seconds since the start."""

    at: float
    rss: int
    files: int
    threads: int
    """Beside those of the engines, of which each has one."""


@define
class Soak:
    """What was seen. ``promised``: by account, before the first load and after the last unload."""

    seconds: float = 0.0
    seen: Seen = field(factory=Seen)
    looks: list[Look] = field(factory=list)
    witnessed: int = 0
    changed: int = 0
    """Answers to the witness that had other bits than the first time."""
    promised: tuple[dict[str, int], dict[str, int]] = field(factory=lambda: ({}, {}))
    tracebacks: int = 0
    moves: dict[str, int] = field(factory=dict)

    def warm(self) -> list[Look]:
        """The looks after the warm-up."""
        return [look for look in self.looks if look.at >= min(_WARM_UP_S, self.seconds / 3)]

    def slope(self) -> float:
        """Growth of resident memory in an hour, as a share of what it is: least squares over the looks."""
        looks = self.warm()
        if len(looks) < 2:
            return float("nan")
        rss = np.array([look.rss for look in looks], dtype=float)
        hours = np.array([look.at for look in looks]) / 3600
        return float(np.polyfit(hours, rss, 1)[0] / rss.mean())


def soak(bench: Bench) -> list[Row]:
    """Eight models on a device for two, 16 clients that hang up at times, an operator, reloads: nothing may leak."""
    return rows_of(_run(bench, bench.sizes.soak_s, bench.sizes.asks))


def rows_of(found: Soak) -> list[Row]:
    """The lines of the table."""
    statuses = found.seen.statuses
    told = ", ".join(f"{count:,} × {what}" for what, count in sorted(statuses.items(), key=lambda item: -item[1]))
    first, last = found.warm()[0], found.warm()[-1]
    minutes = f"{found.seconds / 60:.0f} min"
    apart = f"{found.seen.apart:.1g}"
    moved = ", ".join(f"{count:,} {what}" for what, count in found.moves.items())
    before, after = found.promised
    wrong = found.seen.wrong
    return [
        Row(
            f"requests in {minutes}",
            f"{sum(statuses.values()):,}: {told}",
            moved,
            "",
            "no 5xx but those under pressure that are documented",
            not wrong,
        ),
        Row("what must not be", "; ".join(wrong[:3]) or "nothing", f"{len(wrong)} in all", "", "nothing", not wrong),
        Row(
            "answers asked for alone, among all that",
            f"{found.witnessed:,}, {found.changed} with other bits",
            f"all others at most {apart} apart",
            "",
            f"the same bits; the others within {CLOSE:g}",
            not found.changed and found.seen.apart <= CLOSE,
        ),
        Row(
            "resident memory",
            f"{first.rss / MIB:.0f} to {last.rss / MIB:.0f} MiB",
            f"{len(found.warm())} looks since minute {first.at / 60:.0f}",
            f"{found.slope():+.2%} an hour",
            f"≤ {_SLOPE:.0%} an hour",
            found.slope() <= _SLOPE,
        ),
        Row(
            "descriptors and threads",
            f"{first.files} and {first.threads}",
            f"in the end {last.files} and {last.threads}",
            "",
            "no more",
            last.files <= first.files and last.threads <= first.threads,
        ),
        Row(
            "promised, by account",
            _bytes(after),
            f"before the first load {_bytes(before)}",
            "",
            "the same",
            before == after,
        ),
        Row("tracebacks in the log", str(found.tracebacks), "", "", "none", not found.tracebacks),
    ]


def _bytes(accounts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count / MIB:.1f} MiB" for name, count in accounts.items())


# --- a run -------------------------------------------------------------------------------------------------


def _run(bench: Bench, seconds: float, count: int) -> Soak:
    found = Soak(seconds)
    folder = Path(bench.stack.enter_context(tempfile.TemporaryDirectory()))
    with _logs(folder) as logs:
        save_models(folder)
        home = folder / "home"
        home.mkdir()
        text = configuration(folder, visitor=False, idle_s=None)
        with contestants.sie(home, text, "--emulate-device", DEVICE) as server:
            before = _promised(server)
            witness = _Witness(server, found)
            witness.look()
            expected = _expected(server, count)
            _drive(server, found, expected, witness, folder, home / "sie.yaml", seconds)
            with closing(Control(server)) as control:
                for name in NAMES:
                    control.act(name, "unload")
                found.moves = _moves(control)
            found.promised = before, _settled(server, before)
        found.tracebacks = (logs / "sie.txt").read_text(encoding="utf-8", errors="replace").count("Traceback (most")
    return found


def _drive(
    server: Server,
    found: Soak,
    expected: Mapping[Ask, Any],
    witness: _Witness,
    folder: Path,
    file: Path,
    seconds: float,
) -> None:
    gate, began, every = Gate(), time.monotonic(), min(60.0, seconds / 6)

    def configure(rng: random.Random) -> None:
        text = configuration(folder, visitor=rng.random() < 0.5, idle_s=rng.choice((None, 1.0, 30.0)))
        file.write_text(text, encoding="utf-8")

    operator = Operator(server, gate, found.seen, NAMES, configure)
    crowd = [Client(server, gate, found.seen, expected, _wrong(), seed) for seed in range(1, CLIENTS + 1)]
    for one in (operator, *crowd):
        one.start()
    try:
        while (left := began + seconds - time.monotonic()) > 0:
            gate.pause(min(every, left))
            gate.hold()
            operator.unpin()
            found.looks.append(witness.look(time.monotonic() - began))
            _tell(found)
            gate.release()
    finally:
        gate.end()
        for one in (operator, *crowd):
            one.join()


class _Witness:
    """Asks each model for the same things in the same order, alone, and compares the bits with the first time.

    Afterwards the same models are resident, the same ones parked, and what the process holds is comparable.
    """

    def __init__(self, server: Server, found: Soak) -> None:
        self._server, self._found = server, found
        self._process = psutil.Process(server.process.pid)
        self._first: dict[Ask, Any] = {}

    def look(self, at: float = 0.0) -> Look:
        """Ask everything, and see what is held then."""
        with closing(Control(self._server)) as control:
            control.leave(VISITOR)
        with closing(HTTPConnection("127.0.0.1", self._server.port, timeout=contestants.START_S)) as line:
            for name in NAMES:
                for what in asks(name, _WITNESSED):
                    self._ask(line, what)
        with closing(Control(self._server)) as control:
            engines = sum(model["residency"] in _IN_MEMORY for model in control.status()["models"])
        time.sleep(_CLOSING_S)
        held = self._process
        return Look(at, held.memory_info().rss, held.num_fds(), held.num_threads() - engines)

    def _ask(self, line: HTTPConnection, what: Ask) -> None:
        bits = _answer(line, what)
        self._found.witnessed += 1
        first = self._first.setdefault(what, bits)
        if first.shape != bits.shape or first.values.tobytes() != bits.values.tobytes():
            self._found.changed += 1


def _expected(server: Server, count: int) -> dict[Ask, Any]:
    """By request: its answer, asked for alone."""
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=contestants.START_S)) as line:
        return {what: _answer(line, what) for name in NAMES for what in asks(name, count)}


def _answer(line: HTTPConnection, what: Ask) -> Any:
    """Raises RuntimeError where there is none: nothing else is asked of the server meanwhile."""
    deadline = time.monotonic() + contestants.START_S
    while True:
        status, body, wait_s = ask(line, what)
        if status == HTTPStatus.OK:
            return numbers_of(body, what.packed)
        if status != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
            raise RuntimeError(f"{status} from {what.path}: {body.decode(errors='replace')}")
        time.sleep(wait_s)


def _wrong() -> list[Ask]:
    """Requests that must be refused."""

    def made(path: str, body: Any) -> Ask:
        return Ask("", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    torn = "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGP8z4AP"  # the first half of a PNG
    return [
        made("/v1/embeddings", b'{"model": "sentences", "input": '),
        made("/v1/embeddings", {"model": "absent", "input": "a"}),
        made("/v1/embeddings", {"model": "sentences", "input": ["word " * 5000]}),
        made("/v1/embeddings", {"model": "reranker", "input": "a"}),
        made("/v1/encode/clip", {"items": [{"images": [{"data": torn}]}]}),
        made("/v1/encode/sentences", {"items": []}),
        made("/v1/extract/tagger", {"items": [{"text": 7}]}),
        made("/v2/rerank", {"model": "reranker", "query": "a", "documents": "b"}),
    ]


def _promised(server: Server) -> dict[str, int]:
    """By account, without what the arena keeps for the next park: it is given back when somebody needs it."""
    with closing(Control(server)) as control:
        status = control.status()
    found = {str(each["account"]): int(each["promised"]) for each in status["accounts"]}
    found["host"] -= int(status["host_cache"]["idle"])
    return found


def _settled(server: Server, wanted: Mapping[str, int]) -> dict[str, int]:
    """What is promised, once it is as wanted or does not change any more."""
    deadline = time.monotonic() + _SETTLE_S
    while (found := _promised(server)) != wanted and time.monotonic() < deadline:
        time.sleep(1)
    return found


def _moves(control: Control) -> dict[str, int]:
    """How often models were parked and woken."""
    text = control.metrics()
    return {f"{of}s": int(metric(text, f"sie_worker_model_host_cache_{of}_duration_seconds_count")) for of in _MOVES}


def _tell(found: Soak) -> None:
    look, statuses = found.looks[-1], found.seen.statuses
    print(
        f"  {look.at / 60:5.1f} min: {sum(statuses.values()):,} requests, {look.rss / MIB:.0f} MiB, {look.files} "
        f"descriptors, {look.threads} threads, {found.changed} changed, {len(found.seen.wrong)} wrong",
        flush=True,
    )


@contextlib.contextmanager
def _logs(folder: Path) -> Iterator[Path]:
    """Have the server's log kept, where the caller of the benchmark does not already."""
    named = os.environ.get("BENCH_LOGS")
    if named and Path(named).is_dir():
        yield Path(named)
        return
    os.environ["BENCH_LOGS"] = str(folder)
    try:
        yield folder
    finally:
        del os.environ["BENCH_LOGS"]
