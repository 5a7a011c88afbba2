"""A registry in this process, as the server builds it, for what a server would only blur."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sie_core import Device, ModelSpec
from sie_core.memory.host import HostMemory
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings

__all__ = ["registry_on"]

_HOST_CACHE = 1024**3


@asynccontextmanager
async def registry_on(device: Device, *models: ModelSpec) -> AsyncIterator[Registry]:
    """With one device, and 1 GiB for parked models; shut down in the end."""
    ledger = Ledger()
    ledger.add_account("host", total=HostMemory().total())
    ledger.add_account(device.name, total=device.total())
    registry = Registry(Plugins.load(), ledger, [device], RegistrySettings(host_cache_bytes=_HOST_CACHE))
    registry.apply(models)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.shutdown(60.0)
