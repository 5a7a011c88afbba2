"""While an engine that sizes itself is launched, nobody else's bytes come free on its devices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
from sie_core import DeadlineExceeded, ModelNotFound, ModelSpec, Residency, SieError
from sie_core.residency import RegistrySettings
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(4))
RESIDENT, LOADING, UNLOADED = Residency.RESIDENT, Residency.LOADING, Residency.UNLOADED
TIER = RegistrySettings(host_cache_bytes=1024 * MIB)
LAUNCH_S = 20.0


def sizing(**fields: Any) -> ModelSpec:
    return fake("chat", 60 * MIB, self_sizing=True, load_s=LAUNCH_S, **fields)


async def launching(built: House) -> asyncio.Task[None]:
    """Begin the launch; the time at which it really begins is now."""
    task = asyncio.create_task(built.registry.load("chat"))
    await built.until(lambda: built.state("chat") is LOADING, 5.0)
    return task


async def nobody_moves(built: House, launch: asyncio.Task[None]) -> None:
    held = built.held("emulated:0")
    while not launch.done():
        if built.state("chat") is LOADING:
            assert built.held("emulated:0") == held, built.states()
        await asyncio.sleep(0.1)


def _remove(built: House) -> Awaitable[Any]:
    specs = [record.spec for record in built.registry._roster.records.values() if record.name != "small"]
    built.registry.apply(specs)
    return asyncio.sleep(0)


ACTS: list[Any] = [
    pytest.param(lambda built: built.registry.park("small"), id="A3: park"),
    pytest.param(lambda built: built.registry.unload("small"), id="A3: unload"),
    pytest.param(lambda built: built.registry.unload("small", force=True), id="A3: unload by force"),
    pytest.param(_remove, id="A3: removal"),
    pytest.param(lambda built: asyncio.sleep(0), id="A3: idle time-out"),
]


@seeds
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("busy", [False, True])
def test_who_is_to_leave_waits_for_the_end_of_the_launch(
    seed: int, act: Callable[[House], Awaitable[Any]], busy: bool
) -> None:
    async def scene() -> None:
        built = house(fake("small", 20 * MIB, idle_evict_s=5.0), sizing(), settings=TIER)
        await built.registry.load("small")
        lease = await built.registry.acquire("small") if busy else None
        launch = await launching(built)
        acting = asyncio.ensure_future(act(built))
        if lease is not None:
            asyncio.get_running_loop().call_later(1.0, lease.release)
        await nobody_moves(built, launch)
        await acting
        names = built.registry._roster.records
        await built.until(lambda: "small" not in names or names["small"].state is not RESIDENT, 10.0)
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("act", [act.values[0] for act in ACTS[:2]])
def test_a_model_that_operators_want_to_leave_serves_on_until_the_launch_is_over(
    seed: int, act: Callable[[House], Awaitable[Any]]
) -> None:
    """A3: and says what it waits for; an operator who would wait no longer is told."""

    async def scene() -> None:
        built = house(fake("small", 20 * MIB), sizing(), settings=TIER)
        await built.registry.load("small")
        launch = await launching(built)
        acting = asyncio.ensure_future(act(built))
        await asyncio.sleep(1.0)
        (await built.registry.acquire("small", wait_s=0.0)).release()
        waits = built.registry.status("small").waits_for
        assert waits is not None
        assert "chat" in waits
        with pytest.raises(DeadlineExceeded, match="until chat"):
            await built.registry.unload("small", wait_s=1.0)
        await launch
        with contextlib.suppress(SieError):  # a park that an unload has overtaken
            await acting
        await built.until(lambda: built.state("small") is UNLOADED, 5.0)
        assert built.registry.status("small").waits_for is None
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_launch_waits_until_who_leaves_is_gone(seed: int) -> None:
    """A3: a park that was under way, with enough room for the launch beside it."""

    async def scene() -> None:
        built = house(fake("small", 20 * MIB, offload_s=4.0), sizing(), settings=TIER)
        await built.registry.load("small")
        parking = asyncio.create_task(built.registry.park("small"))
        await built.until(lambda: built.state("small") is Residency.PARKING)
        launch = await launching(built)
        assert built.state("small") is Residency.PARKED
        await nobody_moves(built, launch)
        await parking
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_parked_engine_keeps_what_it_kept_until_the_launch_is_over(seed: int) -> None:
    """A3: its context on the device is bytes like any other."""

    async def scene() -> None:
        built = house(fake("small", 20 * MIB, context_bytes=5 * MIB), sizing(), settings=TIER)
        await built.registry.load("small")
        await built.registry.park("small")
        launch = await launching(built)
        unloading = asyncio.create_task(built.registry.unload("small"))
        await nobody_moves(built, launch)
        await unloading
        assert built.state("small") is UNLOADED
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_victim_of_another_device_is_not_taken_beside_a_launch(seed: int) -> None:
    """A3: it spans both devices, and the launch is on the other one."""

    async def scene() -> None:
        built = house(
            fake("wide", 20 * MIB, ranks=2),
            sizing(device="emulated:0"),
            fake("other", 120 * MIB, device="emulated:1"),
            devices={"emulated:0": 128 * MIB, "emulated:1": 128 * MIB},
        )
        await built.registry.load("wide")
        launch = await launching(built)
        other = asyncio.create_task(built.registry.load("other"))
        await nobody_moves(built, launch)
        await other
        assert built.state("wide") is UNLOADED
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("force", [False, True])
def test_the_end_of_the_server_waits_for_no_launch(seed: int, force: bool) -> None:
    """A3: nor is anything left of what was held back."""

    async def scene() -> None:
        built = house(fake("small", 20 * MIB), sizing(), settings=TIER)
        await built.registry.load("small")
        launch = await launching(built)
        unloading = asyncio.create_task(built.registry.unload("small", force=force))
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        await close(built)
        assert asyncio.get_running_loop().time() - began < LAUNCH_S / 2
        await asyncio.gather(launch, unloading, return_exceptions=True)

    play(scene, seed=seed)


@seeds
def test_a_model_that_changes_beside_a_launch_is_served_as_it_is_now(seed: int) -> None:
    """A3: its old engine takes no new requests, and goes when the launch is over; one that is removed is not found."""

    async def scene() -> None:
        small, chat = fake("small", 20 * MIB), sizing()
        built = house(small, chat, settings=TIER)
        await built.registry.load("small")
        launch = await launching(built)
        built.registry.apply([attrs.evolve(small, batch_tokens=1024), chat])
        with await built.registry.acquire("small", wait_s=30.0) as lease:
            assert lease.model.batch_tokens == 1024
        await launch
        await built.registry.unload("chat")
        launch = await launching(built)
        built.registry.apply([chat])
        with pytest.raises(ModelNotFound):
            await built.registry.acquire("small")
        await launch
        await close(built)

    play(scene, seed=seed)
