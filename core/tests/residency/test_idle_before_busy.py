"""Whom a load evicts: idle models before those at work, whatever device they are on and however large they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sie_core import ModelSpec, Residency
from sie_core.residency.eviction import Cost, least
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(4))
RESIDENT, UNLOADED = Residency.RESIDENT, Residency.UNLOADED
TWO = {"emulated:0": 100 * MIB, "emulated:1": 100 * MIB}
FOUR = {f"emulated:{number}": 100 * MIB for number in range(4)}


async def hold(built: House, name: str, seconds: float) -> None:
    """A request, though not the one that the model was loaded for: that has a guard of its own."""
    await built.registry.load(name)
    with await built.registry.acquire(name):
        await asyncio.sleep(seconds)


async def arrives(built: House, name: str) -> float:
    """How long a new model's request waits."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    (await built.registry.acquire(name)).release()
    return loop.time() - began


CASES = [
    pytest.param(fake("busy", 60 * MIB), fake("idle", 90 * MIB), fake("new"), TWO, id="A2: the busy one is smaller"),
    pytest.param(fake("busy", 90 * MIB), fake("idle", 90 * MIB), fake("new"), TWO, id="A2: both are alike"),
    pytest.param(
        fake("busy", 60 * MIB, ranks=2),
        fake("idle", 70 * MIB, ranks=2),
        fake("new", 80 * MIB, ranks=2),
        FOUR,
        id="A2: each spans two devices",
    ),
]


@seeds
@pytest.mark.parametrize(("busy", "idle", "new", "devices"), CASES)
def test_a_model_at_work_is_not_evicted_where_an_idle_one_can_pay(
    seed: int, busy: ModelSpec, idle: ModelSpec, new: ModelSpec, devices: dict[str, int]
) -> None:
    async def scene() -> None:
        built = house(busy, idle, new, devices=devices)
        working = asyncio.create_task(hold(built, "busy", 40.0))
        await built.until(lambda: built.state("busy") is RESIDENT)
        await hold(built, "idle", 5.0)
        await asyncio.sleep(1.0)
        assert await arrives(built, "new") < 1.0
        assert built.state("busy") is RESIDENT
        assert built.state("idle") is UNLOADED
        await working
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_plan_on_models_at_work_is_given_up_once_idle_ones_can_pay(seed: int) -> None:
    """A2: both were busy when the plan was made; the other one then ends its request first."""

    async def scene() -> None:
        built = house(fake("slow", 60 * MIB), fake("soon", 90 * MIB), fake("new"), devices=TWO)
        working = [asyncio.create_task(hold(built, "slow", 40.0)), asyncio.create_task(hold(built, "soon", 10.0))]
        await built.until(lambda: all(built.state(name) is RESIDENT for name in ("slow", "soon")))
        assert await arrives(built, "new") == pytest.approx(10.0, abs=0.5)
        assert built.state("slow") is RESIDENT
        await asyncio.gather(*working)
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_plan_on_models_at_work_is_given_up_once_a_guard_runs_out(seed: int) -> None:
    """A2: the idle model elsewhere was protected when the plan was made; nobody reports that this is over."""

    async def scene() -> None:
        built = house(fake("busy", 60 * MIB), fake("kept", 90 * MIB, min_resident_s=1.0), fake("new"), devices=TWO)
        working = asyncio.create_task(hold(built, "busy", 40.0))
        await built.until(lambda: built.state("busy") is RESIDENT)
        await hold(built, "kept", 0.0)
        assert await arrives(built, "new") == pytest.approx(1.0, abs=0.5)
        assert built.state("busy") is RESIDENT
        await working
        await close(built)

    play(scene, seed=seed)


def cost(**fields: Any) -> Cost:
    return Cost(**{"busy": 0, "evicted": 100, "last_used": 0.0, "room": 0, **fields})


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(cost(evicted=900), cost(busy=1), id="A2: idle before busy, whatever the bytes"),
        pytest.param(cost(busy=1, evicted=900), cost(busy=2), id="A2: the fewest busy ones"),
        pytest.param(cost(evicted=0), cost(evicted=1), id="A2: nobody goes where nobody has to"),
        pytest.param(cost(evicted=100, last_used=9.0), cost(evicted=200), id="A2: the fewest bytes"),
        pytest.param(cost(evicted=110), cost(evicted=100, last_used=9.0), id="A2: near-equal bytes: longest unused"),
        pytest.param(cost(room=5), cost(room=1), id="A2: else the most room"),
    ],
)
def test_which_placement_costs_others_least(better: Cost, worse: Cost) -> None:
    assert least([(worse, "worse"), (better, "better")]) == "better"
    assert least([(better, "better"), (worse, "worse")]) == "better"
