"""A call into an engine never returns: its model is lost for as long, and no other one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import EngineDied, Item, LoraLoading, RequestParams, Residency
from sie_core.residency import RegistrySettings
from sie_core.serving import Service
from sie_testing import FaultPoints
from sie_testing.house import MIB, close, fake, house


@pytest.mark.parametrize("seed", range(6))
def test_what_is_queued_behind_it_keeps_no_run_permit(
    virtual_run: Callable[..., Any], fault_points: Callable[[str], FaultPoints], seed: int
) -> None:
    async def scene() -> None:
        lora = {"one": "path:/one"}
        built = house(
            fake("a", 10 * MIB, pool="p", max_loras=1, lora=lora),
            fake("b", 10 * MIB, pool="p"),
            settings=RegistrySettings(reserve_timeout_s=5.0, close_timeout_s=2.0),
        )
        service = Service(built.registry, side_thread=False)

        async def ask(model: str, **params: Any) -> None:
            await service.encode(model, [Item(text="hello")], RequestParams(**params))

        await asyncio.gather(ask("a"), ask("b"))
        latch = fault_points("a").hold("lora_reserve")
        adapted = asyncio.create_task(ask("a", lora="one"))
        await latch.arrival()
        behind = asyncio.create_task(ask("a"))
        await asyncio.sleep(0.01)
        other = asyncio.create_task(ask("b"))  # waits for the permit that the queued run holds
        outcomes = await asyncio.gather(adapted, behind, other, return_exceptions=True)
        assert isinstance(outcomes[0], LoraLoading)
        assert isinstance(outcomes[1], EngineDied)
        assert outcomes[2] is None
        assert built.state("a") in (Residency.UNLOADING, Residency.QUARANTINED)
        await ask("b")
        latch.release()
        await built.until(lambda: built.state("a") is Residency.UNLOADED)
        await ask("a")
        service.begin_shutdown()
        await close(built)
        service.close()

    virtual_run(scene(), seed)
