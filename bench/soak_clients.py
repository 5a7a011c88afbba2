"""Who asks during the soak: clients that may hang up, an operator who reloads, and how their answers are compared."""

from __future__ import annotations

import base64
import http.client
import json
import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
from attrs import define, field, frozen
from contestants import Server
from soak_models import VISITOR, Ask

__all__ = ["Client", "Gate", "Operator", "Seen", "ask", "numbers_of"]

CLOSE = 1e-5
"""Batches differ in what they are made of, and sums of floats with the order: answers among others agree so far."""
_ANSWER_S = 120.0
_HANG_UPS = 0.05
"""Share of the requests whose client does not wait for the answer, or does not even send all of it."""
_BAD = 0.05
_LONGEST_WAIT_S = 2.0
_DROPPED = frozenset({"id", "timing", "created"})
"""What differs from one answer to the next by its nature."""
_PACKED = "application/msgpack"


@define
class Seen:
    """What was answered, counted by whoever got it. ``wrong``: what must not be there."""

    statuses: Counter[str] = field(factory=Counter)
    wrong: list[str] = field(factory=list)
    apart: float = 0.0
    """The largest distance of any number from that of the same request asked alone."""
    _lock: threading.Lock = field(factory=threading.Lock)

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.statuses[what] += times

    def refused(self, ask: Ask, status: int, body: bytes) -> None:
        """A status other than 200. Under pressure, a documented 503 or 429 is right; any other 5xx is not."""
        code = code_of(body)
        self.count(f"{status} {code}")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and (status, code) not in PRESSURE:
            self.fault(f"{status} {code} from {ask.path}: {body[:300]!r}")

    def fault(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def compare(self, found: float, ask: Ask) -> None:
        """``found``: how far an answer is from that of the same request asked alone; infinity: another shape."""
        with self._lock:
            self.apart = max(self.apart, found)
        if found > CLOSE:
            self.fault(f"an answer from {ask.path} is {found:.2g} away from what it was")


PRESSURE = frozenset(
    (int(HTTPStatus.SERVICE_UNAVAILABLE), code) for code in ("MODEL_LOADING", "RESOURCE_EXHAUSTED", "QUEUE_FULL")
)
"""What a server may answer while more is asked of it than it can do."""


class Gate:
    """Lets clients through, or holds them all while the witness looks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open, self._over, self._inside = True, False, 0

    def enter(self) -> bool:
        """Wait until it is open. False: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._over)
            self._inside += not self._over
            return not self._over

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def held(self) -> bool:
        """Whether clients wait at it."""
        return not self._open

    def hold(self) -> None:
        """Close it, and wait until all clients are outside. Raises RuntimeError: one does not come."""
        with self._changed:
            self._open = False
            if not self._changed.wait_for(lambda: not self._inside, timeout=2 * _ANSWER_S):
                raise RuntimeError(f"{self._inside} requests were not answered within {2 * _ANSWER_S:.0f} s")

    def release(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, timeout=seconds)


def ask(connection: http.client.HTTPConnection, what: Ask) -> tuple[int, bytes, float]:
    """Status, answer and the seconds after which it says to come back. Raises OSError, HTTPException."""
    headers = {"Content-Type": "application/json", **({"Accept": _PACKED} if what.packed else {})}
    connection.request("POST", what.path, what.body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), float(answer.headers.get("Retry-After", 0))


class Client(threading.Thread):
    """Asks one thing after another, hangs up at times, and asks wrongly at times."""

    def __init__(
        self, server: Server, gate: Gate, seen: Seen, expected: Mapping[Ask, Any], bad: Sequence[Ask], seed: int
    ) -> None:
        super().__init__(name=f"client {seed}", daemon=True)
        self._server, self._gate, self._seen, self._expected, self._bad = server, gate, seen, expected, bad
        self._rng = random.Random(seed)
        self._good = [*expected]
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_ANSWER_S)

    def run(self) -> None:
        while self._gate.enter():
            wait_s = 0.0
            try:
                wait_s = self._one()
            except (OSError, http.client.HTTPException) as error:
                self._seen.fault(f"no answer: {type(error).__name__}: {error}")
                self._connection.close()
            finally:
                self._gate.leave()
            if self._gate.held():
                self._connection.close()  # what is open while the witness looks would be counted
            if wait_s:
                self._gate.pause(min(wait_s, _LONGEST_WAIT_S))
        self._connection.close()

    def _one(self) -> float:
        """One request. Returns how long the server asks to stay away."""
        dice = self._rng.random()
        if dice < _HANG_UPS:
            self._hang_up(self._rng.choice(self._good))
            return 0.0
        if dice < _HANG_UPS + _BAD:
            what = self._rng.choice(self._bad)
            status, body, _ = ask(self._connection, what)
            self._seen.refused(what, status, body)
            if status < HTTPStatus.BAD_REQUEST:
                self._seen.fault(f"a wrong request to {what.path} was answered with {status}")
            return 0.0
        what = self._rng.choice(self._good)
        status, body, wait_s = ask(self._connection, what)
        if status != HTTPStatus.OK:
            self._seen.refused(what, status, body)
            return wait_s
        self._seen.count("200")
        self._seen.compare(distance(numbers_of(body, what.packed), self._expected[what]), what)
        return 0.0

    def _hang_up(self, what: Ask) -> None:
        """Send a request, or a part of it, and be gone after a moment."""
        self._seen.count("hung up")
        head = f"POST {what.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(what.body)}\r\n\r\n".encode() + what.body
        part = len(whole) if self._rng.random() < 0.7 else self._rng.randrange(1, len(whole))
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=_ANSWER_S) as line:
            line.sendall(whole[:part])
            self._gate.pause(self._rng.choice((0.0, 0.005, 0.02, 0.1)))


class Operator(threading.Thread):
    """Loads, parks, wakes, pins and unloads models at random, and reloads the configuration in between."""

    def __init__(
        self, server: Server, gate: Gate, seen: Seen, names: Sequence[str], configure: Callable[[random.Random], None]
    ) -> None:
        super().__init__(name="operator", daemon=True)
        self._server, self._gate, self._seen, self._names, self._configure = server, gate, seen, names, configure
        self._rng = random.Random(0)
        self._pinned: str | None = None

    def run(self) -> None:
        while self._gate.enter():
            try:
                self._act()
            except (OSError, http.client.HTTPException) as error:
                self._seen.fault(f"no answer for the operator: {type(error).__name__}: {error}")
            finally:
                self._gate.leave()
            self._gate.pause(self._rng.uniform(0.2, 2.0))

    def unpin(self) -> None:
        """Take back what was pinned."""
        if self._pinned is not None:
            self._ask(self._pinned, "unpin")
            self._pinned = None

    def _act(self) -> None:
        if self._rng.random() < 0.1:
            self._configure(self._rng)
            self._server.process.send_signal(signal.SIGHUP)
            self._seen.count("reloads of the configuration")
        elif self._pinned is not None:
            self.unpin()
        else:
            action = self._rng.choice(("load", "park", "wake", "unload", "pin"))
            name = self._rng.choice((*self._names, VISITOR))
            self._pinned = name if action == "pin" else None
            self._ask(name, action)

    def _ask(self, name: str, action: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=_ANSWER_S)
        what = Ask(name, f"/v1/admin/models/{name}/{action}", b"{}")
        status, body, _ = ask(connection, what)
        connection.close()
        self._seen.count("actions of the operator")
        if status != HTTPStatus.OK:
            self._seen.refused(what, status, body)


# --- answers -----------------------------------------------------------------------------------------------


@frozen
class Numbers:
    """An answer without what differs by its nature: its shape, and its numbers in order."""

    shape: str
    values: np.ndarray[Any, np.dtype[np.float64]]


def code_of(body: bytes) -> str:
    """The code of an error, in any of the dialects."""
    try:
        said = json.loads(body)
    except ValueError:
        try:
            said = msgspec.msgpack.decode(body)
        except (ValueError, msgspec.MsgspecError):
            return "?"
    for place in ("error", "detail"):
        inner = said.get(place) if isinstance(said, dict) else None
        if isinstance(inner, dict) and "code" in inner:
            return str(inner["code"])
    return str(said.get("code", "?")) if isinstance(said, dict) else "?"


def numbers_of(body: bytes, packed: bool) -> Numbers:
    """Read an answer. Raises ValueError: it is neither JSON nor msgpack."""
    said = msgspec.msgpack.decode(body, strict=False) if packed else json.loads(body)
    values: list[float] = []
    return Numbers(json.dumps(_shape(said, values), sort_keys=True), np.array(values))


def distance(found: Numbers, expected: Numbers) -> float:
    """The largest difference of two numbers that should be the same; infinity: the answers differ otherwise."""
    if found.shape != expected.shape or found.values.shape != expected.values.shape:
        return float("inf")
    return float(np.abs(found.values - expected.values).max(initial=0.0))


def _shape(said: Any, values: list[float]) -> Any:
    """What is left with every float replaced by a mark, and appended to ``values``."""
    match said:
        case {b"nd": True, b"data": data} | {"nd": True, "data": data}:
            kind = said.get(b"type", said.get("type"))
            values.extend(np.frombuffer(data, dtype=np.dtype(_text(kind))).astype(float).tolist())
            return ["array", [*(said.get(b"shape", said.get("shape")))]]
        case dict():
            return {_text(key): _member(_text(key), each, values) for key, each in _in_order(said)}
        case list():
            return [_shape(each, values) for each in said]
        case float():
            values.append(said)
            return "float"
    return said


def _in_order(said: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Members in the order of their names: what counts is which they are."""
    return sorted(
        ((key, each) for key, each in said.items() if _text(key) not in _DROPPED), key=lambda of: _text(of[0])
    )


def _member(key: str, said: Any, values: list[float]) -> Any:
    if key == "embedding" and isinstance(said, str):
        values.extend(np.frombuffer(base64.b64decode(said), dtype="<f4").astype(float).tolist())
        return "base64"
    return _shape(said, values)


def _text(key: Any) -> str:
    return key.decode() if isinstance(key, bytes) else str(key)
