"""Configuration changes, engine deaths, stuck hooks, pins, foreign memory, shutdown: on the virtual clock."""

from __future__ import annotations

import asyncio

import attrs
import pytest
from sie_core import ConfigError, EngineDied, ModelLoadFailed, ModelNotFound, Residency, ResourceExhausted, ShuttingDown
from sie_core.memory.emulated import EmulatedDevice
from sie_core.residency import RegistrySettings, Worker
from sie_testing import FaultPoints
from sie_testing.house import MIB, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))


@pytest.mark.parametrize(
    ("fields", "fails"),
    [
        pytest.param({"malformed": "memory"}, None, id="A8: memory() returns a dict"),
        pytest.param({"malformed": "devices"}, None, id="A8: memory() says words"),
        pytest.param({}, "memory", id="A8: memory() raises"),
        pytest.param({}, "probe", id="A8: probe() raises"),
    ],
)
def test_an_engine_that_fails_its_examination_is_closed(fields: dict[str, str], fails: str | None) -> None:
    """A8: it was dropped with its bytes on the device."""

    async def scene() -> None:
        built = house(fake("a", 1 * MIB, allocate=True, **fields), settings=RegistrySettings(host_cache_bytes=64 * MIB))
        device = EmulatedDevice("emulated:0", 128 * MIB)
        built.registry._roster.devices["emulated:0"] = device
        if fails is not None:
            FaultPoints.of("a").fail(fails, SystemError("no"), times=1)
        with pytest.raises(ModelLoadFailed):
            await built.registry.load("a")
        assert FaultPoints.of("a").hits("close") == 1
        assert device.used() == 0
        assert built.ledger.claims() == []
        await built.registry.shutdown(10.0)

    play(scene)


@seeds
def test_a_change_in_mid_load_calls_it_off_and_its_waiters_get_the_new_configuration(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=10.0, salt="old"))
        before = built.registry.status("a").epoch
        waiting = asyncio.create_task(built.registry.acquire("a"))
        await built.until(lambda: built.state("a") is Residency.LOADING)
        await asyncio.sleep(1.0)
        built.registry.apply([fake("a", load_s=2.0, salt="new")])
        lease = await waiting
        assert lease.engine.options.salt == "new"  # type: ignore[attr-defined]
        assert lease.epoch > before
        assert asyncio.get_running_loop().time() < 9.0
        lease.release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_change_of_a_resident_model_lets_its_requests_finish(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", salt="old"), fake("b", 20 * MIB))
        old = await built.registry.acquire("a")
        (await built.registry.acquire("b")).release()
        epoch_b = built.registry.status("b").epoch
        built.registry.apply([fake("a", salt="new"), fake("b", 20 * MIB)])
        newer = asyncio.create_task(built.registry.acquire("a"))
        await asyncio.sleep(1.0)
        assert not newer.done()
        assert not old.lost.done()
        old.release()
        lease = await newer
        assert lease.engine.options.salt == "new"  # type: ignore[attr-defined]
        lease.release()
        assert built.state("b") is Residency.RESIDENT
        assert built.registry.status("b").epoch == epoch_b
        await close(built)

    play(scene, seed=seed)


def test_a_change_of_policy_touches_no_engine() -> None:
    async def scene() -> None:
        built = house(fake("a"))
        (await built.registry.acquire("a")).release()
        before = built.registry.status("a")
        built.registry.apply([attrs.evolve(before.spec, idle_evict_s=3.0)])
        assert built.state("a") is Residency.RESIDENT
        assert built.registry.status("a").epoch == before.epoch
        await asyncio.sleep(4.0)
        assert built.state("a") is Residency.UNLOADED
        await close(built)

    play(scene)


@seeds
def test_a_removed_model_is_gone_and_may_come_back(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", close_s=1.0), fake("b", 10 * MIB))
        (await built.registry.acquire("a")).release()
        built.registry.apply([fake("b", 10 * MIB)])
        with pytest.raises(ModelNotFound):
            built.registry.try_acquire("a")
        built.registry.apply([fake("a", salt="again"), fake("b", 10 * MIB)])
        lease = await built.registry.acquire("a")
        assert lease.engine.options.salt == "again"  # type: ignore[attr-defined]
        lease.release()
        built.registry.apply([fake("b", 10 * MIB)])
        await built.until(lambda: "a" not in built.registry)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_dead_engine_fails_its_requests_and_the_next_one_loads_cold(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=1.0))
        lease = await built.registry.acquire("a")
        lease.engine.die("killed")  # type: ignore[attr-defined]
        with pytest.raises(EngineDied):
            await asyncio.wait_for(lease.lost, 5)
        lease.release()
        fresh = await built.registry.acquire("a")
        assert fresh.engine is not lease.engine
        assert built.registry.status("a").leases == 1
        fresh.release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_load_that_hangs_is_quarantined_until_it_returns(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", 60 * MIB), fake("b", 100 * MIB), settings=RegistrySettings(load_timeout_s=20.0))
        latch = FaultPoints.of("a").hold("load", times=1)
        with pytest.raises(ModelLoadFailed) as caught:
            await built.registry.acquire("a")
        assert caught.value.error_class == "HookTimeout"
        assert built.state("a") is Residency.QUARANTINED
        assert "quarantined" in built.registry.health()[0]
        assert built.ledger.holding("a")  # booked until the call returns
        with pytest.raises(ResourceExhausted):
            await built.registry.acquire("b", wait_s=5)
        latch.release()
        await built.until(lambda: built.state("a") is Residency.FAILED)
        assert not built.ledger.holding("a")
        assert built.registry.health() == []
        (await built.registry.acquire("b")).release()
        await close(built)

    play(scene, seed=seed)


@pytest.mark.parametrize("error", [GeneratorExit(), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()])
async def test_a_load_that_raises_what_is_no_exception_fails_once_and_cools_down(error: BaseException) -> None:
    FaultPoints.reset_all()
    built = house(fake("a"), make_worker=Worker)  # a real thread: what crosses from it is the point
    FaultPoints.of("a").fail("load", error)
    with pytest.raises(ModelLoadFailed):
        await built.registry.acquire("a", wait_s=5)
    assert FaultPoints.of("a").hits("load") == 1
    assert built.state("a") is Residency.FAILED
    await close(built)


def test_a_close_that_fails_still_gives_the_claims_back() -> None:
    async def scene() -> None:
        built = house(fake("a"), fake("b"))
        (await built.registry.acquire("a")).release()
        FaultPoints.of("a").fail("close", RuntimeError("no"), times=1)
        (await built.registry.acquire("b")).release()
        assert built.state("a") is Residency.UNLOADED
        await close(built)

    play(scene)


@seeds
def test_a_loading_model_is_never_a_victim_and_counts_as_taken(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=5.0), fake("b", load_s=1.0))
        first = asyncio.create_task(built.registry.acquire("a"))
        await built.until(lambda: built.state("a") is Residency.LOADING)
        second = asyncio.create_task(built.registry.acquire("b"))
        lease = await first
        assert built.state("b") is Residency.QUEUED
        lease.release()
        (await second).release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_small_models_do_not_starve_a_large_one(seed: int) -> None:
    async def scene() -> None:
        built = house(*[fake(f"s{n}", 30 * MIB) for n in range(6)], fake("large", 120 * MIB))
        served = asyncio.Event()

        async def small(name: str) -> None:
            while not served.is_set():
                with await built.registry.acquire(name, wait_s=100):
                    await asyncio.sleep(0.3)
                await asyncio.sleep(0.05)

        crowd = [asyncio.create_task(small(f"s{n}")) for n in range(6)]
        await asyncio.sleep(3.0)
        (await built.registry.acquire("large")).release()
        served.set()
        await asyncio.gather(*crowd)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_more_memory_at_run_time_is_made_by_evicting_others(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", 50 * MIB), fake("b", 50 * MIB), fake("c", 20 * MIB))
        for name in ("b", "c", "a"):
            (await built.registry.acquire(name)).release()
        with await built.registry.acquire("a") as lease:
            assert await built.registry.make_room(lease, 30 * MIB)
            assert built.state("b") is Residency.UNLOADED
            assert built.registry.status("a").device_bytes == 80 * MIB
        built.registry.pin("c")
        with await built.registry.acquire("a") as lease:
            assert not await built.registry.make_room(lease, 30 * MIB)
        await close(built)

    play(scene, seed=seed)


def test_foreign_memory_evicts_after_two_samples_and_not_after_one() -> None:
    async def scene() -> None:
        built = house(fake("a", 50 * MIB), fake("b", 50 * MIB))
        await built.registry.start()
        for name in ("a", "b"):
            (await built.registry.acquire(name)).release()
        device = built.devices["emulated:0"]
        device.foreign, built.devices["emulated:0"].size = 60 * MIB, 170 * MIB  # the account keeps its 128 MiB
        await asyncio.sleep(1.1)
        assert built.states() == {"a": "resident", "b": "resident"}
        await asyncio.sleep(1.1)
        await built.until(lambda: built.state("a") is Residency.UNLOADED)
        assert built.state("b") is Residency.RESIDENT
        await close(built)

    play(scene)


def test_pinned_models_that_do_not_fit_together_are_a_start_error() -> None:
    async def scene() -> None:
        built = house(fake("a", pinned=True), fake("b", pinned=True))
        with pytest.raises(ConfigError, match="a, b"):
            await built.registry.start()
        await close(built)

    play(scene)


def test_pinned_models_are_loaded_at_start() -> None:
    async def scene() -> None:
        built = house(fake("a", pinned=True, load_s=3.0), fake("b", 10 * MIB))
        await built.registry.start()
        await built.until(lambda: built.state("a") is Residency.RESIDENT, 5)
        assert built.state("b") is Residency.UNLOADED
        await close(built)

    play(scene)


def test_a_model_whose_adapter_is_missing_fails_at_once_with_the_list() -> None:
    async def scene() -> None:
        built = house(attrs.evolve(fake("a"), adapter="no-such"))
        status = built.registry.status("a")
        assert status.residency is Residency.FAILED
        assert status.failure is not None
        assert status.failure.permanent
        with pytest.raises(ModelLoadFailed, match="fake"):
            await built.registry.acquire("a")
        await close(built)

    play(scene)


@seeds
def test_shutdown_fails_who_waits_and_lets_who_runs_finish(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a"), fake("b", load_s=50.0), fake("c", 20 * MIB), devices={"emulated:0": 200 * MIB})
        running = await built.registry.acquire("a")
        loading = asyncio.create_task(built.registry.acquire("b"))
        (await built.registry.acquire("c")).release()
        await built.until(lambda: built.state("b") is Residency.LOADING)
        ending = asyncio.create_task(built.registry.shutdown(30.0))
        with pytest.raises(ShuttingDown):
            await loading
        await asyncio.sleep(2.0)
        assert not ending.done()
        assert not running.lost.done()
        running.release()
        await ending
        assert not built.ledger.claims()
        with pytest.raises(ShuttingDown):
            await built.registry.acquire("a")

    play(scene, seed=seed)


def test_a_stuck_hook_does_not_hold_up_the_shutdown() -> None:
    async def scene() -> None:
        built = house(fake("a"))
        (await built.registry.acquire("a")).release()
        latch = FaultPoints.of("a").hold("close")
        start = asyncio.get_running_loop().time()
        await built.registry.shutdown(10.0)
        assert asyncio.get_running_loop().time() - start < 11.0
        latch.release()
        await asyncio.sleep(1.0)

    play(scene)


def test_the_device_of_a_model_is_chosen_by_room_and_least_eviction() -> None:
    async def scene() -> None:
        built = house(
            fake("a", 60 * MIB),
            fake("b", 60 * MIB),
            fake("c", 60 * MIB),
            fake("fixed", 10 * MIB, device="emulated:1"),
            fake("nowhere", 10 * MIB, device="cuda:7"),
            devices={"emulated:0": 100 * MIB, "emulated:1": 110 * MIB},
        )
        for name in ("a", "b", "fixed", "c"):
            (await built.registry.acquire(name)).release()
            await asyncio.sleep(1.0)
        status = {name: built.registry.status(name) for name in built.registry.names()}
        assert status["b"].devices == ("emulated:0",)
        assert status["fixed"].devices == ("emulated:1",)
        assert built.states()["a"] == "unloaded"
        with pytest.raises(ModelLoadFailed, match="cuda:7"):
            await built.registry.acquire("nowhere")
        await close(built)

    play(scene)
