"""An engine that goes is let go of: nothing in the service keeps its tensors alive. A parked one stays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import Item, RequestParams, Residency
from sie_core.residency import RegistrySettings
from sie_core.serving import Service
from sie_testing.house import MIB, close, fake, house, play

SETTINGS = RegistrySettings(host_cache_bytes=1024 * MIB)


async def ask(service: Service, model: str = "a") -> Any:
    result = await service.encode(model, [Item(text="hello")], RequestParams())
    return result.outputs[0].dense


def engine_of(service: Service, model: str = "a") -> weakref.ref[Any]:
    lease = service._registry.try_acquire(model)
    assert lease is not None
    with lease:
        return weakref.ref(lease.engine)


async def _unload(service: Service, built: Any) -> None:
    await service.unload("a")


async def _change(service: Service, built: Any) -> None:
    built.registry.apply([fake("a", salt="other"), fake("b")])
    await built.until(lambda: built.state("a") is Residency.UNLOADED)


async def _die(service: Service, built: Any) -> None:
    lease = built.registry.try_acquire("a")
    engine = lease.engine
    lease.release()
    engine.die("killed")
    del engine, lease
    await built.until(lambda: built.state("a") is Residency.UNLOADED)


async def _evict_without_a_tier(service: Service, built: Any) -> None:
    await ask(service, "b")


@pytest.mark.parametrize("how", [_unload, _change, _die, _evict_without_a_tier])
def test_an_engine_that_goes_is_not_kept_alive(how: Callable[..., Any]) -> None:
    async def scene() -> None:
        settings = RegistrySettings() if how is _evict_without_a_tier else SETTINGS
        built = house(fake("a"), fake("b"), settings=settings)
        service = Service(built.registry, side_thread=False)
        await built.registry.start()
        await ask(service)
        engine = engine_of(service)
        assert engine() is not None
        await how(service, built)
        await asyncio.sleep(1.0)
        gc.collect()
        assert engine() is None
        service.begin_shutdown()
        await close(built)
        service.close()

    play(scene)


def test_a_parked_engine_is_kept_and_answers_again() -> None:
    async def scene() -> None:
        built = house(fake("a"), settings=SETTINGS)
        service = Service(built.registry, side_thread=False)
        await built.registry.start()
        before = await ask(service)
        engine = engine_of(service)
        await service.park("a")
        gc.collect()
        assert engine() is not None
        assert (await ask(service)).tolist() == before.tolist()
        assert engine_of(service)() is engine()
        service.begin_shutdown()
        await close(built)
        service.close()

    play(scene)
