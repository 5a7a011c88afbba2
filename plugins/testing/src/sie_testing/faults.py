"""Fault points: named places in the fake engine where a test makes it fail, take time, or stop until told to go on."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from attrs import define

from sie_testing.virtual import current_worker, pause

__all__ = ["POINTS", "FaultPoints", "Latch"]

POINTS = (
    *("load", "prepare", "run", "probe", "alive", "memory", "reserve", "offload", "restore", "drop", "close"),
    *("lora_reserve", "lora_load", "lora_unload", "piece", "abort"),
)


class Latch:
    """Holds every call that reaches it until it is released."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._waiting: list[Callable[[], Any]] = []

    @property
    def reached(self) -> bool:
        """Whether a call waits here, or has waited."""
        return self._reached.is_set()

    async def arrival(self, timeout_s: float = 10.0) -> None:
        """Wait for the first call to reach the latch. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not self._reached.is_set():
            if loop.time() > end:
                raise TimeoutError(f"nothing reached the latch within {timeout_s} s")
            await asyncio.sleep(0.001)

    def wait(self) -> None:
        """Block until released. In a virtual worker this takes only virtual time."""
        self._reached.set()
        worker = current_worker()
        if worker is None:
            self._open.wait()
            return
        while not self._open.is_set():
            worker.park(lambda: self._waiting.append(worker.resume_soon))

    def release(self) -> None:
        """Let everybody through, now and from now on. On a virtual clock, call it on the loop. Idempotent."""
        self._open.set()
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


@define
class _Fault:
    left: int | None
    skip: int
    act: Callable[[threading.Event | None], None]


class FaultPoints:
    """What happens at the fault points of one model's engines, and how often each was reached.

    Each ``times`` counts down with every hit that the fault takes effect on (``None``: for ever), after ``after`` hits
    that it lets pass. Faults of one point take effect in the order in which they were set. Thread-safe.
    """

    _by_model: ClassVar[dict[str, FaultPoints]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, list[_Fault]] = {}
        self._hits: Counter[str] = Counter()
        self._latches: list[Latch] = []

    @classmethod
    def of(cls, model: str) -> FaultPoints:
        """The fault points of the fake engines of this model, before and after they are loaded."""
        with cls._guard:
            return cls._by_model.setdefault(model, cls())

    @classmethod
    def reset_all(cls) -> None:
        """Forget every fault and count of every model; latches are released."""
        with cls._guard:
            points, cls._by_model = list(cls._by_model.values()), {}
        for each in points:
            each.reset()

    def fail(
        self, point: str, error: BaseException | type[BaseException], *, times: int | None = None, after: int = 0
    ) -> None:
        """Raise ``error`` at this point."""

        def act(_: threading.Event | None) -> None:
            raise error

        self._add(point, act, times, after)

    def delay(self, point: str, seconds: float, *, times: int | None = None, after: int = 0) -> None:
        """Take ``seconds`` longer at this point: virtual on a virtual clock, real elsewhere; a cancelling ends it."""
        self._add(point, lambda cancelled: bool(pause(seconds, cancelled)) and None, times, after)

    def hold(self, point: str, *, times: int | None = None, after: int = 0) -> Latch:
        """Stop at this point, cancelled or not, until the latch that is returned is released."""
        latch = Latch()
        with self._lock:
            self._latches.append(latch)
        self._add(point, lambda _: latch.wait(), times, after)
        return latch

    def do(self, point: str, action: Callable[[], Any], *, times: int | None = None, after: int = 0) -> None:
        """Call ``action`` at this point, on the thread that reached it."""
        self._add(point, lambda _: action(), times, after)

    def hits(self, point: str) -> int:
        """How often this point was reached."""
        return self._hits[_checked(point)]

    def reset(self) -> None:
        """Forget every fault and count; latches are released."""
        with self._lock:
            latches, self._latches = self._latches, []
            self._faults.clear()
            self._hits.clear()
        for latch in latches:
            latch.release()

    def reach(self, point: str, cancelled: threading.Event | None = None) -> int:
        """Called by the engine. Returns which hit this is, from 1."""
        with self._lock:
            self._hits[point] += 1
            hit = self._hits[point]
            faults = self._faults.get(point)
            due = [fault for fault in faults if self._is_due(fault)] if faults else ()
        for fault in due:
            fault.act(cancelled)
        return hit

    @staticmethod
    def _is_due(fault: _Fault) -> bool:
        if fault.skip > 0:
            fault.skip -= 1
            return False
        if fault.left is None:
            return True
        fault.left -= 1
        return fault.left >= 0

    def _add(self, point: str, act: Callable[[threading.Event | None], Any], times: int | None, after: int) -> None:
        with self._lock:
            self._faults.setdefault(_checked(point), []).append(_Fault(times, after, act))


def _checked(point: str) -> str:
    if point not in POINTS:
        raise ValueError(f"there is no fault point {point!r}: the points are {', '.join(POINTS)}")
    return point
