"""Parking and waking, on the virtual clock: what comes back, what falls back, what is booked."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from sie_core import HostOutOfMemory, ModelSpec, Residency, ResourceExhausted, ShuttingDown, Unsupported, WakeCheck
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))
PARKED, RESIDENT, UNLOADED = Residency.PARKED, Residency.RESIDENT, Residency.UNLOADED


def tier(*specs: ModelSpec, budget: int = 1024 * MIB, **more: Any) -> House:
    return house(*specs, settings=RegistrySettings(host_cache_bytes=budget), **more)


async def use(built: House, name: str, seconds: float = 0.0) -> None:
    with await built.registry.acquire(name):
        await asyncio.sleep(seconds)


def host(built: House, name: str) -> int:
    return built.registry.status(name).host_bytes


@seeds
def test_models_take_turns_by_parking_and_no_engine_is_loaded_twice(seed: int) -> None:
    async def scene() -> None:
        built = tier(*[fake(name, load_s=20.0, offload_s=0.01, restore_s=0.01) for name in "abc"])
        engines: dict[str, set[int]] = {}
        for _ in range(3):
            for name in "abc":
                with await built.registry.acquire(name, wait_s=100) as lease:
                    engines.setdefault(name, set()).add(id(lease.engine))
        assert {name: len(ids) for name, ids in engines.items()} == {"a": 1, "b": 1, "c": 1}
        assert built.states() == {"a": "parked", "b": "parked", "c": "resident"}
        assert host(built, "a") == 87 * MIB
        assert host(built, "c") == 0
        assert built.registry.status("a").device_bytes == 0
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_wake_does_not_wait_for_another_models_cold_load(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", 40 * MIB, restore_s=0.01), fake("cold", 60 * MIB, load_s=10.0))
        await use(built, "a")
        await built.registry.park("a")
        loading = asyncio.create_task(use(built, "cold"))
        await built.until(lambda: built.state("cold") is Residency.LOADING)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await use(built, "a")
        assert loop.time() - began < 0.1
        await loading
        await close(built)

    play(scene, seed=seed)


@seeds
def test_the_budget_drops_the_copy_that_was_parked_longest_ago(seed: int) -> None:
    async def scene() -> None:
        built = tier(*[fake(name, 40 * MIB) for name in "abcd"], budget=90 * MIB)
        for name in "abc":
            await use(built, name)
            await built.registry.park(name)
            await asyncio.sleep(1.0)
        assert built.states() == {"a": "unloaded", "b": "parked", "c": "parked", "d": "unloaded"}
        assert built.ledger.holding("a") == {}
        await close(built)

    play(scene, seed=seed)


def test_a_model_over_the_budget_unloads() -> None:
    async def scene() -> None:
        built = tier(fake("a"), fake("b"), budget=50 * MIB)
        await use(built, "a")
        with pytest.raises(Unsupported, match="over the budget"):
            await built.registry.park("a")
        await use(built, "b")
        assert built.state("a") is UNLOADED
        await close(built)

    play(scene)


def test_droppable_backups_go_before_parked_copies_and_make_later_parks_free() -> None:
    async def scene() -> None:
        built = tier(
            fake("a", 40 * MIB, backup=True), fake("b", 40 * MIB), fake("c", 40 * MIB), budget=90 * MIB,
            devices={"emulated:0": 500 * MIB},
        )  # fmt: skip
        for name in "ab":
            await use(built, name)
            await built.registry.park(name)
        await use(built, "a")
        assert host(built, "a") == 40 * MIB  # the backup is charged
        await built.registry.park("a")
        assert host(built, "a") == 40 * MIB
        await use(built, "a")
        await use(built, "c")
        await built.registry.park("c")
        assert built.states() == {"a": "resident", "b": "parked", "c": "parked"}
        assert host(built, "a") == 0
        await use(built, "a")
        await close(built)

    play(scene)


@pytest.mark.parametrize("check", ["auto", "first", "never", "always"])
def test_an_engine_that_does_not_live_after_a_later_wake_is_loaded_again(check: str) -> None:
    """A12: only the first wake asked the engine anything."""

    async def scene() -> None:
        built = tier(fake("a", wake_check=WakeCheck(check)))
        for _ in range(4):
            await use(built, "a")
            await built.registry.park("a")
        FaultPoints.of("a").fail("alive", RuntimeError("no answer"), times=1)
        await use(built, "a")
        assert FaultPoints.of("a").hits("load") == 2
        assert FaultPoints.of("a").hits("alive") == 4
        await close(built)

    play(scene)


@seeds
def test_park_and_wake_twice_are_no_ops(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", offload_s=0.5, restore_s=0.5))
        await use(built, "a")
        await asyncio.gather(built.registry.park("a"), built.registry.park("a"))
        await built.registry.park("a")
        assert built.state("a") is PARKED
        await asyncio.gather(built.registry.wake("a"), built.registry.wake("a"), use(built, "a"))
        await built.registry.wake("a")
        assert built.state("a") is RESIDENT
        assert FaultPoints.of("a").hits("offload") == 1
        assert FaultPoints.of("a").hits("restore") == 1
        await close(built)

    play(scene, seed=seed)


@seeds
def test_requests_before_during_and_after_a_park_are_all_answered(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", offload_s=1.0, restore_s=1.0))
        await use(built, "a")
        running = asyncio.create_task(use(built, "a", 2.0))
        await asyncio.sleep(0.1)
        parking = asyncio.create_task(built.registry.park("a"))
        tasks = [running, parking]
        for _ in range(40):
            await asyncio.sleep(0.1)
            tasks.append(asyncio.create_task(use(built, "a", 0.05)))
        await asyncio.gather(*tasks)
        assert FaultPoints.of("a").hits("load") == 1
        await close(built)

    play(scene, seed=seed)


@seeds
def test_corrupted_weights_are_noticed_and_the_model_loads_cold(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", corrupt_restore=True))
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "a")
        assert FaultPoints.of("a").hits("load") == 2
        failed = [decision for decision in built.registry.decisions() if decision.action == "wake failed"]
        assert "does not answer as it did" in failed[0].reason
        await close(built)

    play(scene, seed=seed)


def test_an_engine_that_frees_a_third_is_charged_for_the_rest_and_not_parked_again() -> None:
    async def scene() -> None:
        built = tier(fake("a", 90 * MIB, freed=1 / 3), fake("b", 80 * MIB))
        device = built.devices["emulated:0"]
        device.house = None
        reported: dict[str, int] = {"used": 90 * MIB}
        device.measured = lambda: reported["used"]
        await use(built, "a")
        FaultPoints.of("a").do("offload", lambda: reported.update(used=60 * MIB))
        await built.registry.park("a")
        assert built.registry.status("a").device_bytes == 60 * MIB
        assert any(decision.action == "not parkable" for decision in built.registry.decisions())
        FaultPoints.of("a").do("close", lambda: reported.update(used=0))
        await use(built, "b")  # it holds on to what "b" needs: it is dropped
        assert built.state("a") is UNLOADED
        await close(built)

    play(scene)


@seeds
def test_a_failed_park_unloads_and_a_failed_wake_loads_cold(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a"))
        points = FaultPoints.of("a")
        await use(built, "a")
        points.fail("offload", RuntimeError("no"), times=1)
        with pytest.raises(ResourceExhausted):
            await built.registry.park("a")
        assert built.state("a") is UNLOADED
        await use(built, "a")
        await built.registry.park("a")
        points.fail("restore", RuntimeError("no"), times=1)
        await use(built, "a")
        assert points.hits("load") == 3
        assert host(built, "a") == 0
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_wake_out_of_memory_evicts_and_tries_again_with_its_copy(seed: int) -> None:
    from sie_core import DeviceOutOfMemory

    async def scene() -> None:
        built = tier(fake("a", 40 * MIB), fake("b", 40 * MIB))
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "b")
        FaultPoints.of("a").fail("restore", DeviceOutOfMemory("full", account="emulated:0"), times=1)
        await use(built, "a")
        assert FaultPoints.of("a").hits("load") == 1
        await built.until(lambda: built.state("b") is PARKED)
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("moment", ["offload", "restore", "parked"])
def test_a_change_in_the_middle_of_a_park_or_wake_throws_the_engine_away(moment: str, seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", offload_s=1.0, restore_s=1.0, salt="old"))
        await use(built, "a")
        parking = asyncio.create_task(built.registry.park("a"))
        asking = None
        if moment == "offload":
            await built.until(lambda: built.state("a") is Residency.PARKING)
        else:
            await parking
            if moment == "restore":
                asking = asyncio.create_task(built.registry.acquire("a"))
                await built.until(lambda: built.state("a") is Residency.WAKING)
        built.registry.apply([fake("a", offload_s=1.0, restore_s=1.0, salt="new")])
        lease = await (asking or built.registry.acquire("a"))
        assert lease.engine.options.salt == "new"  # type: ignore[attr-defined]
        lease.release()
        await asyncio.gather(parking, return_exceptions=True)
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("moment", ["offload", "restore", "parked"])
def test_shutdown_in_the_middle_of_a_park_or_wake_leaves_nothing(moment: str, seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", offload_s=1.0, restore_s=1.0))
        await use(built, "a")
        parking = asyncio.create_task(built.registry.park("a"))
        asking = None
        if moment == "offload":
            await built.until(lambda: built.state("a") is Residency.PARKING)
        else:
            await parking
            if moment == "restore":
                asking = asyncio.create_task(built.registry.acquire("a"))
                await built.until(lambda: built.state("a") is Residency.WAKING)
        await close(built)
        if asking is not None:
            with pytest.raises(ShuttingDown):
                await asking
        await asyncio.gather(parking, return_exceptions=True)

    play(scene, seed=seed)


@seeds
def test_a_parked_engine_that_dies_is_noticed_and_loads_cold(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a"))
        with await built.registry.acquire("a") as lease:
            engine: Any = lease.engine
        await built.registry.park("a")
        engine.die("killed")
        await built.until(lambda: built.state("a") is UNLOADED)
        assert built.ledger.holding("a") == {}
        await use(built, "a")
        assert FaultPoints.of("a").hits("load") == 2
        await close(built)

    play(scene, seed=seed)


def test_retained_device_memory_stays_in_the_book_and_is_given_up_last() -> None:
    async def scene() -> None:
        built = tier(
            fake("a", 60 * MIB, context_bytes=20 * MIB), fake("b", 70 * MIB), fake("c", 110 * MIB),
            devices={"emulated:0": 128 * MIB},
        )  # fmt: skip
        await use(built, "a")
        await use(built, "b")
        assert built.states()["a"] == "parked"
        assert built.registry.status("a").device_bytes == 20 * MIB
        await use(built, "c")
        assert built.states() == {"a": "unloaded", "b": "parked", "c": "resident"}
        await close(built)

    play(scene)


def test_host_offload_false_and_declined_models_unload() -> None:
    async def scene() -> None:
        built = tier(attrs.evolve(fake("a"), host_offload=False), fake("b", decline="tuples of tensors"), fake("c"))
        for name in "abc":
            await use(built, name)
        assert built.states() == {"a": "unloaded", "b": "unloaded", "c": "resident"}
        assert "tuples of tensors" in [decision.reason for decision in built.registry.decisions()]
        await close(built)

    play(scene)


@seeds
def test_unload_on_request_does_not_park_and_idle_time_outs_do(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", idle_evict_s=2.0))
        await use(built, "a")
        await built.registry.unload("a")
        assert built.state("a") is UNLOADED
        await use(built, "a")
        await built.until(lambda: built.state("a") is PARKED)
        await built.registry.unload("a")
        assert built.state("a") is UNLOADED
        assert host(built, "a") == 0
        await close(built)

    play(scene, seed=seed)


@seeds
def test_the_waiters_of_a_wake_may_leave_without_harm(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", restore_s=1.0))
        await use(built, "a")
        await built.registry.park("a")
        tasks = [asyncio.create_task(use(built, "a")) for _ in range(5)]
        await asyncio.sleep(0.5)
        for task in tasks[:4]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[4] is None
        assert built.registry.status("a").leases == 0
        await close(built)

    play(scene, seed=seed)


def test_the_idle_arena_is_booked_and_reused() -> None:
    async def scene() -> None:
        built = tier(fake("a", 8 * MIB, backup=False))
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "a")
        claims = {claim.owner: claim.charge for claim in built.ledger.claims() if claim.account == "host"}
        assert claims in ({}, {"idle host arena": 8 * MIB})
        await close(built)

    play(scene)


@seeds
def test_an_engine_that_outgrew_its_backup_gets_a_copy_of_its_new_size(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", 40 * MIB, backup=True))
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "a")
        full = HostOutOfMemory("the backup is too small", account="host")
        FaultPoints.of("a").fail("offload", full, times=1)
        await built.registry.park("a")
        assert built.state("a") is PARKED
        await use(built, "a")
        assert FaultPoints.of("a").hits("load") == 1
        await close(built)

    play(scene, seed=seed)


async def test_what_an_engine_came_to_need_is_booked_again_when_it_wakes() -> None:
    FaultPoints.reset_all()
    built = tier(fake("a", 40 * MIB), fake("b", 20 * MIB))  # on the real clock: an engine asks from a thread of its own
    with await built.registry.acquire("a") as lease:
        engine: Any = lease.engine
        assert await asyncio.to_thread(engine.grow, "emulated:0", 30 * MIB)
    assert built.registry.status("a").device_bytes == 70 * MIB
    await built.registry.park("a")
    assert built.registry.status("a").device_bytes == 0
    await use(built, "a")
    assert built.registry.status("a").device_bytes == 70 * MIB
    await close(built)


def test_more_room_at_run_time_does_not_book_the_configured_headroom_again() -> None:
    async def scene() -> None:
        built = tier(fake("a", 20 * MIB, runtime_headroom=40 * MIB), fake("b", 40 * MIB))
        await use(built, "b")
        with await built.registry.acquire("a") as lease:
            assert await built.registry.make_room(lease, 10 * MIB)
        assert built.registry.status("a").device_bytes == 70 * MIB
        await built.registry.park("a")
        await use(built, "a")
        assert built.registry.status("a").device_bytes == 70 * MIB
        await close(built)

    play(scene)


def test_a_budget_of_exactly_one_model_parks_it() -> None:
    async def scene() -> None:
        odd = 40 * MIB + 100
        built = tier(fake("a", odd), budget=40 * MIB + 4096)
        await use(built, "a")
        await built.registry.park("a")
        assert built.state("a") is PARKED
        await close(built)
        small = tier(fake("a", odd), budget=40 * MIB)
        await use(small, "a")
        with pytest.raises(Unsupported, match="over the budget"):
            await small.registry.park("a")
        await close(small)

    play(scene)


@seeds
def test_whoever_asked_for_a_park_is_told_when_the_engine_hangs(seed: int) -> None:
    async def scene() -> None:
        settings = RegistrySettings(host_cache_bytes=1024 * MIB, offload_timeout_s=2.0)
        built = house(fake("a", 40 * MIB), settings=settings)
        await use(built, "a")
        latch = FaultPoints.of("a").hold("offload")
        with pytest.raises(ResourceExhausted, match="does not return"):
            await asyncio.wait_for(built.registry.park("a"), 10.0)
        assert built.state("a") is Residency.QUARANTINED
        latch.release()
        await built.until(lambda: built.state("a") is UNLOADED)
        await close(built)

    play(scene, seed=seed)
