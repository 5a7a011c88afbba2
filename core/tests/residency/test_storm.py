"""Random arrivals, cancellations, configuration changes, failures and deaths on the real registry: nothing is lost.

The ledger's invariants are checked after every change of a residency; every request ends; at the end no byte is booked.
"""

from __future__ import annotations

import asyncio
import os
import random

import attrs
import pytest
from sie_testing.house import MIB, House, close, fake, house, play
from sie_core import DeviceOutOfMemory, ModelSpec, SieError
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints

SEEDS = range(int(os.environ.get("SIE_STORM_SEEDS", "60")))


def models(order: random.Random) -> list[ModelSpec]:
    return [
        fake(
            f"m{number}",
            order.choice([10, 30, 60, 90]) * MIB,
            headroom_bytes=order.choice([0, 5, 20]) * MIB,
            context_bytes=order.choice([0, 3]) * MIB,
            pool=order.choice([None, "p"]),
            load_s=order.choice([0.0, 0.5, 3.0]),
            close_s=order.choice([0.0, 0.1, 1.0]),
            idle_evict_s=order.choice([None, None, 0.5, 2.0]),
            oom_at_load=order.choice([0, 0, 0, 1, 2]),
            fail_load=order.choice([None, None, None, "EngineStartError", "ValueError"]),
            fail_load_times=1,
            offload_s=order.choice([0.0, 0.05, 1.0]),
            restore_s=order.choice([0.0, 0.05, 1.0]),
            backup=order.random() < 0.3,
            freed=order.choice([1.0, 1.0, 1.0, 0.5]),
            decline=order.choice([None, None, None, "no"]),
            corrupt_restore=order.random() < 0.1,
            realised=order.choice([1.0, 1.0, 0.9, None]),
            pinned=number == 0 and order.random() < 0.3,
        )
        for number in range(6)
    ]


async def request(built: House, order: random.Random, outcomes: list[str]) -> None:
    name = f"m{order.randrange(6)}"
    try:
        lease = await built.registry.acquire(name, wait_s=order.choice([0.2, 5.0, 30.0]))
    except SieError as error:
        outcomes.append(error.code)
        return
    with lease:
        done, _ = await asyncio.wait({lease.lost}, timeout=order.choice([0.0, 0.1, 2.0]))
        outcomes.append("lost" if done else "served")


async def operator(built: House, order: random.Random) -> None:
    """What operators and engines do meanwhile."""
    for _ in range(20):
        await asyncio.sleep(order.random() * 2)
        name = f"m{order.randrange(6)}"
        act = order.randrange(7)
        try:
            if act == 0:
                await built.registry.unload(name, force=order.random() < 0.5, wait_s=40)
            elif act == 1:
                built.registry.pin(name, order.random() < 0.3)
            elif act == 2:
                specs = [built.registry.status(known).spec for known in built.registry.names()]
                changed = [
                    attrs.evolve(spec, batch_tokens=order.choice([1024, 4096, 8192])) if spec.name == name else spec
                    for spec in specs
                ]
                built.registry.apply(changed)
            elif act == 3:
                device = next(iter(built.devices.values()))
                room = device.size - built.held(device.name)
                device.foreign = min(order.choice([0, 0, 10, 20]) * MIB, max(0, room))
            elif act == 4:
                point = order.choice(["close", "offload", "restore", "restore"])
                error = order.choice([RuntimeError("failed"), DeviceOutOfMemory("full", account="emulated:0")])
                FaultPoints.of(name).fail(point, error, times=1)
            elif act == 5:
                await built.registry.park(name, wait_s=40)
            elif act == 6:
                lease = built.registry.try_acquire(name)
                if lease is not None:
                    lease.release()
                    lease.engine.die("killed")  # type: ignore[attr-defined]
        except SieError:
            pass


@pytest.mark.parametrize("seed", SEEDS)
def test_storm(seed: int) -> None:
    async def scene() -> None:
        order = random.Random(seed)
        devices = {"emulated:0": 128 * MIB} if seed % 2 else {"emulated:0": 128 * MIB, "emulated:1": 100 * MIB}
        tier = RegistrySettings(host_cache_bytes=order.choice([0, 60, 150, 1000]) * MIB)
        built = house(*models(order), devices=devices, settings=tier)
        await built.registry.start()
        outcomes: list[str] = []
        boss = asyncio.create_task(operator(built, order))
        tasks = []
        for _ in range(80):
            await asyncio.sleep(order.random() * 0.4)
            tasks.append(asyncio.create_task(request(built, order, outcomes)))
            if order.random() < 0.15:
                order.choice(tasks).cancel()
        if order.random() < 0.3:
            boss.cancel()
            await close(built)
        results = await asyncio.wait_for(asyncio.gather(*tasks, boss, return_exceptions=True), 600)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        cancelled = sum(isinstance(result, asyncio.CancelledError) for result in results[:-1])
        assert len(outcomes) >= len(tasks) - cancelled
        await close(built)

    play(scene, seed=seed)
