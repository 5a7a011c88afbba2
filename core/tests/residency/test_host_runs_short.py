"""When the host itself runs short, parked copies go before the kernel has to kill anybody. On made-up machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from sie_core import Residency, ResourceExhausted
from sie_core.memory.host import HostMemory
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_testing import FaultPoints, VirtualWorker
from sie_testing.house import MIB, House, PretendDevice, fake, play

GIB = 1024 * MIB
CALM, STRAINED = 1.0, 40.0


@attrs.define
class Machine:
    """RAM and pressure of a made-up machine."""

    root: Path
    total: int = 4 * GIB
    others: int = 0
    """Bytes that other programs have taken."""
    ours: Callable[[], int] = lambda: 0

    @property
    def available(self) -> int:
        return self.total - self.others - self.ours()

    def press(self, percent: float) -> None:
        file = self.root / "proc/pressure/memory"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\n", encoding="utf-8")

    def memory(self) -> HostMemory:
        return HostMemory(self.root, virtual_memory=lambda: self)


async def parked(machine: Machine, floor: int = GIB, **options: Any) -> Registry:
    """A registry with three parked models, "a" parked first."""
    host, ledger = machine.memory(), Ledger()
    ledger.add_account("host", total=host.total(), reserve=floor)
    ledger.observe_available("host", host.available())
    device = PretendDevice("emulated:0", 512 * MIB)
    ledger.add_account(device.name, total=device.size)
    registry = Registry(
        Plugins.load(),
        ledger,
        [device],
        RegistrySettings(host_cache_bytes=GIB),
        make_worker=VirtualWorker,
        host_available=host.available,
        host_pressure=host.pressure,
    )
    device.house = House(registry, ledger, {device.name: device})
    machine.ours = lambda: registry.host_tier().used + registry.host_tier().idle
    registry.apply([fake(name, 40 * MIB, **options) for name in "abc"])
    await registry.start()
    for name in "abc":
        await registry.load(name)
        await registry.park(name)
    return registry


def states(registry: Registry) -> str:
    return " ".join(status.residency for status in registry.statuses())


def test_copies_go_when_available_memory_falls_under_the_floor(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine)
        machine.others = 3 * GIB - 60 * MIB  # leaves the floor, and 60 MiB for copies of 120
        await asyncio.sleep(5.0)
        assert states(registry) == "unloaded unloaded parked"
        dropped = [one for one in registry.decisions() if one.action == "drop"]
        reason = "the host runs short of memory"
        assert {(one.model, one.reason) for one in dropped} == {("a", reason), ("b", reason)}
        assert dropped[0].freed_bytes == 40 * MIB
        await registry.shutdown(10.0)

    play(scene)


def test_a_park_looks_at_the_host_before_it_books(tmp_path: Path) -> None:
    """A10: what others had taken since the last look, a second ago at most, was booked all the same."""

    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine, close_s=0.05)
        await registry.unload("c")
        await registry.load("c")
        machine.others = 4 * GIB  # nothing is left, and nobody has looked yet
        with pytest.raises(ResourceExhausted):
            await registry.park("c")
        assert registry.status("c").residency is Residency.UNLOADED
        await registry.shutdown(10.0)

    play(scene)


def test_a_load_looks_at_the_host_before_it_books(tmp_path: Path) -> None:
    """A10: the same for what a load takes on the host."""

    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine)
        registry.apply([fake("large", 40 * MIB, host_load_bytes=2 * GIB)])
        machine.others = 3 * GIB
        with pytest.raises(ResourceExhausted):
            await registry.load("large", wait_s=0.1)
        machine.others = 0
        await asyncio.sleep(2.0)
        await registry.load("large")
        await registry.shutdown(10.0)

    play(scene)


@pytest.mark.parametrize("parks", [2, 3])
def test_copies_that_were_kept_through_wakes_go_as_any_other(tmp_path: Path, parks: int) -> None:
    """A1: after its second park a kept copy was never given up, however short the host was."""

    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine, backup=True)
        for name in "abc" * (parks - 1):
            await registry.wake(name)
            await registry.park(name)
        machine.others = 3 * GIB - 60 * MIB  # leaves the floor, and 60 MiB for copies of 120
        await asyncio.sleep(6.0)
        assert states(registry) == "unloaded unloaded parked"
        machine.others = 4 * GIB
        await asyncio.sleep(6.0)
        assert states(registry) == "unloaded unloaded unloaded"
        assert registry.host_tier().used == 0
        await registry.shutdown(10.0)

    play(scene)


def test_a_copy_that_will_not_go_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine)
        latch = FaultPoints.of("a").hold("close")
        machine.others = 3 * GIB - 100 * MIB
        await asyncio.sleep(8.0)
        assert states(registry) == "unloading parked parked"
        await asyncio.sleep(7.0)
        assert states(registry) == "unloading unloaded parked"
        latch.release()
        await registry.shutdown(60.0)

    play(scene)


@pytest.mark.parametrize("sign", ["available", "pressure"])
def test_a_copy_that_takes_long_to_go_is_waited_for(tmp_path: Path, sign: str) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine, close_s=9.0)
        if sign == "available":
            machine.others = 3 * GIB - 100 * MIB  # leaves the floor, and 100 MiB for copies of 120
        else:
            machine.press(STRAINED)
        await asyncio.sleep(8.0)
        assert states(registry) == "unloading parked parked"
        machine.press(CALM)
        await asyncio.sleep(8.0)
        assert states(registry) == "unloaded parked parked"
        await registry.shutdown(60.0)

    play(scene)


def test_backups_that_are_being_dropped_count_as_gone(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        registry = await parked(machine, backup=True)
        await registry.wake("a")  # keeps its copy, which may go
        latch = FaultPoints.of("a").hold("drop")
        machine.others = 3 * GIB - 100 * MIB
        await asyncio.sleep(10.0)
        assert states(registry) == "resident parked parked"
        latch.release()
        await asyncio.sleep(3.0)
        assert states(registry) == "resident parked parked"
        assert [registry.status(name).host_bytes // MIB for name in "abc"] == [0, 40, 40]
        await registry.shutdown(10.0)

    play(scene)


def test_copies_go_one_by_one_while_the_kernel_says_that_tasks_wait_for_memory(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        machine.press(CALM)
        registry = await parked(machine)
        await asyncio.sleep(10.0)
        assert states(registry) == "parked parked parked"
        machine.press(STRAINED)
        await asyncio.sleep(1.5)
        assert states(registry) == "unloaded parked parked"
        await asyncio.sleep(5.0)
        assert states(registry) == "unloaded unloaded parked"
        machine.press(CALM)
        await asyncio.sleep(20.0)
        assert states(registry) == "unloaded unloaded parked"
        reason = next(one.reason for one in registry.decisions() if one.action == "drop")
        assert reason == "tasks on the host wait for memory (40% of the time)"
        await registry.shutdown(10.0)

    play(scene)


def test_a_host_that_can_not_be_read_for_a_while_is_looked_at_again(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        machine.press(STRAINED)
        unreadable = tmp_path / "proc/self/cgroup"
        registry = await parked(machine)
        unreadable.mkdir(parents=True)
        await asyncio.sleep(10.0)
        before = states(registry)
        unreadable.rmdir()
        await asyncio.sleep(1.5)
        assert before.count("parked") - states(registry).count("parked") == 1
        await registry.shutdown(10.0)

    play(scene)


@pytest.mark.parametrize("percent", [None, 10.0])
def test_no_pressure_and_pressure_at_the_limit_drop_nothing(tmp_path: Path, percent: float | None) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        if percent is not None:
            machine.press(percent)
        registry = await parked(machine)
        await asyncio.sleep(10.0)
        assert states(registry) == "parked parked parked"
        await registry.shutdown(10.0)

    play(scene)


def test_a_model_that_is_in_use_stays_and_the_copies_go(tmp_path: Path) -> None:
    async def scene() -> None:
        machine = Machine(tmp_path)
        machine.press(CALM)
        registry = await parked(machine)
        machine.press(STRAINED)
        lease = await registry.acquire("a")
        await asyncio.sleep(12.0)
        assert registry.status("a").residency is Residency.RESIDENT
        assert states(registry) == "resident unloaded unloaded"
        lease.release()
        await registry.shutdown(10.0)

    play(scene)
