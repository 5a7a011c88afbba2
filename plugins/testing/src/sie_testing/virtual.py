"""Virtual time: a loop whose clock jumps, a worker whose blocking calls take no time, an order that a seed picks.

A test on this loop runs hours of time-outs in milliseconds, in an order that another seed changes and the same seed
repeats. Only what happens on the loop, and in blocking calls of :class:`VirtualWorker`, is under its control: no
sockets, no threads of your own.
"""

from __future__ import annotations

import asyncio
import collections
import random
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sie_core.residency import EngineWorker

__all__ = ["Deadlock", "VirtualClockLoop", "VirtualWorker", "pause", "run"]

_T = TypeVar("_T")
_SLICES = 8


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: whatever the tasks wait for can't happen any more."""


class _Clock(selectors.DefaultSelector):
    """A selector that moves the time instead of waiting for it to pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return events


class _Shuffled(collections.deque[Any]):
    """The loop's queue of ready callbacks; the seed says which comes next."""

    def __init__(self, order: random.Random) -> None:
        super().__init__()
        self._order = order
        self.between: Callable[[], None] | None = None

    def popleft(self) -> Any:
        if self.between is not None:
            self.between()
        if len(self) > 1:
            self.rotate(-self._order.randrange(len(self)))
        return super().popleft()


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock.

    ``time()`` starts at 0 and jumps to the next timer when nothing is ready. With a ``seed`` the order in which ready
    callbacks run is random and repeats exactly for the same seed; ``seed=None`` keeps asyncio's own order.
    ``unhandled`` collects what asyncio's exception handler was told. Code that goes through a set of objects in the
    order of their addresses is beyond the seed's reach.

    Raises:
        Deadlock: from ``run_until_complete``, when nothing is ready and no timer is set.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)
        self.seed = seed
        self.unhandled: list[dict[str, Any]] = []
        self._clock_resolution = 1e-9
        self._workers: weakref.WeakSet[VirtualWorker] = weakref.WeakSet()
        if seed is not None:
            self._ready = _Shuffled(random.Random(seed))
        self.set_exception_handler(self._unhandled)

    def between_steps(self, look: Callable[[], None] | None) -> None:
        """Call ``look`` before each callback of a seeded loop; what it raises ends the run."""
        if not isinstance(self._ready, _Shuffled):
            raise ValueError("only a loop with a seed can be looked at between its steps")
        self._ready.between = look

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a blocking function in lockstep with the loop, whatever the executor."""
        worker = VirtualWorker("executor", loop=self)
        future = worker.submit(func, *args)
        future.add_done_callback(lambda _: worker.close())
        return future

    def close(self) -> None:
        """Close the loop; calls of virtual workers that are still under way are abandoned."""
        for worker in list(self._workers):
            worker.abandon()
        super().close()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(context)
        loop.default_exception_handler(context)


def run(main: Coroutine[Any, Any, _T], seed: int | None = 0) -> _T:
    """Run a coroutine to its end on a new :class:`VirtualClockLoop`. Raises what it raises, and :class:`Deadlock`."""
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(seed)) as runner:
        return runner.run(main)


# --- blocking calls in lockstep --------------------------------------------------------------------


class _Abandoned(BaseException):
    """Raised in a blocking call whose loop is closed."""


_lockstep = threading.local()


def current_worker() -> VirtualWorker | None:
    """The virtual worker that runs the caller, if one does."""
    worker: VirtualWorker | None = getattr(_lockstep, "worker", None)
    return worker


def pause(seconds: float, cancelled: threading.Event | None = None) -> bool:
    """Stand for blocking work of this length: virtual in a virtual worker, real elsewhere.

    Returns early, with ``True``, once ``cancelled`` is set.
    """
    worker = current_worker()
    if worker is None:
        return (cancelled or threading.Event()).wait(seconds) if seconds > 0 else bool(cancelled and cancelled.is_set())
    slices = _SLICES if cancelled is not None and seconds > 0 else 1
    for _ in range(slices):
        if cancelled is not None and cancelled.is_set():
            return True
        if seconds > 0:
            worker.sleep(seconds / slices)
    return bool(cancelled and cancelled.is_set())


class VirtualWorker(EngineWorker):
    """Stands for an engine's worker thread on a :class:`VirtualClockLoop`.

    A call runs on a thread of its own, but only while the loop stands still for it; :func:`pause` and latches hand the
    turn back and are waited for in virtual time. Blocking code runs unchanged, and no two things ever happen at once.
    """

    def __init__(self, name: str, *, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.name = name
        self._loop = loop
        self._jobs: collections.deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = (
            collections.deque()
        )
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._job: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._arrangement: list[Callable[[], Any]] = []
        self._outcome: tuple[Any, bool] = (None, False)
        self._abandoned = False

    # --- what the core calls ---

    def submit(self, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Queue a call. Cancelling the future does not stop a call that runs."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        if isinstance(loop, VirtualClockLoop):
            loop._workers.add(self)
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.append((future, fn, args))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next)
        return future

    def close(self) -> None:
        """No more calls after those queued so far. Idempotent; does not wait."""
        self._closed = True
        if not self._busy:
            self.abandon()

    # --- what runs on the loop ---

    def _next(self) -> None:
        while self._jobs and self._jobs[0][0].cancelled():
            self._jobs.popleft()
        if not self._jobs:
            self._busy = False
            if self._closed:
                self.abandon()
            return
        self.current, fn, args = self._jobs[0]
        self._job = (fn, args)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"virtual-{self.name}", daemon=True)
            self._thread.start()
        self.resume()

    def resume(self) -> None:
        """Let the call go on, and stand still until it hands the turn back."""
        if self._abandoned:
            return
        self._arrangement.clear()
        self._go.release()
        self._back.acquire()
        if self._arrangement:
            self._arrangement[0]()  # sets the timer, or joins the latch, that will call ``resume``
            return
        future = self._jobs.popleft()[0]
        self.current = None
        outcome, failed = self._outcome
        self._outcome = (None, False)
        if not future.done():
            if not failed:
                future.set_result(outcome)
            elif isinstance(outcome, StopIteration | KeyboardInterrupt | SystemExit):
                future.set_exception(RuntimeError(f"the call raised {outcome!r}"))
            else:
                future.set_exception(outcome)
        self.loop.call_soon(self._next)

    def resume_soon(self) -> None:
        """Let a call that waits on the loop's side go on; without effect once the loop is closed."""
        if not self._abandoned:
            self.loop.call_soon(self.resume)

    def abandon(self) -> None:
        """End the thread; a call under way is left with an exception of its own. Idempotent."""
        if self._abandoned:
            return
        self._abandoned = True
        if self._thread is not None:
            self._go.release()
            self._thread.join()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the worker belongs to."""
        if self._loop is None:
            raise RuntimeError("the worker has had no call yet")
        return self._loop

    # --- what runs on the thread ---

    def sleep(self, seconds: float) -> None:
        """Hand the turn back for this many virtual seconds. Only from inside a call."""
        self.park(lambda: self.loop.call_later(seconds, self.resume))

    def park(self, arrange: Callable[[], Any]) -> None:
        """Hand the turn back; ``arrange`` runs on the loop and sees to it that ``resume`` is called."""
        self._arrangement.append(arrange)
        self._back.release()
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def _run(self) -> None:
        _lockstep.worker = self
        try:
            while True:
                self._wait_for_turn()
                if self._job is None:
                    raise RuntimeError("a turn without a job")
                fn, args = self._job
                self._job = None
                try:
                    self._outcome = (fn(*args), False)
                except _Abandoned:
                    raise
                except BaseException as error:
                    self._outcome = (error, True)
                del fn, args
                self._back.release()
        except _Abandoned:
            return
