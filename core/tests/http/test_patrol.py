"""One timer for all: guests are called once, those who leave are not, and a second event loop starts afresh."""

from __future__ import annotations

import asyncio

from sie_core.http.patrol import Patrol
from sie_testing import VirtualClockLoop


def test_who_stays_too_long_is_called_once_and_in_time() -> None:
    called: list[tuple[str, float]] = []

    async def scene() -> None:
        clock = asyncio.get_running_loop().time
        patrol = Patrol(8.0)
        began = clock()
        guests = {name: lambda name=name: called.append((name, clock() - began)) for name in "abc"}
        patrol.enter(guests["a"])
        await asyncio.sleep(3)
        patrol.enter(guests["b"])
        patrol.enter(guests["c"])
        await asyncio.sleep(4)
        patrol.leave(guests["c"])
        patrol.leave(guests["c"])
        await asyncio.sleep(100)

    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        runner.run(scene())
    assert [name for name, _ in called] == ["a", "b"]
    assert 8 <= called[0][1] <= 10
    assert 11 <= called[1][1] <= 13


def test_a_second_loop_starts_afresh() -> None:
    patrol = Patrol(0.01)
    called: list[str] = []

    async def leave_somebody_behind() -> None:
        patrol.enter(lambda: called.append("old"))

    async def wait() -> None:
        patrol.enter(lambda: called.append("new"))
        async with asyncio.timeout(5):
            while not called:
                await asyncio.sleep(0.002)

    asyncio.run(leave_somebody_behind())
    asyncio.run(wait())
    assert called == ["new"]
