"""More who act in a simulated run: requests that take long, clients that come back when they are told to."""

from __future__ import annotations

import asyncio
import random

from sie_testing._sim_world import World

__all__ = ["long_request"]


async def long_request(world: World, order: random.Random, name: str) -> None:
    """A request that keeps its model busy for longer than others care to wait."""
    with await world.registry.acquire(name) as lease:
        world.counts["long requests"] += 1
        await asyncio.wait({lease.lost}, timeout=order.choice([5.0, 15.0, 40.0]))
