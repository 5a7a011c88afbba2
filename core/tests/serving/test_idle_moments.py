"""An idle time-out fires at every possible moment of a request's life: every request ends, the next wake works."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import Item, RequestParams, Residency
from sie_core.residency import RegistrySettings
from sie_core.serving import Service
from sie_testing import FaultPoints, expected_vector
from sie_testing.house import MIB, House, close, fake, house

Play = Callable[..., Any]
SEEDS = range(6)
STEP_S = 0.005
STEPS = 50
IDLE_S = 0.1
TIMES = {"load_s": 0.06, "run_s": 0.05, "offload_s": 0.04, "restore_s": 0.03}
"""All are whole numbers of steps, so that what may happen at the same time does, in the order that the seed picks."""


class Site:
    def __init__(self, idle_evict_s: float) -> None:
        settings = RegistrySettings(host_cache_bytes=1024 * MIB)
        self.built: House = house(fake("a", idle_evict_s=idle_evict_s, **TIMES), settings=settings)
        self.service = Service(self.built.registry, side_thread=False)
        self.met: set[Residency] = set()
        """What the model was doing when requests came."""

    async def ask(self, text: str, *, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        self.met.add(self.built.state("a"))
        result = await self.service.encode("a", [Item(text=text)], RequestParams())
        assert result.outputs[0].dense is not None
        assert result.outputs[0].dense.tolist() == expected_vector(text).tolist()

    async def over(self) -> None:
        """The next wake works, and nothing is left."""
        await self.built.until(lambda: self.built.state("a") is Residency.PARKED)
        await self.ask("the next")
        assert FaultPoints.of("a").hits("load") == 1
        assert FaultPoints.of("a").hits("offload") == FaultPoints.of("a").hits("restore")
        assert not [one for one in self.built.registry.decisions() if one.action.endswith("failed")]
        self.service.begin_shutdown()
        await close(self.built)
        self.service.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_arrives_at_any_time_after_the_last_answer(play: Play, seed: int) -> None:
    async def scene() -> None:
        site = Site(IDLE_S)
        await site.ask("first")
        for step in range(STEPS):
            await site.ask(f"request {step}", after=step * STEP_S)
        assert site.met >= {Residency.RESIDENT, Residency.PARKING, Residency.PARKED}
        await site.over()

    play(scene(), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_second_request_arrives_at_any_time_of_the_life_of_the_first(play: Play, seed: int) -> None:
    async def scene() -> None:
        site = Site(IDLE_S)
        await site.ask("first")
        for step in range(STEPS):
            # The first finds the model resident, on its way out, or parked; the second the same and on its way back.
            gap = IDLE_S - 2 * STEP_S + step % 10 * STEP_S
            pair = (site.ask("one", after=gap), site.ask("two", after=gap + step * STEP_S))
            await asyncio.gather(*pair)
        assert site.met >= {Residency.RESIDENT, Residency.PARKING, Residency.PARKED, Residency.WAKING}
        await site.over()

    play(scene(), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_request_leaves_at_any_time(play: Play, seed: int) -> None:
    async def scene() -> None:
        site = Site(IDLE_S)
        await site.ask("first")
        for step in range(STEPS):
            leaving = asyncio.create_task(site.ask("leaves", after=IDLE_S - 2 * STEP_S + step % 7 * STEP_S))
            staying = asyncio.create_task(site.ask("stays", after=step * STEP_S))
            await asyncio.sleep(step * STEP_S)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await staying
        await site.over()

    play(scene(), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_that_leaves_the_moment_nobody_wants_it(play: Play, seed: int) -> None:
    async def scene() -> None:
        site, draw = Site(0.0), random.Random(seed)
        arrivals = itertools.accumulate(draw.choice((0, 1, 3, 6, 11, 19, 23, 25, 30)) for _ in range(4 * STEPS))
        await asyncio.gather(*[site.ask(f"request {step}", after=step * STEP_S) for step in arrivals])
        assert site.met >= {Residency.RESIDENT, Residency.PARKING, Residency.PARKED, Residency.WAKING}
        await site.over()

    play(scene(), seed)
