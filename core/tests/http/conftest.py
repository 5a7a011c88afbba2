"""Two ways to a whole server: ``served()`` through httpx without a socket, ``listening()`` through uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from httpx import ASGITransport
from sie_core.cli.running import Listener, loop_factory
from sie_core.config import ServerConfig
from sie_core.http import create_app
from sie_core.http.door import ConnectionLimits
from sie_core.http.protocols import ProtocolName
from sie_core.plugins import Plugins
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints
from website import Served, Start, running_service


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """What is close to the sockets is tried with the loop that serves, everything else with Python's own."""
    name = "test_connections.py"
    return {"served": loop_factory()} if item.path.name == name else {"plain": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _no_faults_left() -> Any:
    yield
    FaultPoints.reset_all()


@pytest.fixture
def served() -> Start:
    """``async with served(**server_settings) as s``: an application that httpx calls directly.

    ``tier`` holds settings of the registry, such as ``host_cache_bytes``.
    """

    @contextlib.asynccontextmanager
    async def start(
        *,
        queue: int = 256,
        load_wait_s: float = 30.0,
        plugins: Plugins | None = None,
        telemetry: Telemetry | None = None,
        tier: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Served]:
        plugins = plugins or Plugins.load()
        telemetry = telemetry or Telemetry.disabled()
        async with running_service(queue, load_wait_s, plugins, telemetry, **(tier or {})) as (service, registry):
            app = create_app(service, ServerConfig(**settings), plugins=plugins, telemetry=telemetry)
            transport = ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                yield Served(http, service, registry, app, "http://localhost")

    return start


@pytest.fixture
def listening() -> Start:
    """The same over a real socket, served by uvicorn."""

    @contextlib.asynccontextmanager
    async def start(
        *,
        queue: int = 256,
        load_wait_s: float = 30.0,
        body_timeout_s: float = 60.0,
        stall_timeout_s: float = 120.0,
        plugins: Plugins | None = None,
        limits: ConnectionLimits | None = None,
        protocol: ProtocolName = "auto",
        **settings: Any,
    ) -> AsyncIterator[Served]:
        plugins = plugins or Plugins.load()
        async with running_service(queue, load_wait_s, plugins, Telemetry.disabled()) as (service, registry):
            app = create_app(
                service,
                ServerConfig(**settings),
                plugins=plugins,
                body_timeout_s=body_timeout_s,
                stall_timeout_s=stall_timeout_s,
            )
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            listener = Listener(app, sock, drain_s=0, limits=limits, protocol=protocol)
            task = asyncio.create_task(listener.serve())
            while not listener.started:
                await asyncio.sleep(0.005)
            try:
                async with httpx.AsyncClient(base_url=url, timeout=10.0) as http:
                    yield Served(http, service, registry, app, url)
            finally:
                listener.stop()
                await task

    return start
