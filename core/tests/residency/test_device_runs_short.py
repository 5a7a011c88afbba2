"""When other programs take a device's memory: as many of ours leave as it takes, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from sie_core import Residency
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(4))
ROOM = 200 * MIB


def tier(*specs: Any, **more: Any) -> House:
    return house(*specs, settings=RegistrySettings(host_cache_bytes=1024 * MIB), **more)


def take(built: House, foreign: int, device: str = "emulated:0") -> None:
    """Others take so much; the account keeps its size."""
    built.devices[device].foreign = foreign
    built.devices[device].size += foreign


async def use(built: House, *names: str) -> None:
    for name in names:
        (await built.registry.acquire(name)).release()


def evicted(built: House) -> list[str]:
    return [one.model for one in built.registry.decisions() if one.action == "evict"]


@seeds
@pytest.mark.parametrize("how", ["parks", "unloads"])
def test_a_model_that_takes_long_to_leave_is_waited_for(how: str, seed: int) -> None:
    async def scene() -> None:
        specs = [fake(name, 60 * MIB, offload_s=8.0, close_s=8.0, host_offload=how == "parks") for name in "abc"]
        built = tier(*specs, devices={"emulated:0": ROOM})
        await built.registry.start()
        await use(built, *"abc")
        take(built, 60 * MIB)  # 40 of them are missing
        await asyncio.sleep(20.0)
        assert evicted(built) == ["a"]
        gone = "parked" if how == "parks" else "unloaded"
        assert built.states() == {"a": gone, "b": "resident", "c": "resident"}
        assert built.registry.accounts()[1].deficit == 0
        await close(built)

    play(scene, seed=seed)


def test_a_model_that_will_not_leave_is_not_waited_for_for_ever() -> None:
    async def scene() -> None:
        built = tier(*[fake(name, 60 * MIB) for name in "abc"], devices={"emulated:0": ROOM})
        await built.registry.start()
        await use(built, *"abc")
        latch = FaultPoints.of("a").hold("offload")
        take(built, 60 * MIB)
        await asyncio.sleep(10.0)
        assert evicted(built) == ["a"]
        await asyncio.sleep(5.0)
        assert evicted(built) == ["a", "b"]
        latch.release()
        await close(built)

    play(scene)


@seeds
def test_who_waits_for_memory_elsewhere_does_not_put_it_off(seed: int) -> None:
    async def scene() -> None:
        built = tier(
            fake("a", 60 * MIB, device="emulated:0"),
            fake("busy", 60 * MIB, device="emulated:1"),
            fake("waits", 60 * MIB, device="emulated:1"),
            devices={"emulated:0": 100 * MIB, "emulated:1": 100 * MIB},
        )
        await built.registry.start()
        await use(built, "a")
        working = await built.registry.acquire("busy")
        waiting = asyncio.create_task(built.registry.acquire("waits"))
        await built.until(lambda: built.registry.status("waits").queued == 1)
        take(built, 70 * MIB)
        await asyncio.sleep(3.0)
        assert built.state("a") is Residency.PARKED
        assert not waiting.done()
        working.release()
        (await waiting).release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_parked_engine_that_kept_some_goes_when_nothing_resident_can(seed: int) -> None:
    async def scene() -> None:
        built = tier(
            fake("kept", 60 * MIB, context_bytes=30 * MIB),
            fake("pinned", 60 * MIB, context_bytes=5 * MIB, pinned=True),
            fake("idle", 40 * MIB),
            fake("busy", 30 * MIB),
            devices={"emulated:0": ROOM},
        )
        await built.registry.start()
        await use(built, "pinned", "kept")
        await built.registry.park("kept")
        await built.registry.park("pinned")
        await use(built, "idle")
        working = await built.registry.acquire("busy")
        take(built, 115 * MIB)  # 20 are missing: the idle one's
        await built.until(lambda: built.state("idle") is Residency.PARKED)
        await asyncio.sleep(3.0)
        assert built.states() == {"kept": "parked", "pinned": "parked", "idle": "parked", "busy": "resident"}
        take(built, 150 * MIB)  # 15 more: the parked one's
        await built.until(lambda: built.state("kept") is Residency.UNLOADED, seconds=5)
        await asyncio.sleep(3.0)
        assert built.states() == {"kept": "unloaded", "pinned": "parked", "idle": "parked", "busy": "resident"}
        last = built.registry.decisions()[-2:]
        assert [(one.model, one.action) for one in last] == [("kept", "evict"), ("kept", "drop")]
        assert (last[0].reason, last[0].promised_bytes) == ("other processes took emulated:0", 30 * MIB)
        working.release()
        await close(built)

    play(scene, seed=seed)


def test_a_parked_engine_that_somebody_waits_for_stays() -> None:
    async def scene() -> None:
        built = tier(
            fake("kept", 60 * MIB, context_bytes=30 * MIB),
            fake("busy", 150 * MIB),
            devices={"emulated:0": ROOM},
        )
        await built.registry.start()
        await use(built, "kept")
        await built.registry.park("kept")
        working = await built.registry.acquire("busy")
        waiting = asyncio.create_task(built.registry.acquire("kept"))
        take(built, 40 * MIB)
        await asyncio.sleep(5.0)
        assert built.state("kept") is Residency.WAKING
        take(built, 0)
        working.release()
        (await waiting).release()
        await close(built)

    play(scene)


def test_a_model_under_another_policy_is_named_in_no_decision() -> None:
    async def scene() -> None:
        pinned = attrs.evolve(fake("a", 60 * MIB), pinned=True)
        built = tier(pinned, devices={"emulated:0": 100 * MIB})
        await built.registry.start()
        await use(built, "a")
        take(built, 90 * MIB)
        await asyncio.sleep(5.0)
        assert evicted(built) == []
        assert built.registry.accounts()[1].deficit == 50 * MIB
        await close(built)

    play(scene)
