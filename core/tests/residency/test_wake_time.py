"""What a wake is measured to take: not what it waited for, or the guard against thrashing would feed on itself."""

from __future__ import annotations

import asyncio

import pytest
from sie_core.residency import RegistrySettings
from sie_testing.house import MIB, close, fake, house, play


def test_the_wait_for_room_is_no_part_of_the_wake() -> None:
    async def scene() -> None:
        built = house(
            *[fake(name, restore_s=0.01, offload_s=0.01) for name in "ab"],
            settings=RegistrySettings(host_cache_bytes=1024 * MIB),
        )
        (await built.registry.acquire("a")).release()
        busy = await built.registry.acquire("b")
        waiting = asyncio.create_task(built.registry.acquire("a"))
        await asyncio.sleep(5.0)
        busy.release()
        (await waiting).release()
        assert built.registry.status("a").wake_s == pytest.approx(0.01, abs=0.005)
        assert built.registry.status("b").park_s == pytest.approx(0.01, abs=0.005)
        await close(built)

    play(scene)
