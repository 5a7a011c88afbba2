"""Requests that are told to come back find their model; ``min_resident_s`` binds all that the server does itself."""

from __future__ import annotations

import asyncio
import math

import pytest
from sie_core import LoraLoading, ModelLoading, Residency, Unavailable
from sie_core.residency import RegistrySettings
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(4))
RESIDENT = Residency.RESIDENT
TIER = 1024 * MIB


async def obeying(built: House, name: str, late: float = 0.0) -> int:
    """A client that does what Retry-After says, ``late`` by its own clock; how often it had to come."""
    for times in range(1, 20):
        try:
            (await built.registry.acquire(name)).release()
            return times
        except Unavailable as error:
            await asyncio.sleep(math.ceil(error.retry_after_s) + late)
    raise TimeoutError(f"{name} was never served")


def loads(built: House) -> list[str]:
    seen: list[str] = []
    built.registry.subscribe(lambda event: seen.append(event.model) if event.after is Residency.LOADING else None)
    return seen


@seeds
@pytest.mark.parametrize("late", [0.0, 0.9, 4.0])
@pytest.mark.parametrize("tier", [0, TIER])
@pytest.mark.parametrize("load_s", [3.1, 8.0, 8.7])
def test_a_client_that_obeys_retry_after_finds_the_model(seed: int, late: float, tier: int, load_s: float) -> None:
    """A5: however short the idle time-out is against the load; the first load, and one whose time is known."""

    async def scene() -> None:
        settings = RegistrySettings(load_wait_s=2.0, host_cache_bytes=tier)
        built = house(fake("a", load_s=load_s, idle_evict_s=0.1), settings=settings)
        seen = loads(built)
        for turn in (1, 2):
            await obeying(built, "a", late)
            assert len(seen) == turn
            await built.registry.unload("a")
        await close(built)

    play(scene, seed=seed)


@seeds
def test_two_models_whose_clients_come_back_do_not_take_the_place_from_each_other(seed: int) -> None:
    """A5: room for another model does not take one whose requests are on their way back."""

    async def scene() -> None:
        settings = RegistrySettings(load_wait_s=2.0, turn_s=0.5)
        built = house(fake("a", load_s=8.0), fake("b", load_s=8.0), settings=settings)
        seen = loads(built)
        await asyncio.gather(obeying(built, "a"), obeying(built, "b"))
        assert sorted(seen) == ["a", "b"]
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_model_that_nobody_comes_back_for_does_not_stay(seed: int) -> None:
    """A5: the wait for it is bounded."""

    async def scene() -> None:
        built = house(fake("a", load_s=8.0, idle_evict_s=1.0), settings=RegistrySettings(load_wait_s=2.0))
        with pytest.raises(ModelLoading):
            await built.registry.acquire("a")
        await built.until(lambda: built.state("a") is RESIDENT, 7.0)
        await built.until(lambda: built.state("a") is Residency.UNLOADED, 8.0)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_model_waits_for_the_request_of_an_adapter_that_is_loaded(seed: int) -> None:
    """A5: the same for a LoRA adapter that takes longer than its request waits."""

    async def scene() -> None:
        spec = fake("a", idle_evict_s=0.1, max_loras=1, lora_s=8.5, lora={"one": "path:/one"})
        built = house(spec, settings=RegistrySettings(load_wait_s=2.0))
        with pytest.raises(LoraLoading):
            await built.registry.load_lora("a", "one", None)
        await built.until(lambda: built.registry.status("a").loras[0].loaded)
        await built.registry.unload("a")
        await built.registry.load("a")
        with await built.registry.acquire("a") as lease, pytest.raises(LoraLoading) as told:
            await built.registry.hold_lora(lease, "one")
        await asyncio.sleep(told.value.retry_after_s + 0.9)
        assert built.state("a") is RESIDENT
        assert built.registry.status("a").loras[0].loaded
        await close(built)

    play(scene, seed=seed)


@pytest.mark.parametrize(("load_s", "wait_s"), [(8.7, 2.0), (100.0, 30.0), (5.0, 4.5)])
def test_retry_after_does_not_go_past_the_end_of_a_load_whose_time_is_known(load_s: float, wait_s: float) -> None:
    """A5: who comes back too early waits for the rest."""

    async def scene() -> None:
        built = house(fake("a", load_s=load_s))
        loop = asyncio.get_running_loop()
        await built.registry.load("a")
        await built.registry.unload("a")
        began = loop.time()
        with pytest.raises(ModelLoading) as told:
            await built.registry.acquire("a", wait_s=wait_s)
        seconds = told.value.retry_after_s
        assert seconds == int(seconds)
        assert seconds == 1.0 or loop.time() + seconds <= began + load_s
        await close(built)

    play(scene)


# --- min_resident_s ----------------------------------------------------------------------------------


@seeds
@pytest.mark.parametrize("tier", [0, TIER])
def test_no_idle_time_out_comes_before_min_resident_s(seed: int, tier: int) -> None:
    """A5: after a load, and after a wake."""

    async def scene() -> None:
        settings = RegistrySettings(host_cache_bytes=tier)
        built = house(fake("a", idle_evict_s=1.0, min_resident_s=60.0), settings=settings)
        for _ in range(2):
            (await built.registry.acquire("a")).release()
            await asyncio.sleep(59.0)
            assert built.state("a") is RESIDENT
            await asyncio.sleep(2.0)
            assert built.state("a") is not RESIDENT
        await close(built)

    play(scene, seed=seed)


@seeds
def test_no_other_model_takes_its_place_before_min_resident_s(seed: int) -> None:
    """A5: however long the other one has waited; nor does a batch that ran out of memory."""

    async def scene() -> None:
        built = house(fake("a", 60 * MIB, min_resident_s=20.0), fake("b"), fake("c", 60 * MIB))
        loop = asyncio.get_running_loop()
        began = loop.time()
        (await built.registry.acquire("a")).release()
        with await built.registry.acquire("c") as lease:
            assert not await built.registry.make_room(lease, 20 * MIB)
        (await built.registry.acquire("b")).release()
        assert loop.time() - began == pytest.approx(20.0, abs=0.5)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_operators_park_and_unload_it_before_min_resident_s(seed: int) -> None:
    """A5: what they ask for by hand is not the server's own choice."""

    async def scene() -> None:
        built = house(fake("a", min_resident_s=60.0), settings=RegistrySettings(host_cache_bytes=TIER))
        await built.registry.load("a")
        await built.registry.park("a", wait_s=1.0)
        await built.registry.load("a")
        await built.registry.unload("a", wait_s=1.0)
        await close(built)

    play(scene, seed=seed)
