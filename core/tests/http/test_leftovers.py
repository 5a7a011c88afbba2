"""What closed engines leave behind on a device: named, shown, and told apart from other processes' bytes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
from httpx import ASGITransport
from sie_core import EmulatedDevice, ModelSpec
from sie_core.cli.front import run
from sie_core.cli.running import Listener
from sie_core.config import ServerConfig
from sie_core.http import create_app
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import EngineWorker, Registry, RegistrySettings, Worker
from sie_core.serving import Service
from sie_testing import VirtualWorker
from sie_testing.house import MIB, fake, play
from website import until

DEVICE = "emulated:0"


def real(name: str, size: int, **fields: Any) -> ModelSpec:
    return fake(name, size, allocate=True, **fields)


@attrs.frozen
class Site:
    http: httpx.AsyncClient
    registry: Registry
    device: EmulatedDevice
    app: Any

    async def account(self) -> dict[str, Any]:
        accounts = (await self.http.get("/v1/status")).json()["accounts"]
        return dict(next(one for one in accounts if one["account"] == DEVICE))

    async def use(self, name: str) -> Any:
        """Load it, and get hold of its engine as whoever leaks it does."""
        with await self.registry.acquire(name) as lease:
            return lease.engine

    async def encode(self, name: str) -> httpx.Response:
        return await self.http.post(f"/v1/encode/{name}", json={"items": [{"text": "hello"}]})

    async def told(self) -> list[dict[str, Any]]:
        every = (await self.http.get("/v1/admin/decisions")).json()["decisions"]
        return [one for one in every if one["action"] == "left behind"]


@asynccontextmanager
async def site(
    *specs: ModelSpec, size: int = 16 * MIB, tier: int = 0, make_worker: Callable[[str], EngineWorker] = VirtualWorker
) -> AsyncIterator[Site]:
    ledger, plugins = Ledger(), Plugins.load()
    ledger.add_account("host", total=1 << 36)
    device = EmulatedDevice(DEVICE, size)
    ledger.add_account(DEVICE, total=device.total())
    settings = RegistrySettings(host_cache_bytes=tier)
    registry = Registry(plugins, ledger, [device], settings, make_worker=make_worker)
    registry.apply(specs)
    await registry.start()
    service = Service(registry, side_thread=False)
    app = create_app(service, ServerConfig(), plugins=plugins)
    async with httpx.AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as http:
        yield Site(http, registry, device, app)
    await registry.shutdown(60.0)
    service.close()
    device.close()


def test_a_close_that_frees_nothing_is_told_and_forgotten_when_the_bytes_come_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A9: it was not told, and the bytes were called "held by other processes"."""

    async def scene() -> None:
        specs = (real("leaky", 8 * MIB, close_frees=False), real("big", 12 * MIB))
        async with site(*specs) as s:
            engine = await s.use("leaky")
            assert (await s.account())["left_behind"] == {}
            with caplog.at_level(logging.WARNING, "sie.residency"):
                assert (await s.http.post("/v1/admin/models/leaky/unload")).status_code == 200
            told = "leaky: its closed engine held 8.0 MiB on emulated:0 and gave back 0 B: 8.0 MiB are left behind"
            assert told in caplog.text
            assert (await s.account())["left_behind"] == {"leaky": 8 * MIB}
            assert [(one["model"], one["promised_bytes"], one["freed_bytes"]) for one in await s.told()] == [
                ("leaky", 8 * MIB, 0)
            ]
            await asyncio.sleep(3.0)
            assert (await s.account())["left_behind"] == {"leaky": 8 * MIB}
            refused = await s.encode("big")
            assert refused.status_code == 503
            message = refused.json()["detail"]["message"]
            assert "held by closed engines of leaky (8.0 MiB) that did not give it back: restart the server" in message
            assert "other processes" not in message
            engine._held.free()
            await asyncio.sleep(2.0)
            assert (await s.account())["left_behind"] == {}
            assert (await s.encode("big")).status_code == 200

    play(scene)


async def test_sie_status_names_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A9: at the command line, too."""
    async with site(real("leaky", 8 * MIB, close_frees=False), make_worker=Worker) as s:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        listener = Listener(s.app, sock, drain_s=0)
        serving = asyncio.create_task(listener.serve())
        await until(lambda: listener.started)
        engine = await s.use("leaky")
        await s.registry.unload("leaky")
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert await asyncio.to_thread(run, ["status", "--url", url]) == 0
        assert "Left behind on emulated:0 by closed engines of leaky: 8.0 MiB" in capsys.readouterr().out
        engine._held.free()
        listener.stop()
        await serving


def test_other_processes_are_told_apart() -> None:
    """A9: what others hold stays theirs, beside a leak and without one."""

    async def scene() -> None:
        specs = (real("leaky", 4 * MIB, close_frees=False), real("big", 12 * MIB), real("honest", 4 * MIB))
        async with site(*specs) as s:
            theirs = s.device.allocate(3 * MIB)
            await asyncio.sleep(2.0)
            await s.use("honest")
            await s.http.post("/v1/admin/models/honest/unload")
            more = s.device.allocate(2 * MIB)
            await asyncio.sleep(2.0)
            assert (await s.account())["left_behind"] == {}
            message = (await s.encode("big")).json()["detail"]["message"]
            assert "held by other processes:" in message
            engine = await s.use("leaky")
            await s.http.post("/v1/admin/models/leaky/unload")
            await asyncio.sleep(2.0)
            message = (await s.encode("big")).json()["detail"]["message"]
            assert "closed engines of leaky (4.0 MiB) that did not give it back and other processes:" in message
            for buffer in (theirs, more):
                buffer.free()
            engine._held.free()
            await asyncio.sleep(2.0)
            assert (await s.account())["left_behind"] == {}

    play(scene)


def test_each_of_several_is_forgotten_by_itself() -> None:
    async def scene() -> None:
        specs = [real(name, size * MIB, close_frees=False) for name, size in (("a", 2), ("b", 5))]
        async with site(*specs) as s:
            engines = {}
            for name in ("a", "b", "a"):
                engines[name, len(engines)] = await s.use(name)
                await s.http.post(f"/v1/admin/models/{name}/unload")
            assert (await s.account())["left_behind"] == {"a": 4 * MIB, "b": 5 * MIB}
            engines["b", 1]._held.free()
            await asyncio.sleep(2.0)
            assert (await s.account())["left_behind"] == {"a": 4 * MIB}
            again = await s.use("b")
            await asyncio.sleep(2.0)
            assert (await s.account())["left_behind"] == {"a": 4 * MIB}
            again._held.free()
            for engine in engines.values():
                engine._held.free()

    play(scene)


def test_what_a_parked_engine_kept_and_leaves_behind_is_told() -> None:
    """A9: also where it was parked; what a park itself does not free is known without that."""

    async def scene() -> None:
        leaky = real("leaky", 8 * MIB, context_bytes=2 * MIB, close_frees=False)
        async with site(leaky, tier=64 * MIB) as s:
            engine = await s.use("leaky")
            await s.registry.park("leaky")
            await s.registry.unload("leaky")
            assert (await s.account())["left_behind"] == {"leaky": 2 * MIB}
            engine._held.free()

    play(scene)


async def dies(s: Site) -> None:
    engine = await s.use("leaky")
    engine._events.died("killed")
    await asyncio.sleep(1.0)


async def beside_a_request(s: Site) -> None:
    await s.use("leaky")
    with await s.registry.acquire("other"):
        await s.registry.unload("leaky")


async def beside_a_load(s: Site) -> None:
    await s.use("leaky")
    unload = asyncio.create_task(s.registry.unload("leaky"))
    await s.registry.load("other")
    await unload


@pytest.mark.parametrize("act", [dies, beside_a_request, beside_a_load])
def test_where_others_may_have_moved_the_figure_nothing_is_told(act: Callable[[Site], Any]) -> None:
    """A9: a neighbour's load or requests, or an engine that died, are no proof of a leak."""

    async def scene() -> None:
        specs = (real("leaky", 4 * MIB, close_frees=False, close_s=1.0), real("other", 4 * MIB, load_s=0.5))
        async with site(*specs) as s:
            await act(s)
            assert (await s.account())["left_behind"] == {}
            assert await s.told() == []

    play(scene)
