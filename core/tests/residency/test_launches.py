"""What an engine that sizes itself is told and granted, and whom its launch keeps waiting."""

from __future__ import annotations

import asyncio

import pytest
from sie_core import DeviceGrant, Residency
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))
ACCOUNT = "emulated:0"


async def use(built: House, name: str) -> None:
    with await built.registry.acquire(name, wait_s=500.0):
        pass


async def granted(built: House, name: str) -> DeviceGrant:
    """What the engine is told as it begins to load."""
    task = asyncio.create_task(use(built, name))
    await built.until(lambda: built.state(name) is Residency.LOADING)
    ctx = built.registry._roster.records[name].ctx
    assert ctx is not None
    await task
    return ctx.grant.devices[ACCOUNT]


@seeds
def test_free_is_what_the_driver_calls_free_once_the_victims_are_gone(seed: int) -> None:
    """An engine that sizes itself measures this: told less, it would take a larger share, and too much."""

    async def scene() -> None:
        built = house(
            fake("stays", 20 * MIB, headroom_bytes=8 * MIB, pinned=True),
            fake("goes", 60 * MIB, headroom_bytes=10 * MIB, close_s=2.0),
            fake("comes", 70 * MIB, headroom_bytes=5 * MIB, load_s=1.0, self_sizing=True),
        )
        built.devices[ACCOUNT].foreign = 6 * MIB
        await use(built, "stays")
        await use(built, "goes")
        grant = await granted(built, "comes")
        assert built.state("goes") is Residency.UNLOADED
        assert grant == DeviceGrant(70 * MIB, 5 * MIB, 128 * MIB - 20 * MIB - 6 * MIB, 8 * MIB)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_its_own_promise_is_not_taken_for_somebody_elses(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("alone", 60 * MIB, headroom_bytes=5 * MIB, load_s=1.0, self_sizing=True))
        assert await granted(built, "alone") == DeviceGrant(60 * MIB, 5 * MIB, 128 * MIB, 0)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_two_that_size_themselves_are_each_as_large_as_if_alone(seed: int) -> None:
    """Scenario 7: one after the other, and what the first leaves is the second's, not only the least it asked for."""

    async def scene() -> None:
        built = house(
            *(fake(name, 30 * MIB, want_bytes=100 * MIB, load_s=5.0, self_sizing=True) for name in ("one", "two"))
        )
        sizes: dict[str, int] = {}

        async def ask(name: str) -> None:
            with await built.registry.acquire(name, wait_s=500.0) as lease:
                sizes[name] = lease.engine.memory().devices[ACCOUNT] or 0

        await asyncio.gather(ask("one"), ask("two"))
        assert sizes == {"one": 100 * MIB, "two": 100 * MIB}
        await close(built)

    play(scene, seed=seed)


@seeds
def test_what_its_victims_left_is_booked_again_when_it_wakes(seed: int) -> None:
    async def scene() -> None:
        built = house(
            fake("first", 90 * MIB),
            fake("second", 50 * MIB, want_bytes=100 * MIB),
            settings=RegistrySettings(host_cache_bytes=1024 * MIB),
        )
        await use(built, "first")
        await use(built, "second")
        assert built.ledger.available(ACCOUNT) == 28 * MIB
        await use(built, "first")
        await use(built, "second")
        assert built.ledger.available(ACCOUNT) == 28 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_after_running_out_of_memory_no_more_is_granted_than_before(seed: int) -> None:
    """The device gave out before the book did: what one more victim frees is what was missing."""

    async def scene() -> None:
        built = house(
            fake("victim", 40 * MIB),
            fake("greedy", 30 * MIB, want_bytes=100 * MIB, oom_at_load=1),
        )
        await use(built, "victim")
        await use(built, "greedy")
        assert built.registry.status("greedy").device_bytes == 88 * MIB
        assert built.state("victim") is Residency.UNLOADED
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_wake_sizes_nothing_and_needs_no_window(seed: int) -> None:
    """It brings back what was there: neither does it wait for another's load, nor another for it."""

    async def scene() -> None:
        built = house(
            fake("chat", 40 * MIB, self_sizing=True, load_s=5.0, restore_s=2.0),
            fake("slow", 20 * MIB, load_s=10.0),
            fake("other", 20 * MIB, load_s=1.0),
            settings=RegistrySettings(host_cache_bytes=1024 * MIB),
        )
        await use(built, "chat")
        await built.registry.park("chat")
        slow = asyncio.create_task(use(built, "slow"))
        await built.until(lambda: built.state("slow") is Residency.LOADING)
        chat = asyncio.create_task(use(built, "chat"))
        await built.until(lambda: built.state("chat") is Residency.WAKING, seconds=1.0)
        other = asyncio.create_task(use(built, "other"))
        await built.until(lambda: built.state("other") is Residency.LOADING, seconds=1.0)
        assert built.state("slow") is Residency.LOADING
        await chat
        assert built.state("slow") is Residency.LOADING
        await asyncio.gather(slow, other)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_nobody_wakes_beside_a_launch_that_sizes_itself(seed: int) -> None:
    async def scene() -> None:
        built = house(
            fake("chat", 40 * MIB, self_sizing=True, load_s=5.0),
            fake("small", 20 * MIB),
            settings=RegistrySettings(host_cache_bytes=1024 * MIB),
        )
        await use(built, "small")
        await built.registry.park("small")
        chat = asyncio.create_task(use(built, "chat"))
        await built.until(lambda: built.state("chat") is Residency.LOADING)
        small = asyncio.create_task(use(built, "small"))
        await asyncio.sleep(1.0)
        assert built.state("chat") is Residency.LOADING
        assert built.held(ACCOUNT) == 0
        await asyncio.gather(chat, small)
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("sizes_itself", [True, False])
def test_a_second_try_is_asked_for_what_the_first_one_showed(sizes_itself: bool, seed: int) -> None:
    async def scene() -> None:
        built = house(fake("chat", 40 * MIB, self_sizing=sizes_itself, oom_at_load=1), fake("other", 20 * MIB))
        await use(built, "other")
        await use(built, "chat")
        assert FaultPoints.of("chat").hits("reserve") == (2 if sizes_itself else 1)
        await close(built)

    play(scene, seed=seed)
