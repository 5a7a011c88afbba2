"""The one thread on which an engine's blocking calls run, one at a time, in order."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from sie_core._hookanswers import problem_of_engine
from sie_core.errors import HookFailed, HookTimeout, SieError
from sie_core.memory._malloc import trim

__all__ = ["EngineWorker", "Worker"]


class EngineWorker(ABC):
    """What the lifecycle and the batcher need of a worker; sie-testing has one that runs on a virtual clock."""

    name: str
    plugin: str = ""
    """Whose adapter made the engine."""
    had_engine: bool = False
    """Whether an engine was loaded on it: memory that was freed goes back to the system when it ends."""
    stuck: asyncio.Future[Any] | None = None
    """The call that nobody waits for any more: it overran its deadline, or its transition was torn."""
    current: asyncio.Future[Any] | None = None
    """The call that runs now. One that is queued behind it can still be cancelled."""

    @abstractmethod
    def submit(self, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Queue a call. Cancelling the future does not stop a call that runs."""

    @abstractmethod
    def close(self) -> None:
        """No more calls after those queued so far. Idempotent; does not wait."""

    async def call(self, fn: Callable[..., Any], *args: Any, hook: str = "", timeout: float | None = None) -> Any:
        """Run a call and wait for it.

        Raises:
            HookTimeout: it did not return within ``timeout`` seconds; ``stuck`` is then its future.
            HookFailed: it raised something else than a SieError, or its answer can't be used.
        """
        future = self.submit(fn, *args)
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout)
        except asyncio.CancelledError:
            self.stuck = future  # whoever waited is gone; the call is not
            raise
        hook = hook or getattr(fn, "__name__", "call")
        if not done:
            self.stuck = future
            raise HookTimeout(hook, model=self.name, seconds=timeout or 0.0)
        try:
            answer = future.result()
        except SieError:
            raise
        except Exception as error:
            raise HookFailed.by(error, hook, self.plugin) from error
        finally:
            del done, future  # an error would keep this frame, and with it itself
        problem = problem_of_engine(hook, answer)
        if problem is not None:
            raise HookFailed(hook, plugin=self.plugin, problem=problem)
        return answer


class Worker(EngineWorker):
    """A daemon thread with a queue. It starts with the first call; ``close`` lets it end after the calls queued so far.

    A daemon, because a hook that never returns must not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, fn: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Queue a call. Cancelling the future does not stop a call that runs."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.put((loop, future, fn, args))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"sie-{self.name}", daemon=True)
            self._thread.start()
        return future

    def close(self) -> None:
        """No more calls. Idempotent; does not wait."""
        if self._thread is not None:
            self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            loop, future, fn, args = job
            if future.cancelled():
                continue
            self.current = future
            try:
                outcome, failed = fn(*args), False
            except BaseException as error:  # translated by whoever awaits the future
                outcome, failed = error, True
            self.current = None
            try:
                loop.call_soon_threadsafe(_resolve, future, outcome, failed)
            except RuntimeError:
                return  # the loop is closed: the process is on its way out
            del job, future, fn, args, outcome
        if self.had_engine:  # what it leaves is in pieces; allocations of other threads wait meanwhile
            trim()


def _resolve(future: asyncio.Future[Any], outcome: Any, failed: bool) -> None:
    if future.done():
        return
    if not failed:
        future.set_result(outcome)
    elif isinstance(outcome, StopIteration) or not isinstance(outcome, Exception):
        # A future refuses StopIteration; what is no Exception (SystemExit, CancelledError, GeneratorExit) would tear
        # down the event loop, or pass for the cancelling of the transition that waits.
        future.set_exception(RuntimeError(f"the call raised {outcome!r}"))
    else:
        future.set_exception(outcome)
