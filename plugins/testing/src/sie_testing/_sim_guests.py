"""More who act in a simulated run: requests that take long, clients that come back when they are told to."""

from __future__ import annotations

import asyncio
import math
import random
from typing import TYPE_CHECKING

from attrs import define, field
from sie_core import Cause, ModelLoading, Residency, ResidencyChanged, Unavailable

if TYPE_CHECKING:
    from sie_testing._sim_world import World

__all__ = ["Expected", "client", "long_request"]

_ON_ITS_WAY = (Residency.QUEUED, Residency.LOADING, Residency.WAKING)
_TICK_S = 0.001
_TRIES = 6
_VOLUNTARY = (Cause.IDLE, Cause.ROOM_FOR_ANOTHER, Cause.LOAD_OOM, Cause.RUN_OOM)


@define(eq=False)
class Expected:
    """Who was told to come back, for which model and when; and that no model leaves of the server's own will before."""

    world: World
    _back_at: dict[str, list[float]] = field(factory=dict)

    def told(self, model: str, seconds: float) -> float | None:
        """A client will be back. Returns when; ``None``: the model is not on its way, so nothing was promised."""
        record = self.world.records.get(model)
        if record is None or record.state not in _ON_ITS_WAY:
            return None
        at = self.world.loop.time() + seconds
        self._back_at.setdefault(model, []).append(at)
        return at

    def is_back(self, model: str, at: float | None) -> None:
        """It came."""
        if at is not None:
            self._back_at[model].remove(at)

    def heard(self, event: ResidencyChanged) -> None:
        """A model leaves its device."""
        world, record = self.world, self.world.records.get(event.model)
        if event.after is not Residency.DRAINING or event.cause not in _VOLUNTARY or record is None:
            return
        now = world.loop.time()
        if now < record.resident_at + record.spec.min_resident_s - _TICK_S:
            kept = f"{now - record.resident_at:.3f} s of min_resident_s: {record.spec.min_resident_s}"
            world.problems.append(f"{event.model} leaves ({event.reason}) after {kept}")
        back = [at for at in self._back_at.get(event.model, []) if at >= now]
        if back:
            soon = f"{min(back) - now:.3f} s"
            world.problems.append(f"{event.model} leaves ({event.reason}), and who was told to return comes in {soon}")


async def long_request(world: World, order: random.Random, name: str) -> None:
    """A request that keeps its model busy for longer than others care to wait."""
    with await world.registry.acquire(name) as lease:
        world.counts["long requests"] += 1
        await asyncio.wait({lease.lost}, timeout=order.choice([5.0, 15.0, 40.0]))


async def client(world: World, name: str) -> None:
    """A client that does what Retry-After says."""
    at: float | None = None
    for _ in range(_TRIES):
        world.expected.is_back(name, at)
        at = None
        try:
            with await world.registry.acquire(name) as lease:
                world.counts["clients served"] += 1
                await asyncio.wait({lease.lost}, timeout=0.1)
                return
        except Unavailable as error:
            seconds = max(1, math.ceil(error.retry_after_s))
            world.counts["clients told to return"] += 1
            if isinstance(error, ModelLoading):  # else its load was called off, or has to wait for room
                at = world.expected.told(name, seconds)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:  # it has lost interest
            world.expected.is_back(name, at)
            raise
    world.expected.is_back(name, at)
