"""Costs inside the process: what a lease costs a request, and what choosing victims costs the event loop."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from attrs import frozen
from sie_core import ModelSpec
from sie_core.memory.ledger import Ledger, Need
from sie_core.plugins import Plugins
from sie_core.residency import Registry
from sie_core.residency.eviction import choose
from sie_testing import FakeOptions

MIB = 1024 * 1024
MODELS = 1000
BATCH, BATCHES = 1000, 30


@frozen
class _Device:
    """A device of a size; nothing else is asked of it here."""

    name: str = "emulated:0"
    kind: str = "emulated"
    description: str = "for the benchmark"
    size: int = MODELS * MIB

    def total(self) -> int:
        return self.size

    def used(self) -> int | None:
        return None

    def allocate(self, nbytes: int) -> Any:
        raise TypeError("the benchmark's device has no bytes")


def lease_us() -> float:
    """Microseconds for one lease and its release, of a resident model among a thousand."""
    return asyncio.run(_lease_us())


async def _lease_us() -> float:
    ledger, device = Ledger(), _Device()
    ledger.add_account("host", total=1024 * MIB)
    ledger.add_account(device.name, total=device.size)
    registry = Registry(Plugins.load(), ledger, [device])  # type: ignore[list-item]
    registry.apply([ModelSpec(f"m{i}", "fake", options=FakeOptions(weights_bytes=MIB)) for i in range(MODELS)])
    await registry.start()
    await registry.load("m7")

    def once() -> None:
        lease = registry.try_acquire("m7")
        assert lease is not None
        lease.release()

    took = _typical_us(once)
    await registry.shutdown(10.0)
    return took


def victims_us() -> float:
    """Microseconds to choose victims among a thousand models on a full device."""
    ledger = Ledger()
    ledger.add_account("emulated:0", total=MODELS * MIB)
    names = [f"m{i}" for i in range(MODELS)]
    for name in names:
        ledger.book(name, [Need("emulated:0", MIB)])
        ledger.realise(name, "emulated:0", MIB)
    needs = [Need("emulated:0", 3 * MIB)]
    assert choose(ledger, needs, names) == ("m0", "m1", "m2")
    return _typical_us(lambda: choose(ledger, needs, iter(names)), batch=20)


def _typical_us(action: Callable[[], object], *, batch: int = BATCH) -> float:
    """Median over batches of the mean time of one call."""
    means = []
    for _ in range(BATCHES):
        started = time.perf_counter()
        for _ in range(batch):
            action()
        means.append((time.perf_counter() - started) / batch * 1e6)
    return statistics.median(means)
