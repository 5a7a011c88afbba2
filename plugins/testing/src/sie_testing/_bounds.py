"""Time-outs of the suite's own: a call into an adapter that hangs is a failure with a name, and nothing else waits."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import Any, TypeVar

from attrs import define, field

__all__ = ["EngineThread", "Hung", "all_at_once", "in_thread"]

T = TypeVar("T")
_FRAMES = 6


class Hung(AssertionError):
    """A call did not return in time."""


@define(eq=False)
class _Job:
    call: Callable[[], Any]
    done: threading.Event = field(factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # pytest's own, too: raised again where the answer is waited for
            self.error = error
        self.done.set()


class EngineThread:
    """One thread for all calls into an engine, as in a server. One that hangs is left behind: it is a daemon."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="sie-conformance", daemon=True)
        self._thread.start()

    def run(self, what: str, limit_s: float, call: Callable[[], T]) -> T:
        """The call's answer. Raises what it raises, or Hung after ``limit_s`` seconds."""
        __tracebackhide__ = True
        if threading.current_thread() is self._thread:
            return call()
        job = _Job(call)
        self._jobs.put(job)
        if not job.done.wait(limit_s):
            raise Hung(f"{what} hangs: it did not return within {limit_s:g} s, and stands here:\n{self._where()}")
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    def close(self) -> None:
        """Let it end. Idempotent; does not wait."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job

    def _where(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "(unknown)"


def all_at_once(calls: Sequence[Callable[[], T]], threads: int) -> list[T]:
    """The answers of calls that run side by side. Raises what the first of them raises.

    On daemons: a pool's threads would be waited for at the end of the process, even if they hang.
    """
    jobs = [_Job(call) for call in calls]
    waiting = queue.SimpleQueue[_Job]()
    for job in jobs:
        waiting.put(job)

    def work() -> None:
        try:
            while True:
                waiting.get_nowait().run()
        except queue.Empty:
            return

    for _ in range(threads):
        threading.Thread(target=work, daemon=True).start()
    for job in jobs:
        job.done.wait()
        if job.error is not None:
            raise job.error
    return [job.result for job in jobs]


def in_thread(call: Callable[..., T], *arguments: Any) -> Coroutine[Any, Any, T]:
    """``asyncio.to_thread`` on a daemon."""

    async def wait() -> T:
        loop, done, job = asyncio.get_running_loop(), asyncio.Event(), _Job(lambda: call(*arguments))

        def work() -> None:
            job.run()
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=work, daemon=True).start()
        await done.wait()
        if job.error is not None:
            raise job.error
        result: T = job.result
        return result

    return wait()
