"""Models behind the HTTP application, on one emulated device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from sie_core import ModelSpec
from sie_core.config import ServerConfig
from sie_core.http import create_app
from sie_core.memory.emulated import EmulatedDevice
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service

__all__ = ["serving"]


@asynccontextmanager
async def serving(
    models: Sequence[ModelSpec], size: int = 8 * 1024 * 1024
) -> AsyncIterator[tuple[httpx.AsyncClient, Registry]]:
    """``size``: bytes of the device. Nothing is booked or held when it ends."""
    device, ledger, plugins = EmulatedDevice("emulated:0", size), Ledger(), Plugins.load()
    ledger.add_account("host", total=1 << 34)
    ledger.add_account(device.name, total=device.total())
    registry = Registry(plugins, ledger, [device], RegistrySettings(host_cache_bytes=1 << 30, load_wait_s=60))
    registry.apply(models)
    await registry.start()
    service = Service(registry)
    app = create_app(service, ServerConfig(), plugins=plugins)
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60
        ) as http:
            yield http, registry
    finally:
        await registry.shutdown(20.0)
        service.close()
    assert not ledger.claims()
    assert device.used() == 0
