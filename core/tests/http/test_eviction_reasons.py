"""``evictions_total{reason}``: one value for each cause, nothing for what operators ask for. On the virtual clock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import httpx
import pytest
from httpx import ASGITransport
from sie_core import Cause, DeviceOutOfMemory, ModelLoadFailed
from sie_core.config import ServerConfig, TelemetryConfig
from sie_core.http import create_app
from sie_core.plugins import Plugins
from sie_core.residency import RegistrySettings
from sie_core.serving import Service
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, fake, house, play

Act = Callable[[House], Awaitable[None]]
_SERIES = re.compile(r'^sie_worker_model_evictions_total\{model="(.*)",reason="(.*)"\} (\d+)', re.MULTILINE)


async def use(built: House, *names: str) -> None:
    for name in names:
        (await built.registry.acquire(name)).release()


@attrs.define
class Host:
    available: int = 64 * 1024 * MIB
    pressure: float = 0.0


async def makes_room(built: House) -> None:
    await use(built, "a", "big")


async def another_load_runs_out(built: House) -> None:
    full = DeviceOutOfMemory("full", account="emulated:0", needed=MIB)
    FaultPoints.of("b").fail("load", full, times=1)
    await use(built, "a", "b")


async def a_run_runs_out(built: House) -> None:
    await use(built, "a")
    with await built.registry.acquire("b") as lease:
        assert await built.registry.make_room(lease, MIB)


async def others_take_the_device(built: House) -> None:
    await use(built, "a")
    built.devices["emulated:0"].foreign = 110 * MIB
    await asyncio.sleep(5.0)


async def is_idle(built: House) -> None:
    await use(built, "lazy")
    await asyncio.sleep(10.0)


async def its_device_is_pinned(built: House) -> None:
    await use(built, "a")
    device = built.registry.status("a").devices[0]
    await built.registry.park("a")
    built.registry.apply([*SPECS, fake("pinned", 120 * MIB, device=device, pinned=True)])
    await use(built, "pinned", "a")


async def the_tier_is_full(built: House) -> None:
    for name in ("a", "big"):
        await use(built, name)
        await built.registry.park(name)


async def the_host_runs_short(built: House) -> None:
    await use(built, "a")
    await built.registry.park("a")
    HOST.available = -MIB
    await built.until(lambda: built.states()["a"] == "unloaded")


async def tasks_wait_for_memory(built: House) -> None:
    await use(built, "a")
    await built.registry.park("a")
    HOST.pressure = 40.0
    await built.until(lambda: built.states()["a"] == "unloaded")


async def the_wake_fails(built: House) -> None:
    FaultPoints.of("a").fail("restore", RuntimeError("no"), times=1)
    await use(built, "a")
    await built.registry.park("a")
    await use(built, "a")


async def the_engine_dies(built: House) -> None:
    lease: Any = await built.registry.acquire("a")
    lease.engine.die()
    lease.release()
    await built.until(lambda: built.states()["a"] == "unloaded")


async def a_call_overruns(built: House) -> None:
    await use(built, "a")
    await built.registry.park("a")
    latch = FaultPoints.of("a").hold("restore", times=1)
    waits = asyncio.create_task(built.registry.load("a"))
    await built.until(lambda: built.states()["a"] == "quarantined")
    latch.release()
    await waits


async def a_transition_is_torn(built: House) -> None:
    FaultPoints.of("a").delay("probe", 1.0, times=1, after=1)
    await use(built, "a")
    await built.registry.park("a")
    waits = asyncio.create_task(built.registry.load("a"))
    record = built.registry._roster.records["a"]
    await built.until(lambda: built.states()["a"] == "waking")
    assert record.task is not None
    record.task.cancel()
    await waits


async def operators_ask(built: House) -> None:
    await use(built, "a", "b")
    await built.registry.park("a")
    await built.registry.unload("a")
    with await built.registry.acquire("b"):
        await built.registry.unload("b", force=True)


async def the_configuration_changes(built: House) -> None:
    await use(built, "a", "b")
    await built.registry.park("b")
    built.registry.apply([fake("a", 41 * MIB)])
    await built.until(lambda: built.states() == {"a": "unloaded"} and len(built.registry.statuses()) == 1)


async def the_server_ends(built: House) -> None:
    await use(built, "a", "b")
    await built.registry.park("b")
    await built.registry.shutdown(60.0)


async def a_load_hangs(built: House) -> None:
    latch = FaultPoints.of("a").hold("load", times=1)
    waits = asyncio.create_task(built.registry.load("a"))
    await built.until(lambda: built.states()["a"] == "quarantined", seconds=2000.0)
    latch.release()
    with pytest.raises(ModelLoadFailed):
        await waits
    await asyncio.sleep(1.0)


async def a_park_fails(built: House) -> None:
    FaultPoints.of("a").fail("offload", RuntimeError("no"), times=1)
    await use(built, "a", "big")


SPECS = (fake("a", 40 * MIB), fake("b", 40 * MIB), fake("big", 100 * MIB), fake("lazy", MIB, idle_evict_s=5.0))
HOST = Host()
CAUSES: list[tuple[Cause, Act]] = [
    (Cause.ROOM_FOR_ANOTHER, makes_room),
    (Cause.ROOM_FOR_ANOTHER, a_park_fails),
    (Cause.LOAD_OOM, another_load_runs_out),
    (Cause.RUN_OOM, a_run_runs_out),
    (Cause.MEMORY_PRESSURE, others_take_the_device),
    (Cause.IDLE, is_idle),
    (Cause.DISPLACED, its_device_is_pinned),
    (Cause.TIER_FULL, the_tier_is_full),
    (Cause.HOST_SHORT, the_host_runs_short),
    (Cause.HOST_WAITS, tasks_wait_for_memory),
    (Cause.WAKE_FAILED, the_wake_fails),
    (Cause.ENGINE_DIED, the_engine_dies),
    (Cause.OVERRAN, a_call_overruns),
    (Cause.INTERRUPTED, a_transition_is_torn),
]
NO_EVICTIONS: list[tuple[Cause, Act]] = [
    (Cause.REQUESTED, operators_ask),
    (Cause.CONFIG_CHANGED, the_configuration_changes),
    (Cause.SHUTDOWN, the_server_ends),
    (Cause.LOAD_FAILED, a_load_hangs),
]


async def counted(act: Act) -> tuple[dict[tuple[str, str], int], set[str]]:
    """What ``/metrics`` counts as evictions, and the causes that ``/v1/admin/decisions`` has of models that left."""
    HOST.available, HOST.pressure = 64 * 1024 * MIB, 0.0
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    devices = {"emulated:0": 128 * MIB}
    if act is its_device_is_pinned:
        devices["emulated:1"] = 128 * MIB
    plugins = Plugins.load()
    built = house(
        *SPECS,
        devices=devices,
        settings=RegistrySettings(host_cache_bytes=110 * MIB),
        plugins=plugins,
        host_available=lambda: HOST.available,
        host_pressure=lambda: HOST.pressure,
        observer=telemetry,
    )
    service = Service(built.registry, telemetry=telemetry)
    app = create_app(service, ServerConfig(), plugins=plugins, telemetry=telemetry)
    await built.registry.start()
    await act(built)
    async with httpx.AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as http:
        text = (await http.get("/metrics")).text
        decisions = (await http.get("/v1/admin/decisions")).json()["decisions"]
    await built.registry.shutdown(60.0)
    service.close()
    telemetry.shutdown()
    left = {one["cause"] for one in decisions if one["action"] in ("park", "unload", "drop")}
    return {(model, reason): int(count) for model, reason, count in _SERIES.findall(text)}, left


@pytest.mark.parametrize(("cause", "act"), CAUSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_each_cause_is_a_reason_of_its_own(cause: Cause, act: Act) -> None:
    """A13: making room was counted as "memory pressure", and sentences were cut to make reasons."""
    found, left = play(lambda: counted(act))
    model = "lazy" if cause is Cause.IDLE else "a"
    assert found == {(model, cause.value): 1}
    assert cause.value in left


@pytest.mark.parametrize(("cause", "act"), NO_EVICTIONS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_operators_ask_for_is_no_eviction(cause: Cause, act: Act) -> None:
    """A13: an unload by request, by a change of configuration and at shutdown counted as evictions."""
    found, left = play(lambda: counted(act))
    assert found == {}
    assert cause.value in left


def test_every_cause_is_tried_here() -> None:
    assert {cause for cause, _ in CAUSES} == {cause for cause in Cause if cause.evicts}
    assert {cause for cause, _ in NO_EVICTIONS} == {cause for cause in Cause if not cause.evicts}
