"""LoRA adapters of a resident engine, on the virtual clock: who loads them, who goes first, what is booked."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from sie_core import (
    BatchRequest,
    DeadlineExceeded,
    EngineDied,
    Item,
    LoraLoading,
    ModelLoadFailed,
    ModelSpec,
    RequestParams,
    Residency,
    Task,
    Unsupported,
)
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))
SOURCES = {name: f"path:/loras/{name}" for name in ("one", "two", "three")}


def adaptable(name: str = "m", size: int = 40 * MIB, **more: Any) -> ModelSpec:
    return fake(name, size, **{"max_loras": 2, "lora_bytes": MIB, "lora": SOURCES, **more})


def tier(*specs: ModelSpec, **more: Any) -> House:
    return house(*specs, settings=RegistrySettings(host_cache_bytes=1024 * MIB), **more)


async def use(built: House, lora: str, model: str = "m", seconds: float = 0.0, wait_s: float | None = None) -> None:
    """A request that names an adapter, to the engine's own answer: a fake one fails without its adapter."""
    with (
        await built.registry.acquire(model) as lease,
        await built.registry.hold_lora(lease, lora, wait_s=wait_s),
    ):
        engine: Any = lease.engine
        request = BatchRequest(Task.ENCODE, [Item("x")], RequestParams(lora=lora))
        await lease.worker.call(engine.run, engine.prepare(request))
        if seconds:
            await asyncio.sleep(seconds)


def loaded(built: House, model: str = "m") -> list[str]:
    return [lora.name for lora in built.registry.status(model).loras if lora.loaded]


def held(built: House, model: str = "m") -> int:
    return built.registry.status(model).device_bytes


@seeds
def test_an_adapter_is_loaded_once_for_all_who_wait_and_booked(seed: int) -> None:
    async def scene() -> None:
        built = house(adaptable(lora_s=0.5))
        await asyncio.gather(*[use(built, "one") for _ in range(5)])
        assert FaultPoints.of("m").hits("lora_load") == 1
        assert loaded(built) == ["one"]
        assert held(built) == 41 * MIB
        assert built.ledger.available("emulated:0") == (128 - 41) * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_the_least_recently_used_adapter_makes_place(seed: int) -> None:
    async def scene() -> None:
        built = house(adaptable())
        for name in ("one", "two", "one", "three"):
            await use(built, name)
        assert loaded(built) == ["one", "three"]
        assert held(built) == 42 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_an_adapter_in_use_stays_and_the_newcomer_waits(seed: int) -> None:
    async def scene() -> None:
        built = house(adaptable(max_loras=1))
        first = asyncio.create_task(use(built, "one", seconds=5.0))
        await built.until(lambda: loaded(built) == ["one"])
        with pytest.raises(LoraLoading) as refused:
            await use(built, "two", wait_s=1.0)
        assert refused.value.retry_after_s >= 1.0
        second = asyncio.create_task(use(built, "two"))
        await asyncio.gather(first, second)
        assert loaded(built) == ["two"]
        assert held(built) == 41 * MIB
        await close(built)

    play(scene, seed=seed)


def test_names_that_nobody_knows_and_models_that_take_none() -> None:
    async def scene() -> None:
        built = house(adaptable(), fake("plain", 10 * MIB, lora=SOURCES))
        with pytest.raises(Unsupported, match="it has one, two, three") as unknown:
            await use(built, "four")
        assert unknown.value.supported == ("one", "two", "three")
        with pytest.raises(Unsupported, match="takes no LoRA adapters"):
            await use(built, "one", "plain")
        await close(built)

    play(scene)


def test_one_that_can_not_be_loaded_fails_its_requests_and_leaves_nothing_booked() -> None:
    async def scene() -> None:
        built = house(adaptable(lora={**SOURCES, "gone": "path:/loras/missing"}))
        with pytest.raises(ModelLoadFailed, match="made up to be missing") as failed:
            await use(built, "gone")
        assert failed.value.permanent
        with pytest.raises(ModelLoadFailed):
            await use(built, "gone")
        assert FaultPoints.of("m").hits("lora_reserve") == 1, "a permanent failure is not tried again"
        await use(built, "one")
        assert held(built) == 41 * MIB
        await built.registry.load_lora("m", "one", SOURCES["one"])
        await close(built)

    play(scene)


def test_out_of_memory_unloads_idle_adapters_before_it_evicts_a_model() -> None:
    async def scene() -> None:
        built = house(adaptable(oom_at_lora=0), fake("other", 30 * MIB))
        with await built.registry.acquire("other"):
            await asyncio.sleep(0)
        await use(built, "one")
        options = attrs.evolve(built.registry.status("m").spec.options, oom_at_lora=2)
        engine = built.registry._roster.records["m"].seat.engine  # type: ignore[union-attr]
        engine.options = options  # type: ignore[attr-defined]
        await use(built, "two")
        assert loaded(built) == ["two"]
        assert built.state("other") is Residency.RESIDENT
        await close(built)

    play(scene)


@seeds
def test_an_adapter_evicts_an_idle_model_for_room(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable(size=60 * MIB, lora_bytes=20 * MIB), fake("other", 60 * MIB))
        with await built.registry.acquire("other"):
            await asyncio.sleep(0)
        await use(built, "one")
        assert built.states() == {"m": "resident", "other": "parked"}
        assert held(built) == 80 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_adapters_come_back_with_a_wake_and_leave_the_book_with_an_unload(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable(backup=True))
        for name in ("one", "two"):
            await use(built, name)
        for _ in range(3):
            await built.registry.park("m")
            assert held(built) == 0
            assert built.registry.status("m").host_bytes == 42 * MIB
            await built.registry.wake("m")
            assert held(built) == 42 * MIB
            assert loaded(built) == ["one", "two"]
        assert FaultPoints.of("m").hits("lora_load") == 2
        await built.registry.unload_lora("m", "one")
        assert held(built) == 41 * MIB
        assert built.ledger.available("emulated:0") == (128 - 41) * MIB
        await built.registry.park("m")
        assert built.registry.status("m").host_bytes == 42 * MIB, "the memory of the kept backup is used again"
        await use(built, "two")
        assert held(built) == 41 * MIB
        await use(built, "one")
        assert FaultPoints.of("m").hits("lora_load") == 3, "a configured one may be named again"
        await close(built)

    play(scene, seed=seed)


def test_after_a_cold_load_an_adapter_comes_back_with_the_next_request_for_it() -> None:
    async def scene() -> None:
        built = tier(adaptable())
        await use(built, "one")
        await built.registry.unload("m")
        assert loaded(built) == []
        await use(built, "one")
        assert loaded(built) == ["one"]
        assert held(built) == 41 * MIB
        await close(built)

    play(scene)


def test_one_that_was_loaded_by_hand() -> None:
    async def scene() -> None:
        built = tier(adaptable(lora={}))
        with pytest.raises(Unsupported, match="none is configured or was loaded"):
            await built.registry.load_lora("m", "mine", None)
        await built.registry.load_lora("m", "mine", "path:/mine")
        assert loaded(built) == ["mine"]
        with pytest.raises(Unsupported, match="from path:/mine: unload it first"):
            await built.registry.load_lora("m", "mine", "path:/other")
        await built.registry.unload_lora("m", "mine")
        assert built.registry.status("m").loras == ()
        assert held(built) == 40 * MIB
        with pytest.raises(Unsupported):
            await use(built, "mine")
        await built.registry.load_lora("m", "mine", "path:/other")
        await use(built, "mine")
        await close(built)

    play(scene)


@seeds
def test_unloading_waits_for_the_requests_that_use_it(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable())
        using = asyncio.create_task(use(built, "one", seconds=3.0))
        await built.until(lambda: loaded(built) == ["one"])
        with pytest.raises(DeadlineExceeded, match="still in use"):
            await built.registry.unload_lora("m", "one", wait_s=1.0)
        await use(built, "one")
        await built.registry.unload_lora("m", "one")
        assert using.done()
        assert loaded(built) == []
        await close(built)

    play(scene, seed=seed)


@seeds
def test_one_that_was_unloaded_while_its_model_is_parked_goes_with_the_wake(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable(lora={}))
        await built.registry.load_lora("m", "mine", "path:/mine")
        await built.registry.park("m")
        await built.registry.unload_lora("m", "mine")
        await built.registry.wake("m")
        await built.until(lambda: held(built) == 40 * MIB)
        await built.registry.load_lora("m", "mine", "path:/other")
        assert held(built) == 41 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_another_source_in_the_configuration_takes_over_when_nobody_uses_the_old_one(seed: int) -> None:
    async def scene() -> None:
        spec = adaptable()
        built = tier(spec)
        using = asyncio.create_task(use(built, "one", seconds=3.0))
        await built.until(lambda: loaded(built) == ["one"])
        built.registry.apply([attrs.evolve(spec, lora={"one": "path:/new", "two": SOURCES["two"]})])
        assert built.state("m") is Residency.RESIDENT, "an adapter does not matter to the engine"
        await use(built, "one")
        assert using.done()
        assert FaultPoints.of("m").hits("lora_load") == 2
        with pytest.raises(Unsupported):
            await use(built, "three")
        built.registry.apply([attrs.evolve(spec, lora={})])
        await built.until(lambda: held(built) == 40 * MIB)
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("at", [0.1, 0.4, 0.6, 0.9])
def test_those_who_wait_may_leave_at_any_time(seed: int, at: float) -> None:
    async def scene() -> None:
        built = tier(adaptable(lora_s=0.5, load_s=0.3))
        waiting = [asyncio.create_task(use(built, "one")) for _ in range(3)]
        await asyncio.sleep(at)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await use(built, "one")
        assert held(built) == 41 * MIB
        assert loaded(built) == ["one"]
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("how", ["unload", "die", "shutdown", "change"])
def test_the_engine_goes_while_an_adapter_is_loaded(seed: int, how: str) -> None:
    async def scene() -> None:
        spec = adaptable(lora_s=0.5)
        built = tier(spec)
        await built.registry.load("m")
        asking = asyncio.create_task(use(built, "one"))
        await built.until(lambda: FaultPoints.of("m").hits("lora_load") == 1)
        if how == "unload":
            await built.registry.unload("m", force=True)
        elif how == "die":
            built.registry._roster.records["m"].seat.engine.die()  # type: ignore[union-attr]
        elif how == "change":
            built.registry.apply([attrs.evolve(spec, batch_tokens=7)])
        if how != "shutdown":
            done, _ = await asyncio.wait({asking}, timeout=60)
            assert done
            assert isinstance(asking.exception(), LoraLoading | EngineDied | None)
            await use(built, "one")
            assert held(built) == 41 * MIB
        await close(built)
        await asyncio.gather(asking, return_exceptions=True)

    play(scene, seed=seed)


def test_a_load_that_never_returns_costs_its_engine_only() -> None:
    async def scene() -> None:
        settings = RegistrySettings(load_timeout_s=5.0, close_timeout_s=2.0)
        built = house(adaptable(), fake("other", 10 * MIB), settings=settings)
        latch = FaultPoints.of("m").hold("lora_load")
        with pytest.raises(LoraLoading, match="went while"):
            await use(built, "one")
        assert built.state("m") in (Residency.UNLOADING, Residency.QUARANTINED)
        with await built.registry.acquire("other"):
            await asyncio.sleep(5.0)
        assert built.state("m") is Residency.QUARANTINED
        assert held(built) >= 40 * MIB, "what a stuck call may hold stays booked"
        latch.release()
        await built.until(lambda: built.state("m") is Residency.UNLOADED)
        await use(built, "one")
        await close(built)

    play(scene)


@seeds
def test_adapters_that_want_the_same_place_take_turns(seed: int) -> None:
    """Whoever waits for a load gets to use it before the next load may take its place."""

    async def scene() -> None:
        built = house(adaptable(max_loras=1, lora_s=0.1))
        names = [name for name in ("one", "two", "three") for _ in range(4)]
        await asyncio.wait_for(asyncio.gather(*[use(built, name, seconds=0.2) for name in names]), 10.0)
        assert FaultPoints.of("m").hits("lora_load") <= 4
        assert held(built) == 41 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_requests_that_follow_on_each_other_do_not_keep_an_adapter_for_ever(seed: int) -> None:
    async def scene() -> None:
        built = house(adaptable(max_loras=1, lora_s=0.1))
        served = 0

        async def busy() -> None:
            nonlocal served
            while True:
                await use(built, "one", seconds=1.0)
                served += 1

        clients = []
        for _ in range(3):
            clients.append(asyncio.create_task(busy()))
            await asyncio.sleep(0.3)
        await use(built, "two", wait_s=5.0)
        before = served
        await built.until(lambda: served > before + 3)
        with pytest.raises(LoraLoading):
            await use(built, "two", wait_s=0.01)
        before = served
        await built.until(lambda: served > before + 3)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert built.registry.status("m").leases == 0
        assert all(lora.in_use == 0 for lora in built.registry.status("m").loras)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_an_adapter_does_not_wait_for_those_who_wait_for_its_model_to_leave(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable(), fake("second", 100 * MIB), fake("third", 100 * MIB))
        with await built.registry.acquire("m") as lease:
            others = [asyncio.create_task(built.registry.load(name)) for name in ("second", "third")]
            await built.until(lambda: built.state("m") is Residency.DRAINING)
            await asyncio.sleep(0.5)
            (await built.registry.hold_lora(lease, "one", wait_s=2.0)).release()
        await asyncio.gather(*others)
        assert held(built) == 0
        await close(built)

    play(scene, seed=seed)


def test_the_wait_is_bounded_by_the_inline_wait_too() -> None:
    async def scene() -> None:
        built = house(adaptable(lora_s=9.0), settings=RegistrySettings(load_wait_s=2.0))
        with await built.registry.acquire("m") as lease:
            began = asyncio.get_running_loop().time()
            with pytest.raises(LoraLoading):
                await built.registry.hold_lora(lease, "one", wait_s=60.0)
            assert asyncio.get_running_loop().time() - began < 3.0
        await close(built)

    play(scene)


@seeds
@pytest.mark.parametrize("at", [0.0, 0.2, 0.6])
def test_the_configuration_loses_an_adapter_while_it_is_loaded(seed: int, at: float) -> None:
    async def scene() -> None:
        spec = adaptable(lora_s=0.5)
        built = tier(spec)
        await built.registry.load("m")
        asking = asyncio.create_task(use(built, "one"))
        await asyncio.sleep(at)
        built.registry.apply([attrs.evolve(spec, lora={})])
        await asyncio.gather(asking, return_exceptions=True)
        await built.until(lambda: held(built) == 40 * MIB)
        assert built.registry.status("m").loras == ()
        await built.registry.load_lora("m", "one", "path:/loras/again")
        assert held(built) == 41 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_one_that_was_unloaded_while_its_model_is_parked_comes_from_its_files_again(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable(lora={"one": SOURCES["one"]}))
        await use(built, "one")
        await built.registry.load_lora("m", "mine", "path:/mine")
        await built.registry.park("m")
        for name in ("one", "mine"):
            await built.registry.unload_lora("m", name)
        assert loaded(built) == []
        await built.registry.load_lora("m", "mine", "path:/mine")
        await use(built, "one")
        assert FaultPoints.of("m").hits("lora_load") == 4
        assert held(built) == 42 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_configured_one_stays_known_when_its_engine_goes_while_it_is_unloaded(seed: int) -> None:
    async def scene() -> None:
        spec = adaptable()
        built = tier(spec)
        using = asyncio.create_task(use(built, "one", seconds=3.0))
        await built.until(lambda: loaded(built) == ["one"])
        leaving = asyncio.create_task(built.registry.unload_lora("m", "one"))
        await asyncio.sleep(0.1)
        built.registry._roster.records["m"].seat.engine.die()  # type: ignore[union-attr]
        await asyncio.gather(using, leaving, return_exceptions=True)
        await use(built, "one")
        await close(built)

    play(scene, seed=seed)


@seeds
def test_an_unload_that_was_given_up_does_not_bring_back_what_the_configuration_lost(seed: int) -> None:
    async def scene() -> None:
        spec = adaptable()
        built = tier(spec)
        using = asyncio.create_task(use(built, "one", seconds=3.0))
        await built.until(lambda: loaded(built) == ["one"])
        leaving = asyncio.create_task(built.registry.unload_lora("m", "one", wait_s=1.0))
        await asyncio.sleep(0.1)
        built.registry.apply([attrs.evolve(spec, lora={})])
        with pytest.raises(DeadlineExceeded):
            await leaving
        with pytest.raises(Unsupported):
            await use(built, "one")
        await using
        await built.until(lambda: held(built) == 40 * MIB)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_configured_one_that_is_being_unloaded_is_there_again_soon(seed: int) -> None:
    async def scene() -> None:
        built = tier(adaptable())
        using = asyncio.create_task(use(built, "one", seconds=3.0))
        await built.until(lambda: loaded(built) == ["one"])
        leaving = asyncio.create_task(built.registry.unload_lora("m", "one"))
        await asyncio.sleep(0.1)
        with pytest.raises(LoraLoading, match="is being unloaded"):
            await use(built, "one")
        with pytest.raises(LoraLoading, match="is being unloaded"):
            await built.registry.load_lora("m", "one", None)
        await asyncio.gather(using, leaving)
        await use(built, "one")
        assert FaultPoints.of("m").hits("lora_load") == 2
        await close(built)

    play(scene, seed=seed)
