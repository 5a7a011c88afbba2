"""Park and wake on a stand-in that keeps SGLang's rules and dies when one is broken."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

import psutil
import pytest
from attrs import evolve
from sie_adapters_sglang import plugin
from sie_adapters_sglang._offload import keeps_copy
from sie_core import (
    Declined,
    DeviceOutOfMemory,
    EngineDied,
    GenerateRequest,
    HostOffload,
    InferenceError,
    ModelLoading,
    TransitionCancelled,
    TransitionContext,
    TransitionError,
)
from sie_core.memory.emulated import EmulatedDevice

SCHEDULES = 1000
GIB, MIB = 1 << 30, 1 << 20
SMALL = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}
"""Sizes for an emulated device, which is made of real memory."""


def request(tokens: int = 4) -> GenerateRequest:
    return GenerateRequest("completion", {"prompt": "hi", "max_tokens": tokens})


async def park(engine: Any, ctx: TransitionContext | None = None) -> HostOffload:
    answer = await asyncio.to_thread(plugin.offload_to_host, engine, ctx or TransitionContext())
    assert answer is not None
    return answer


async def wake(engine: Any, ctx: TransitionContext | None = None) -> Any:
    return await asyncio.to_thread(plugin.restore_from_host, engine, ctx or TransitionContext())


def hasten(engine: Any, **pace: float) -> None:
    engine.parking.pace = evolve(engine.parking.pace, **pace)


async def test_parks_and_wakes(home: Any, start: Any, helpers: Any) -> None:
    ctx = helpers.context("emulated:0")
    engine = start(home.model(how=SMALL), ctx=ctx)
    assert plugin.host_offload_bytes(engine) == 16 * MIB
    assert engine.memory().devices == {"emulated:0": 48 * MIB}
    before = await asyncio.to_thread(engine.probe, helpers.context())
    assert (await park(engine)).host_bytes == 16 * MIB
    assert helpers.told(engine)["released"]
    assert engine.memory().devices == {"emulated:0": 0}
    assert (await wake(engine, ctx)).host_bytes == 0
    assert engine.memory().devices == {"emulated:0": 48 * MIB}
    assert not helpers.told(engine)["released"]
    assert await asyncio.to_thread(engine.probe, helpers.context()) == before
    assert (await engine.generate(request()))["choices"]


async def test_a_wake_that_finds_no_room_can_be_tried_again(home: Any, start: Any, helpers: Any) -> None:
    ctx = helpers.context("emulated:0")
    engine = start(home.model(how=SMALL), ctx=ctx)
    await park(engine)
    device = EmulatedDevice("emulated:0", 32 * MIB)
    crowded = TransitionContext(device_buffer=lambda _, nbytes: device.allocate(nbytes))
    with pytest.raises(DeviceOutOfMemory):
        await wake(engine, crowded)
    assert helpers.told(engine)["released"]
    await wake(engine, ctx)
    assert (await engine.generate(request()))["choices"]


async def test_requests_are_refused_while_it_is_parked(home: Any, start: Any) -> None:
    engine = start(home.model())
    await park(engine)
    with pytest.raises(ModelLoading):
        await engine.generate(request())
    with pytest.raises(ModelLoading):
        await anext(engine.stream(request()))
    engine.memory()  # asks nobody: the engine would die
    await wake(engine)
    assert (await engine.generate(request()))["choices"]


async def test_what_runs_is_waited_for(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"token_s": 0.01}))
    running = asyncio.create_task(engine.generate(request(40)))
    while not helpers.told(engine)["running"]:
        await asyncio.sleep(0.005)
    await park(engine)
    assert (await running)["choices"][0]["finish_reason"] == "length"
    assert helpers.told(engine)["aborted"] == 0


async def test_what_does_not_end_is_aborted(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"token_s": 0.01}))
    hasten(engine, drain_s=0.05, flush_s=0.05)
    running = asyncio.create_task(engine.generate(request(5000)))
    while not helpers.told(engine)["running"]:
        await asyncio.sleep(0.005)
    await park(engine)
    with pytest.raises(InferenceError, match="abort"):
        await running
    assert helpers.told(engine)["released"]


async def test_an_engine_that_does_not_come_to_rest_is_not_released(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"mute": True}))
    hasten(engine, drain_s=0.05, flush_s=0.05, abort_s=0.05)
    running = asyncio.create_task(engine.generate(request()))
    while not helpers.told(engine)["running"]:
        await asyncio.sleep(0.005)
    with pytest.raises(TransitionError, match="rest"):
        await park(engine)
    assert not helpers.told(engine)["released"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.parametrize("path", ["/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"])
async def test_a_control_call_that_fails_once(home: Any, start: Any, helpers: Any, path: str) -> None:
    """A flush is safe to repeat. Release and resume are not: they give up, and the engine is not used again."""
    engine = start(home.model(how={"fail_once": {path: 502}}))
    if path == "/flush_cache":
        await park(engine)
        await wake(engine)
        return
    with pytest.raises(TransitionError, match="502"):
        await park(engine)
        await wake(engine)
    for again in (park, wake):
        with pytest.raises(TransitionError, match="not known"):
            await again(engine)
    with pytest.raises(ModelLoading):
        await engine.generate(request())
    assert helpers.told(engine)["parks"] == (0 if path.startswith("/release") else 1)


async def test_a_park_that_is_called_off_before_the_release_leaves_it_as_it_was(
    home: Any, start: Any, helpers: Any
) -> None:
    engine = start(home.model())
    ctx = TransitionContext()
    ctx.cancelled.set()
    with pytest.raises(TransitionCancelled):
        await park(engine, ctx)
    assert (await engine.generate(request()))["choices"]
    assert helpers.told(engine)["parks"] == 0


async def test_no_time_left_is_an_error_before_anything_is_released(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model())
    with pytest.raises(TransitionError, match="no time"):
        await park(engine, TransitionContext(deadline=time.monotonic() - 1))
    assert helpers.told(engine)["parks"] == 0


async def test_a_parked_engine_that_is_killed_is_noticed(home: Any, start: Any, helpers: Any) -> None:
    events = helpers.Events()
    engine = start(home.model(), events=events)
    await park(engine)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        while not events.deaths:
            await asyncio.sleep(0.01)
    assert "signal 9" in events.deaths[0]
    assert engine.memory().devices == {"cpu": 0}
    with pytest.raises(TransitionError, match="died"):
        await wake(engine)
    with pytest.raises(EngineDied):
        await engine.generate(request())


def test_who_can_be_parked(home: Any, start: Any, helpers: Any) -> None:
    on_cpu = start(home.model())
    assert isinstance(plugin.host_offload_bytes(on_cpu), Declined)
    opted_out = start(home.model(park=False, how=SMALL), ctx=helpers.context("emulated:0"))
    declined = plugin.host_offload_bytes(opted_out)
    assert isinstance(declined, Declined)
    assert "park: false" in declined.reason
    without_saver = start(home.model(), ctx=helpers.context("cuda:0"))
    declined = plugin.host_offload_bytes(without_saver)
    assert isinstance(declined, Declined)
    assert "torch-memory-saver" in declined.reason
    with_saver = start(home.model(saver="0.0.9"), ctx=helpers.context("cuda:0"))
    assert plugin.host_offload_bytes(with_saver) == GIB
    assert plugin.host_offload_bytes(object()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("saver", "kept"), [("0.0.9", GIB), ("0.0.9.post1", GIB), ("0.0.10", 0), ("0.1.0", 0)])
async def test_what_stays_on_the_host_after_a_wake(home: Any, start: Any, helpers: Any, saver: str, kept: int) -> None:
    engine = start(home.model(saver=saver), ctx=helpers.context("cuda:0"))
    offload = await park(engine)
    assert offload.host_bytes == GIB
    assert offload.retained == {"cuda:0": GIB}  # its context
    residue = await wake(engine)
    assert (residue.host_bytes, residue.droppable) == (kept, False)


def test_the_copy_stays_where_the_environment_says_so() -> None:
    assert keeps_copy("0.0.10", "1")
    assert not keeps_copy("0.0.10", "0")
    assert not keeps_copy(None, "1")


@pytest.mark.slow
async def test_no_schedule_of_parks_wakes_and_requests_kills_it(home: Any, start: Any, helpers: Any) -> None:
    """1,000 random ones. Requests come and go whenever they like; transitions come one at a time, as from the core."""
    events = helpers.Events()
    engine = start(home.model(how={"token_s": 0.0005}), events=events)
    hasten(engine, drain_s=0.003, flush_s=0.003)
    outcomes: dict[str, int] = {}

    def count(what: str) -> None:
        outcomes[what] = outcomes.get(what, 0) + 1

    async def ask(dice: random.Random) -> None:
        await asyncio.sleep(dice.random() * 0.01)
        tokens = dice.choice((1, 3, 10, 40))
        try:
            if dice.random() < 0.5:
                async with asyncio.timeout(dice.choice((0.002, 5.0))):
                    await engine.generate(request(tokens))
            else:
                stream = engine.stream(request(tokens))
                async for _ in stream:
                    if dice.random() < 0.1:
                        break
                await stream.aclose()
            count("answered")
        except (ModelLoading, TimeoutError, InferenceError) as error:
            count(type(error).__name__)

    async def move(dice: random.Random) -> None:
        ctx = TransitionContext()
        if dice.random() < 0.1:
            ctx.cancelled.set()
        try:
            await park(engine, ctx)
        except TransitionCancelled:
            count("called off")
            return
        await asyncio.sleep(dice.random() * 0.003)
        await wake(engine)
        count("parked")

    for seed in range(SCHEDULES):
        dice = random.Random(seed)
        asks = [asyncio.create_task(ask(dice)) for _ in range(dice.randrange(5))]
        for _ in range(dice.randrange(1, 3)):
            await asyncio.sleep(dice.random() * 0.015)
            await move(dice)
        await asyncio.gather(*asks)
        assert not events.deaths, (seed, events.deaths)
    assert outcomes["parked"] > 1000
    for what in ("answered", "ModelLoading", "TimeoutError", "InferenceError"):
        assert outcomes[what] > 5, outcomes


# --- what never parks ------------------------------------------------------------------------------------

SAVER = {"--enable-memory-saver", "--enable-weights-cpu-backup", "--cuda-graph-backend-prefill"}


@pytest.mark.parametrize(("tier", "allowed", "wanted"), [(0, True, set()), (8, False, set()), (8, True, SAVER)])
async def test_the_memory_saver_is_for_those_that_may_be_parked(
    home: Any, front: Any, helpers: Any, tier: int, allowed: bool, wanted: set[str]
) -> None:
    """B1: with a budget of 0, or host_offload: false, the command line is what it is without a tier."""
    model = evolve(home.model(saver="0.0.10"), host_offload=allowed)
    async with front(model, devices=[helpers.Card(24 * GIB)], tier=tier * GIB) as server:
        assert (await server.chat()).status_code == 200
        assert SAVER & set(server.argv()) == wanted
        environment = psutil.Process(server.engine().pid).environ()
        assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in environment) is bool(wanted)
        parked = await server.act("park")
        assert parked.status_code == (200 if wanted else 400 if tier else 501), parked.text
