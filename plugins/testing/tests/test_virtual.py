"""The virtual clock: time that jumps, an order that a seed picks and repeats, and blocking calls in lockstep."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import EngineDied, HookFailed, HookTimeout
from sie_testing import Deadlock, FaultPoints, Latch, VirtualClockLoop, VirtualWorker, pause, run


def now() -> float:
    return asyncio.get_running_loop().time()


# --- time ---


def test_hours_pass_at_once() -> None:
    async def scene() -> list[float]:
        seen = []
        for seconds in (3600.0, 0.5, 86400.0 * 3):
            await asyncio.sleep(seconds)
            seen.append(now())
        return seen

    started = time.monotonic()
    assert run(scene()) == [3600.0, 3600.5, 3600.5 + 86400.0 * 3]
    assert time.monotonic() - started < 5.0


def test_timers_fire_in_order_of_their_times() -> None:
    async def scene() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((now(), name))

        await asyncio.gather(wait("c", 3), wait("a", 1), wait("b", 2))
        return seen

    assert run(scene(), seed=None) == [(1, "a"), (2, "b"), (3, "c")]
    assert run(scene(), seed=5) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_time_out_is_exact() -> None:
    async def scene() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 12.25)
        return now()

    assert run(scene()) == 12.25


def test_waiting_for_what_cannot_happen_is_a_deadlock() -> None:
    async def scene() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(scene())


def test_what_nobody_handled_is_kept() -> None:
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(0)) as runner:

        async def scene() -> list[str]:
            asyncio.get_running_loop().create_future().set_exception(OSError("lost"))
            gc.collect()
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualClockLoop)
            return [str(each["exception"]) for each in loop.unhandled]

        assert runner.run(scene()) == ["lost"]


# --- order ---


async def race(runners: int = 8, steps: int = 4) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []

    async def runner(number: int) -> None:
        for step in range(steps):
            await asyncio.sleep(0)
            seen.append((number, step))

    await asyncio.gather(*(runner(number) for number in range(runners)))
    return seen


def test_a_seed_repeats_its_order_and_others_differ() -> None:
    orders = {seed: run(race(), seed) for seed in range(10)}
    assert all(run(race(), seed) == order for seed, order in orders.items())
    assert len({tuple(order) for order in orders.values()}) == 10


def test_no_seed_is_the_order_of_asyncio() -> None:
    assert run(race(), None) == asyncio.run(race())


def test_every_order_is_possible() -> None:
    firsts = {run(race(runners=4, steps=1), seed)[0][0] for seed in range(60)}
    assert firsts == {0, 1, 2, 3}


def test_the_fixture_runs_scenes(virtual_run: Callable[..., Any]) -> None:
    assert virtual_run(race(), seed=3) == run(race(), 3)


# --- blocking calls ---


def test_calls_of_one_worker_run_one_after_another_and_of_two_side_by_side() -> None:
    async def scene() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []
        loop = asyncio.get_running_loop()

        def work(name: str, seconds: float) -> str:
            pause(seconds)
            seen.append((loop.time(), name))
            return name

        one, two = VirtualWorker("one"), VirtualWorker("two")
        calls = [one.submit(work, "a", 2.0), one.submit(work, "b", 2.0), two.submit(work, "c", 3.0)]
        assert await asyncio.gather(*calls) == ["a", "b", "c"]
        return seen

    for seed in range(5):
        assert run(scene(), seed) == [(2, "a"), (3, "c"), (4, "b")]


def test_what_a_call_raises_is_what_its_caller_gets() -> None:
    async def scene() -> None:
        worker = VirtualWorker("w")

        def fails(error: BaseException) -> None:
            raise error

        with pytest.raises(EngineDied, match="gone"):
            await worker.call(fails, EngineDied("gone"))
        with pytest.raises(HookFailed, match="raised KeyError: 'lost'") as caught:
            await worker.call(fails, KeyError("lost"))
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(HookFailed, match="SystemExit"):
            await worker.call(fails, SystemExit(1))
        assert await worker.call(int, "7") == 7

    run(scene())


def test_a_call_that_overruns_is_reported_in_time_and_completes_later() -> None:
    async def scene() -> None:
        worker = VirtualWorker("m")
        with pytest.raises(HookTimeout, match=r"load of model 'm' .* 5\.0 s"):
            await worker.call(pause, 60.0, hook="load", timeout=5.0)
        assert now() == 5.0
        assert worker.stuck is not None
        after = worker.submit(lambda: "later")
        await worker.stuck
        assert now() == 60.0
        assert await after == "later"

    run(scene())


def test_a_cancelled_event_ends_a_pause_early() -> None:
    async def scene() -> float:
        cancelled = threading.Event()
        asyncio.get_running_loop().call_later(10.0, cancelled.set)
        assert await VirtualWorker("w").call(pause, 80.0, cancelled) is True
        return now()

    assert run(scene()) == 20.0, "it looks eight times"


def test_a_call_that_was_cancelled_before_it_began_does_not_run() -> None:
    async def scene() -> list[str]:
        seen: list[str] = []
        worker = VirtualWorker("w")
        first = worker.submit(pause, 1.0)
        second = worker.submit(seen.append, "second")
        third = worker.submit(seen.append, "third")
        second.cancel()
        await first
        await third
        return seen

    assert run(scene()) == ["third"]


def test_closing_lets_queued_calls_end_and_ends_the_thread() -> None:
    async def scene() -> None:
        worker = VirtualWorker("to-be-closed")
        future = worker.submit(pause, 1.0)
        worker.close()
        worker.close()
        await future
        await asyncio.sleep(0.1)
        assert not [each for each in threading.enumerate() if each.name == "virtual-to-be-closed"]

    run(scene())


def test_a_loop_that_ends_takes_its_threads_along() -> None:
    ended: list[str] = []

    def hangs() -> None:
        try:
            pause(1e9)
        finally:
            ended.append("unwound")

    async def scene() -> None:
        worker = VirtualWorker("left-behind")
        worker.submit(hangs)
        await asyncio.sleep(1.0)

    run(scene())
    assert ended == ["unwound"]
    assert not [each for each in threading.enumerate() if each.name == "virtual-left-behind"]


def test_executors_run_in_lockstep_too() -> None:
    async def scene() -> float:
        await asyncio.gather(asyncio.to_thread(pause, 4.0), asyncio.to_thread(pause, 7.0))
        return now()

    assert run(scene()) == 7.0


def test_a_real_pause_is_real_and_can_be_cancelled() -> None:
    cancelled = threading.Event()
    cancelled.set()
    assert pause(60.0, cancelled) is True
    started = time.monotonic()
    assert pause(0.02) is False
    assert time.monotonic() - started >= 0.02


# --- latches and fault points ---


def test_a_latch_holds_a_call_in_virtual_time() -> None:
    async def scene() -> tuple[float, float]:
        latch = Latch()
        call = VirtualWorker("w").submit(latch.wait)
        await latch.arrival()
        arrived = now()
        await asyncio.sleep(30.0)
        assert not call.done()
        latch.release()
        await call
        return arrived, now()

    arrived, ended = run(scene())
    assert arrived < 0.01
    assert ended == pytest.approx(arrived + 30.0)


def test_a_latch_holds_real_threads_too() -> None:
    async def scene() -> None:
        latch = Latch()
        call = asyncio.get_running_loop().run_in_executor(None, latch.wait)
        await latch.arrival()
        assert latch.reached
        latch.release()
        await asyncio.wait_for(call, 5.0)

    asyncio.run(scene())


def test_a_latch_may_be_released_after_its_loop_has_ended() -> None:
    latch = Latch()

    async def scene() -> None:
        VirtualWorker("held").submit(latch.wait)
        await latch.arrival()

    run(scene())
    latch.release()
    assert not [each for each in threading.enumerate() if each.name == "virtual-held"]


def test_nobody_arriving_is_told() -> None:
    async def scene() -> None:
        with pytest.raises(TimeoutError, match="nothing reached the latch"):
            await Latch().arrival(5.0)

    run(scene())


def test_faults_count_down_and_let_pass() -> None:
    faults = FaultPoints()
    faults.fail("run", OSError("third and fourth"), times=2, after=2)
    outcomes = []
    for _ in range(6):
        try:
            outcomes.append(faults.reach("run"))
        except OSError:
            outcomes.append(None)
    assert outcomes == [1, 2, None, None, 5, 6]
    assert (faults.hits("run"), faults.hits("load")) == (6, 0)


def test_faults_delay_and_act_in_the_order_they_were_set() -> None:
    async def scene() -> list[float]:
        seen: list[float] = []
        loop = asyncio.get_running_loop()
        faults = FaultPoints()
        faults.do("load", lambda: seen.append(loop.time()))
        faults.delay("load", 9.0, times=1)
        faults.do("load", lambda: seen.append(loop.time()))
        worker = VirtualWorker("w")
        await worker.call(faults.reach, "load")
        await worker.call(faults.reach, "load")
        return seen

    assert run(scene()) == [0.0, 9.0, 9.0, 9.0]


def test_a_point_that_does_not_exist_is_refused() -> None:
    faults = FaultPoints()
    with pytest.raises(ValueError, match="no fault point 'laod': the points are load"):
        faults.fail("laod", OSError)
    with pytest.raises(ValueError, match="laod"):
        faults.hits("laod")


def test_resetting_releases_and_forgets(fault_points: Callable[[str], FaultPoints]) -> None:
    faults = fault_points("m")
    assert fault_points("m") is faults
    assert fault_points("n") is not faults
    latch = faults.hold("run")
    thread = threading.Thread(target=faults.reach, args=("run",))
    thread.start()
    FaultPoints.reset_all()
    thread.join(5.0)
    assert not thread.is_alive()
    assert latch.reached
    assert faults.hits("run") == 0
    assert fault_points("m") is not faults
