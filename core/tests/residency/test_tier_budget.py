"""What a budget means: for one model, for none, for several that park at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sie_core import ModelLoadFailed, ModelSpec, Residency, ResourceExhausted
from sie_core.memory.emulated import EmulatedDevice
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))
PARKED, RESIDENT, UNLOADED = Residency.PARKED, Residency.RESIDENT, Residency.UNLOADED


def tier(*specs: ModelSpec, budget: int = 1024 * MIB, **more: Any) -> House:
    built = house(*specs, settings=RegistrySettings(host_cache_bytes=budget), **more)

    def note(_: object) -> None:
        built.peak["tier"] = max(built.peak.get("tier", 0), built.registry.host_tier().used)

    built.registry.subscribe(note)
    return built


async def use(built: House, *names: str) -> None:
    for name in names:
        with await built.registry.acquire(name):
            await asyncio.sleep(0.01)


def loads(built: House) -> dict[str, int]:
    return {name: FaultPoints.of(name).hits("load") for name in built.registry.names()}


@seeds
def test_two_models_and_a_budget_for_one_of_them(seed: int) -> None:
    """A copy that is being woken stays charged: whoever has to leave for it unloads."""

    async def scene() -> None:
        built = tier(fake("a"), fake("b"), budget=87 * MIB)
        for _ in range(3):
            await use(built, "a", "b")
            assert built.states() == {"a": "parked", "b": "resident"}
            assert built.registry.host_tier().used == 87 * MIB
            await use(built, "a")
            assert built.states() == {"a": "resident", "b": "unloaded"}
            assert built.registry.host_tier().used == 0
        assert loads(built) == {"a": 1, "b": 3}
        assert built.peak["tier"] == 87 * MIB
        why = {one.reason for one in built.registry.decisions() if one.action == "park failed"}
        assert why == {"87.0 MiB do not fit into the host tier (87.0 MiB of 87.0 MiB are taken)"}
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_budget_below_every_model_is_as_good_as_none(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a"), fake("b"), budget=86 * MIB)
        for _ in range(2):
            await use(built, "a", "b")
        assert built.states() == {"a": "unloaded", "b": "resident"}
        assert loads(built) == {"a": 2, "b": 2}
        assert built.peak["tier"] == 0
        why = {one.reason for one in built.registry.decisions() if one.action == "not parked"}
        assert why == {"its 87.0 MiB are over the budget of 86.0 MiB"}
        await close(built)

    play(scene, seed=seed)


def test_sizes_that_differ_are_told_so_that_they_differ() -> None:
    """A11: its 86.1 MiB were over the budget of 86.1 MiB."""

    async def scene() -> None:
        built = tier(fake("a", 87 * MIB), budget=87 * MIB - 1)
        await use(built, "a")
        assert built.registry.why_not_parked("a") == "its 91,226,112 bytes are over the budget of 91,226,111 bytes"
        await close(built)

    play(scene)


@seeds
@pytest.mark.parametrize("kind", ["copies", "backups"])
def test_two_parks_at_once_do_not_count_on_the_same_copy(kind: str, seed: int) -> None:
    async def scene() -> None:
        backup = kind == "backups"
        old = [fake(name, 40 * MIB, backup=backup, close_s=0.1) for name in ("x", "y")]
        new = [fake(name, 40 * MIB) for name in ("p", "q")]
        built = tier(*old, *new, budget=80 * MIB, devices={"emulated:0": 500 * MIB})
        for name in ("x", "y"):
            await use(built, name)
            await built.registry.park(name)
            if backup:
                await use(built, name)
                FaultPoints.of(name).delay("drop", 0.1)
        await use(built, "p", "q")
        await asyncio.gather(built.registry.park("p"), built.registry.park("q"))
        left = "resident" if backup else "unloaded"
        assert built.states() == {"x": left, "y": left, "p": "parked", "q": "parked"}
        assert built.registry.host_tier().used == built.peak["tier"] == 80 * MIB
        assert not [one for one in built.registry.decisions() if one.action == "park failed"]
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_park_takes_the_place_of_a_copy_that_is_leaving_anyway(seed: int) -> None:
    async def scene() -> None:
        built = tier(
            *[fake(name, 40 * MIB, close_s=0.2) for name in ("x", "y")], fake("p", 40 * MIB),
            budget=80 * MIB, devices={"emulated:0": 500 * MIB},
        )  # fmt: skip
        for name in ("x", "y"):
            await use(built, name)
            await built.registry.park(name)
        await use(built, "p")
        going = asyncio.create_task(built.registry.unload("y"))
        await built.until(lambda: built.state("y") is Residency.UNLOADING)
        await built.registry.park("p")
        await going
        assert built.states() == {"x": "parked", "y": "unloaded", "p": "parked"}
        await close(built)

    play(scene, seed=seed)


def test_a_copy_that_will_not_leave_is_not_waited_for_again() -> None:
    async def scene() -> None:
        built = tier(*[fake(name, 40 * MIB) for name in "xypq"], budget=80 * MIB, devices={"emulated:0": 500 * MIB})
        for name in "xy":
            await use(built, name)
            await built.registry.park(name)
        await use(built, "p", "q")
        latch = FaultPoints.of("x").hold("close")
        going = asyncio.create_task(built.registry.unload("x"))
        await latch.arrival()
        with pytest.raises(ResourceExhausted):
            await built.registry.park("p")
        await built.registry.park("q")
        assert built.states() == {"x": "unloading", "y": "unloaded", "p": "unloaded", "q": "parked"}
        latch.release()
        await going
        await close(built)

    play(scene)


@seeds
def test_a_model_that_can_never_fit_parks_nobody(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("parked"), fake("resident"), fake("huge", 129 * MIB))
        await use(built, "parked", "resident")
        before, loop = built.states(), asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(ModelLoadFailed, match=r"needs 129\.0 MiB on emulated:0, which has 128\.0 MiB in all"):
            await use(built, "huge")
        assert loop.time() - began < 0.1
        assert built.states() == {**before, "huge": "failed"}
        assert loads(built)["huge"] == 0
        await use(built, "parked", "resident")
        await close(built)

    play(scene, seed=seed)


@seeds
def test_what_a_model_came_to_need_is_in_the_book_after_every_wake_and_gone_after_the_unload(seed: int) -> None:
    async def scene() -> None:
        built = tier(fake("a", 30 * MIB), fake("b", 60 * MIB), fake("c", 60 * MIB))
        expected = 30 * MIB
        for nbytes, other in ((10 * MIB, "b"), (5 * MIB, "c")):
            await use(built, other, "a")
            with await built.registry.acquire("a") as lease:
                assert await built.registry.make_room(lease, nbytes)
            expected += nbytes
            assert built.registry.status("a").device_bytes == expected
            for _ in range(2):
                await built.registry.park("a")
                assert built.registry.status("a").device_bytes == 0
                await use(built, "a")
                assert built.registry.status("a").device_bytes == expected
        await built.registry.unload("a")
        assert built.ledger.holding("a") == {}
        for name in ("b", "c"):
            await built.registry.unload(name)
        device = built.registry.accounts()[1]
        assert (device.charged, device.promised, device.realised, device.available) == (0, 0, 0, 128 * MIB)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_newcomers_take_the_place_of_copies_that_were_kept_through_wakes(seed: int) -> None:
    """A1: two models that took turns and fell silent kept a full tier for ever; newcomers loaded cold each time."""

    async def scene() -> None:
        models = [fake(name, 40 * MIB, backup=True) for name in ("m0", "m1", "m2", "m3")]
        built = tier(*models, budget=80 * MIB, devices={"emulated:0": 60 * MIB})
        await use(built, *["m0", "m1"] * 3)
        await use(built, *["m2", "m3"] * 5)
        assert built.states() == {"m0": "unloaded", "m1": "unloaded", "m2": "parked", "m3": "resident"}
        assert loads(built) == {"m0": 1, "m1": 1, "m2": 1, "m3": 1}
        await built.registry.park("m3")
        assert built.state("m3") is PARKED
        await close(built)

    play(scene, seed=seed)


@seeds
def test_of_kept_copies_the_one_that_was_parked_longest_ago_goes(seed: int) -> None:
    """A1: a later park counts, not the wake before it."""

    async def scene() -> None:
        models = [fake(name, 40 * MIB, backup=True) for name in "abc"]
        built = tier(*models, budget=80 * MIB, devices={"emulated:0": 500 * MIB})
        for name in "ab":
            await use(built, name)
            await built.registry.park(name)
        await use(built, "a", "b")
        for name in "ba":
            await built.registry.park(name)
        await use(built, "c")
        await built.registry.park("c")
        assert built.states() == {"a": "parked", "b": "unloaded", "c": "parked"}
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_park_waits_until_its_own_backup_has_been_dropped(seed: int) -> None:
    """A1: a model whose backup was just being given up was parked into it, failed, and was unloaded."""

    async def scene() -> None:
        models = [fake(name, 40 * MIB, backup=True, allocate=True) for name in "ab"]
        built = tier(*models, budget=80 * MIB, devices={"emulated:0": 500 * MIB})
        built.registry._roster.devices["emulated:0"] = EmulatedDevice("emulated:0", 500 * MIB)
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "a")
        FaultPoints.of("a").delay("drop", 0.5, times=1)
        built.registry._lifecycle.parking.relieve_host(1)
        await built.registry.park("a")
        assert built.state("a") is PARKED
        await use(built, "a")
        assert loads(built)["a"] == 1
        await close(built)

    play(scene, seed=seed)
