"""Faults that reviews and random runs found in LoRA adapters at run time; each must stay mended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import attrs
import pytest
from sie_core import DeadlineExceeded, DeviceNeed, LoraLoading, ModelLoadFailed, ModelSpec, Residency
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

SOURCES = {name: f"path:/loras/{name}" for name in ("one", "two", "three")}


def adaptable(**more: Any) -> ModelSpec:
    return fake("m", more.pop("size", 40 * MIB), **{"max_loras": 2, "lora_bytes": MIB, "lora": SOURCES, **more})


async def use(built: House, lora: str, seconds: float = 0.0, wait_s: float | None = None) -> None:
    with await built.registry.acquire("m") as lease, await built.registry.hold_lora(lease, lora, wait_s=wait_s):
        await asyncio.sleep(seconds)


def held(built: House) -> int:
    return built.registry.status("m").device_bytes


def engine(built: House) -> Any:
    seat = built.registry._roster.records["m"].seat
    assert seat is not None
    return seat.engine


def test_what_a_stuck_load_may_take_stays_booked_until_it_returns() -> None:
    async def scene() -> None:
        settings = RegistrySettings(load_timeout_s=5.0, close_timeout_s=2.0)
        built = house(adaptable(lora_bytes=20 * MIB), settings=settings)
        latch = FaultPoints.of("m").hold("lora_load")
        with pytest.raises(LoraLoading, match="went while"):
            await use(built, "one")
        await built.until(lambda: built.state("m") is Residency.QUARANTINED)
        assert held(built) == 60 * MIB
        latch.release()
        await built.until(lambda: built.state("m") is Residency.UNLOADED)
        assert held(built) == 0
        await close(built)

    play(scene)


def test_a_load_that_nobody_waits_for_any_more_does_not_wait_for_memory() -> None:
    async def scene() -> None:
        built = house(adaptable(lora_bytes=60 * MIB), fake("busy", 60 * MIB))
        await built.registry.load("m")
        busy = await built.registry.acquire("busy")
        latch = FaultPoints.of("m").hold("lora_reserve")
        asking = asyncio.create_task(use(built, "one"))
        await latch.arrival()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        latch.release()
        await asyncio.sleep(1.0)
        assert built.registry.status("m").leases == 0
        assert built.state("busy") is Residency.RESIDENT
        busy.release()
        await close(built)

    play(scene)


def test_what_was_reserved_is_what_is_loaded_or_nothing() -> None:
    async def scene() -> None:
        built = house(adaptable())
        await built.registry.load("m")
        seen: list[str] = []
        load = engine(built).lora_load
        engine(built).lora_load = lambda name, source, ctx: (seen.append(source), load(name, source, ctx))
        latch = FaultPoints.of("m").hold("lora_reserve")
        asking = asyncio.create_task(use(built, "one"))
        await latch.arrival()
        unloading = asyncio.create_task(built.registry.unload_lora("m", "one"))
        await asyncio.sleep(0.01)
        latch.release()
        with pytest.raises(LoraLoading, match="called off"):
            await asking
        await unloading
        assert seen == []
        await use(built, "one")
        assert seen == [SOURCES["one"]]
        await close(built)

    play(scene)


def test_one_that_the_configuration_loses_while_it_is_loaded_goes() -> None:
    async def scene() -> None:
        spec = adaptable(lora_s=0.5)
        built = house(spec)
        await built.registry.load("m")
        asking = asyncio.create_task(use(built, "one"))
        await built.until(lambda: FaultPoints.of("m").hits("lora_load") == 1)
        built.registry.apply([attrs.evolve(spec, lora={})])
        await asyncio.gather(asking, return_exceptions=True)
        await built.until(lambda: held(built) == 40 * MIB)
        assert engine(built).loras == ()
        await close(built)

    play(scene)


def test_nobody_waits_longer_than_the_inline_wait() -> None:
    async def scene() -> None:
        built = house(adaptable(lora_s=20.0), settings=RegistrySettings(load_wait_s=5.0))
        await built.registry.load("m")
        began = asyncio.get_running_loop().time()
        with pytest.raises(LoraLoading):
            await use(built, "one", wait_s=60.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0, abs=0.1)
        await close(built)

    play(scene)


def test_an_unload_waits_no_longer_than_it_is_told_to_for_its_turn() -> None:
    async def scene() -> None:
        built = house(adaptable())
        await use(built, "one")
        latch = FaultPoints.of("m").hold("lora_load")
        asking = asyncio.create_task(use(built, "two"))
        await latch.arrival()
        began = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded, match="still being unloaded"):
            await built.registry.unload_lora("m", "one", wait_s=1.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.1)
        latch.release()
        await asking
        await built.until(lambda: engine(built).loras == ("two",) and held(built) == 41 * MIB)
        await close(built)

    play(scene)


def test_all_that_was_booked_for_it_leaves_the_book_with_it_also_after_a_wake() -> None:
    async def scene() -> None:
        built = house(adaptable(), settings=RegistrySettings(host_cache_bytes=1024 * MIB))
        await built.registry.load("m")
        engine(built).lora_reserve = lambda name, source: DeviceNeed(MIB, want_bytes=11 * MIB, headroom_bytes=2 * MIB)
        await use(built, "one")
        assert held(built) == 53 * MIB
        await built.registry.park("m")
        await built.registry.wake("m")
        assert held(built) == 53 * MIB
        await built.registry.unload_lora("m", "one")
        assert held(built) == 40 * MIB
        await close(built)

    play(scene)


def test_an_engine_that_is_gone_is_not_kept_alive() -> None:
    async def scene() -> None:
        built = house(adaptable())
        await use(built, "one")
        gone = weakref.ref(engine(built))
        await built.registry.unload("m")
        gc.collect()
        assert gone() is None
        await close(built)

    play(scene)


def test_a_mistyped_source_can_be_corrected() -> None:
    async def scene() -> None:
        built = house(adaptable(lora={}))
        with pytest.raises(Exception, match="made up to be missing"):
            await built.registry.load_lora("m", "mine", "path:/typo/missing")
        await built.registry.load_lora("m", "mine", "path:/right")
        assert engine(built).loras == ("mine",)
        await close(built)

    play(scene)


def test_one_that_does_not_fit_beside_its_own_model_says_so() -> None:
    async def scene() -> None:
        built = house(adaptable(size=100 * MIB, lora_bytes=60 * MIB))
        for _ in range(2):
            with pytest.raises(
                ModelLoadFailed, match=r"held by the model itself \(100\.0 MiB\): use a larger"
            ) as failed:
                await use(built, "one")
            assert failed.value.permanent
        assert FaultPoints.of("m").hits("lora_reserve") == 1
        await close(built)

    play(scene)


def test_one_that_is_loaded_by_hand_again_is_read_again_if_its_files_changed(tmp_path: Path) -> None:
    """G4: also if they change while it is loaded, or are in use; a client that only asks again reads nothing twice."""

    async def scene() -> None:
        source = f"path:{tmp_path}"
        (tmp_path / "weights").write_text("old")
        built, reads = house(adaptable(lora_s=2.0)), lambda: FaultPoints.of("m").hits("lora_load")
        with pytest.raises(LoraLoading):
            await built.registry.load_lora("m", "mine", source, wait_s=1.0)
        for _ in range(3):  # as a client does that was told to come back
            await built.registry.load_lora("m", "mine", source)
        assert reads() == 1
        (tmp_path / "weights").write_text("newer")
        using = asyncio.create_task(use(built, "mine", seconds=3.0))
        await asyncio.sleep(0.5)
        again = asyncio.create_task(built.registry.load_lora("m", "mine", None))
        await asyncio.sleep(1.0)
        assert (reads(), again.done()) == (1, False), "it is not taken from a request"
        await built.until(lambda: reads() == 2)
        (tmp_path / "weights").write_text("the newest")
        await asyncio.gather(using, again, built.registry.load_lora("m", "mine", source))
        assert reads() == 3
        assert held(built) == 41 * MIB
        await close(built)

    play(scene)
