"""Wakes of a small model while another one loads cold on the same device, against wakes with nothing beside them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from attrs import evolve, frozen
from inprocess import registry_on
from sie_adapters_torch.dense import DenseAdapter
from sie_core import ModelSpec, Residency, ResidencyChanged, SieError
from sie_core.memory.emulated import EmulatedDevice
from sie_core.residency import Registry
from sie_testing import FakeOptions

__all__ = ["Wakes", "measure"]

MIB = 1024 * 1024
SMALL, LARGE = "small", "large"


@frozen
class Wakes:
    """Milliseconds from asking for a parked model to holding a lease on it, by turn."""

    quiet: list[list[float]]
    loading: list[list[float]]


def measure(turns: int, wakes: int, load_s: float) -> Wakes:
    """At least ``wakes`` of each kind, in ``turns`` turns. ``load_s``: how long the other model sleeps in its load."""
    return asyncio.run(_measure(turns, -(-wakes // turns), load_s))


async def _measure(turns: int, each: int, load_s: float) -> Wakes:
    found = Wakes([], [])
    device = EmulatedDevice("emulated:0", 160 * MIB)  # room for both
    minilm = DenseAdapter().default_models()[0].spec
    stand_in = ModelSpec(LARGE, "fake", options=FakeOptions(weights_bytes=MIB, load_s=load_s))
    async with registry_on(device, evolve(minilm, name=SMALL), stand_in) as registry:
        await registry.load(SMALL)
        for _ in range(max(3, each // 10)):
            await _cycle(registry)
        for _ in range(turns):
            found.quiet.append([await _cycle(registry) for _ in range(each)])
            found.loading.append(await _beside_a_load(registry, each))
    return found


async def _cycle(registry: Registry) -> float:
    """Park it, and ask for it as a request does. Returns milliseconds until it is there."""
    await registry.park(SMALL)
    began = time.perf_counter()
    with await registry.acquire(SMALL):
        return (time.perf_counter() - began) * 1e3


async def _beside_a_load(registry: Registry, count: int) -> list[float]:
    """So many wakes, each with a load going on from its beginning to its end."""
    found: list[float] = []
    while len(found) < count:
        async with _loading(registry):
            while len(found) < count and _goes_on(registry):
                took = await _cycle(registry)
                if _goes_on(registry):
                    found.append(took)
    return found


def _goes_on(registry: Registry) -> bool:
    return registry.status(LARGE).residency is Residency.LOADING


@contextlib.asynccontextmanager
async def _loading(registry: Registry) -> AsyncIterator[None]:
    """Inside, the load has begun; afterwards the model is unloaded, whether its load had ended or not."""
    begun = asyncio.Event()

    def note(event: ResidencyChanged) -> None:
        if event.model == LARGE and event.after is Residency.LOADING:
            begun.set()

    leave = registry.subscribe(note)
    task = asyncio.ensure_future(registry.load(LARGE))
    try:
        async with asyncio.timeout(60):
            await begun.wait()
        yield
    finally:
        leave()
        await registry.unload(LARGE)
        with contextlib.suppress(SieError):  # it was unloaded
            await task
