"""Requests inside an engine that runs many at once: how many at a time, and what ends them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final

from sie_core.errors import DeadlineExceeded, InferenceError, NonFiniteOutput
from sie_core.serving._hop import not_finite
from sie_core.serving._job import FAULTS, translate
from sie_core.serving._sound import listed, oddity, whose
from sie_core.types import Task

if TYPE_CHECKING:
    from sie_core.adapter import StreamEngine
    from sie_core.residency import Lease
    from sie_core.serving._lane import Lane, Place
    from sie_core.types import BatchRequest, Output

__all__ = ["Lasting", "Turns", "answer"]

_CHECKED: Final = 64
"""Outputs looked through between two turns of the event loop."""


class Turns:
    """The places inside one engine, as many as it says; first come, first served. ``async with`` takes one."""

    def __init__(self, engine: StreamEngine) -> None:
        self.engine = engine
        self.limit = engine.max_running
        self._places = None if self.limit is None else asyncio.Semaphore(max(1, self.limit))

    async def __aenter__(self) -> None:
        if self._places is not None:
            await self._places.acquire()

    async def __aexit__(self, *_: object) -> None:
        if self._places is not None:
            self._places.release()


class Lasting:
    """Ends the request that runs in this task when its engine is lost, with the error that the engine was lost with.

    Costs a callback a request: to race every piece of an answer against the loss would cost a task each.
    """

    __slots__ = ("_ended", "_left", "_lost", "_owner")

    def __init__(self, lease: Lease) -> None:
        self._lost = lease.lost
        self._ended = self._left = False

    def __enter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._lost.add_done_callback(self._end)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._left = True
        self._lost.remove_done_callback(self._end)
        # Whatever the engine made of being interrupted; only somebody else's cancelling goes first.
        if self._ended and self._owner.uncancel() == 0:
            lost = None if self._lost.cancelled() else self._lost.exception()
            raise translate(lost or InferenceError("the engine gave up"), "the engine") from None

    def _end(self, lost: asyncio.Future[Any]) -> None:
        # A callback that is due already can't be removed: it would cancel whatever the task does next.
        if not self._left:
            self._ended = True
            self._owner.cancel()


async def answer(
    lane: Lane, place: Place, lease: Lease, engine: StreamEngine, request: BatchRequest, deadline: float
) -> Sequence[Output]:
    """Have an engine answer that schedules its own requests: let go at the deadline, or when the engine is lost."""
    where = "was waiting for its turn"
    try:
        with Lasting(lease):
            async with asyncio.timeout_at(deadline) as limit, lane.turns_of(engine):
                place.free()
                where = "was running"
                try:
                    outputs = await _ask(engine, request)
                except FAULTS as error:
                    raise translate(error, f"{request.task.value} of {whose(lease.worker)}")  # noqa: B904 - it has its cause already
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the request's deadline passed while it {where}") from None
    try:
        await _check(outputs, request, engine, whose(lease.worker))
    except Exception as error:  # such as what a field of an output holds can't be looked at
        raise translate(error, f"the answer to {request.task.value} of {whose(lease.worker)}")  # noqa: B904 - as above
    return outputs


def _ask(engine: StreamEngine, request: BatchRequest) -> Awaitable[Sequence[Output]]:
    if request.task is Task.ENCODE:
        return engine.encode(request)
    return engine.score(request) if request.task is Task.SCORE else engine.extract(request)


async def _check(outputs: Sequence[Output], request: BatchRequest, engine: StreamEngine, owner: str) -> None:
    """Some at a time: a large answer stops nobody else. Raises InferenceError, NonFiniteOutput."""
    came = listed(outputs, f"{request.task.value} of {owner}", "outputs")
    if came != len(request.items):
        raise InferenceError(f"{owner} answered {came} of {len(request.items)} items: a bug in the adapter")
    bad: list[int] = []
    for first in range(0, len(outputs), _CHECKED):
        if first:
            await asyncio.sleep(0)
        some = outputs[first : first + _CHECKED]
        odd = oddity(((output, request) for output in some), engine.capabilities)
        if odd is not None:
            raise InferenceError(f"{owner} {odd}")
        bad += [first + place for place in not_finite(some)]
    if bad:
        raise NonFiniteOutput(bad)
