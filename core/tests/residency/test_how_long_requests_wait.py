"""A request waits as long as a wake may take where a wake will do, else as a load, whatever it met when it came."""

from __future__ import annotations

import asyncio

import pytest
from sie_core import ModelLoading, Residency
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play
from sie_testing.virtual import pause

seeds = pytest.mark.parametrize("seed", range(4))
WAKE_S, LOAD_S, LATE_S = 5.0, 20.0, 4.0


def settings(tier: bool = True) -> RegistrySettings:
    budget = 1024 * MIB if tier else 0
    return RegistrySettings(host_cache_bytes=budget, wake_wait_s=WAKE_S, load_wait_s=LOAD_S)


def fails_late() -> None:
    pause(LATE_S)
    raise ValueError("no")


async def waits(built: House, name: str, wait_s: float | None = None) -> float:
    """How long a request waits until it is told to come back."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ModelLoading):
        await built.registry.acquire(name, wait_s=wait_s)
    return loop.time() - began


@seeds
@pytest.mark.parametrize("why", ["park", "room"])
@pytest.mark.parametrize(("tier", "limit"), [(True, WAKE_S), (False, LOAD_S)])
def test_a_request_that_meets_a_drain_waits_for_what_comes_of_it(seed: int, why: str, tier: bool, limit: float) -> None:
    """A6: for a wake where the model will be parked, for a load where it will be unloaded."""

    async def scene() -> None:
        built = house(fake("a", load_s=50.0), fake("b", load_s=50.0), settings=settings(tier))
        await built.registry.load("a")
        lease = await built.registry.acquire("a")
        if why == "room":
            acting = asyncio.create_task(built.registry.load("b"))
        else:
            acting = asyncio.create_task(built.registry.park("a") if tier else built.registry.unload("a"))
        await built.until(lambda: built.state("a") is Residency.DRAINING)
        assert await waits(built, "a", 0.5) == pytest.approx(0.5, abs=0.01)
        assert await waits(built, "a") == pytest.approx(limit, abs=0.01)
        lease.release()
        await acting
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("point", ["restore", "probe"])
def test_a_wake_that_fails_leaves_its_requests_the_time_of_a_load(seed: int, point: str) -> None:
    """A6: from their arrival on."""

    async def scene() -> None:
        built = house(fake("a", load_s=8.0), settings=settings())
        loop = asyncio.get_running_loop()
        await built.registry.load("a")
        await built.registry.park("a")
        FaultPoints.of("a").do(point, fails_late, times=1)
        began = loop.time()
        (await built.registry.acquire("a")).release()
        assert loop.time() - began == pytest.approx(LATE_S + 8.0, abs=0.1)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_park_that_fails_leaves_its_requests_the_time_of_a_load_and_no_more(seed: int) -> None:
    """A6: the limit of a load counts from the arrival too."""

    async def scene() -> None:
        built = house(fake("a", load_s=50.0), settings=settings())
        await built.registry.load("a")
        FaultPoints.of("a").do("offload", fails_late, times=1)
        parking = asyncio.create_task(built.registry.park("a"))
        await built.until(lambda: built.state("a") is Residency.PARKING)
        assert await waits(built, "a") == pytest.approx(LOAD_S, abs=0.01)
        await asyncio.gather(parking, return_exceptions=True)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_slow_wake_is_still_waited_for_no_longer_than_its_limit(seed: int) -> None:
    """A6: in every state that comes before it."""

    async def scene() -> None:
        built = house(fake("a", offload_s=4.0, restore_s=50.0), settings=settings())
        await built.registry.load("a")
        parking = asyncio.create_task(built.registry.park("a"))
        await built.until(lambda: built.state("a") is Residency.PARKING)
        for state in (Residency.PARKING, Residency.WAKING):
            assert built.state("a") is state
            assert await waits(built, "a") == pytest.approx(WAKE_S, abs=0.01)
        await parking
        await close(built)

    play(scene, seed=seed)
