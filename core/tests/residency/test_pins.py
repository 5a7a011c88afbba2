"""Pins: those that operators set outlive a configuration that is read again, and a pinned model comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from sie_core import ModelLoading, ModelSpec, Residency
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(4))
RESIDENT, UNLOADED = Residency.RESIDENT, Residency.UNLOADED
TIER = RegistrySettings(host_cache_bytes=1024 * MIB)


def changed(spec: ModelSpec, **fields: Any) -> ModelSpec:
    return attrs.evolve(spec, **fields)


@seeds
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pin_set_by_hand_outlives_a_configuration_that_is_read_again(seed: int, by_hand: bool) -> None:
    """A4: unchanged, or changed in what has nothing to do with pins; pinned by hand, and unpinned."""

    async def scene() -> None:
        spec, other = fake("a", 20 * MIB, pinned=not by_hand, idle_evict_s=1.0), fake("b", 20 * MIB)
        built = house(spec, other, settings=TIER)
        await built.registry.start()
        await built.registry.load("a")
        built.registry.pin("a", by_hand)
        for again in (spec, changed(spec, idle_evict_s=2.0), changed(spec, batch_tokens=1024)):
            built.registry.apply([again, other])
            assert built.registry.status("a").pinned is by_hand
        await built.registry.load("a")
        await asyncio.sleep(10.0)
        assert (built.state("a") is RESIDENT) is by_hand
        with await built.registry.acquire("a") as lease:
            assert lease.model.pinned is by_hand
        await close(built)

    play(scene, seed=seed)


@pytest.mark.parametrize("by_hand", [True, False])
def test_what_the_configuration_comes_to_say_of_a_pin_counts(by_hand: bool) -> None:
    """A4: the file is the later word where it changed; and a model that was removed comes back as configured."""

    async def scene() -> None:
        spec = fake("a", pinned=not by_hand)
        built = house(spec)
        built.registry.pin("a", by_hand)
        built.registry.apply([changed(spec, pinned=by_hand)])
        built.registry.apply([spec])
        assert built.registry.status("a").pinned is not by_hand
        built.registry.pin("a", by_hand)
        built.registry.apply([])
        built.registry.apply([spec])
        assert built.registry.status("a").pinned is not by_hand
        await close(built)

    play(scene)


@seeds
def test_a_busy_model_that_is_removed_and_comes_back_has_lost_the_pin_of_before(seed: int) -> None:
    """A4: it still drains when it comes back."""

    async def scene() -> None:
        spec = fake("a")
        built = house(spec)
        lease = await built.registry.acquire("a")
        built.registry.pin("a", True)
        built.registry.apply([])
        built.registry.apply([spec])
        assert not built.registry.status("a").pinned
        lease.release()
        await close(built)

    play(scene, seed=seed)


@seeds
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_pinned_model_whose_options_change_is_loaded_again(seed: int, by_hand: bool) -> None:
    """A4: while it is idle, and while it is busy."""

    async def scene() -> None:
        spec = fake("a", pinned=not by_hand, load_s=1.0)
        built = house(spec)
        await built.registry.start()
        await built.registry.load("a")
        built.registry.pin("a", True)
        epoch = built.registry.status("a").epoch
        built.registry.apply([spec := changed(spec, batch_tokens=1024)])
        await built.until(lambda: built.state("a") is RESIDENT, 5.0)
        with await built.registry.acquire("a") as lease:
            built.registry.apply([changed(spec, batch_tokens=2048)])
            await asyncio.sleep(1.0)
            assert lease.epoch == epoch + 1
        await built.until(lambda: built.state("a") is RESIDENT, 5.0)
        assert built.registry.status("a").epoch == epoch + 2
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_pinned_model_whose_engine_dies_is_loaded_again_and_cools_down_like_any_other(seed: int) -> None:
    """A4: no request has to come for it."""

    async def scene() -> None:
        built = house(fake("a", pinned=True, load_s=1.0))
        await built.registry.start()
        for _ in range(2):
            await built.until(lambda: built.state("a") is RESIDENT, 5.0)
            built.registry.try_acquire("a").engine.die()  # type: ignore[union-attr, attr-defined]
            await built.until(lambda: built.state("a") is not RESIDENT, 5.0)
        await built.until(lambda: built.state("a") is Residency.FAILED, 5.0)
        with pytest.raises(ModelLoading, match="died 2 times in a row"):
            await built.registry.acquire("a")
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_pinned_model_that_an_operator_unloads_stays_unloaded(seed: int) -> None:
    """A4: also one that can't be parked and was unloaded instead."""

    async def scene() -> None:
        built = house(fake("a", pinned=True), settings=TIER)
        await built.registry.start()
        await built.registry.load("a")
        await built.registry.unload("a")
        await asyncio.sleep(5.0)
        assert built.state("a") is UNLOADED
        await built.registry.load("a")
        FaultPoints.of("a").fail("offload", ValueError("no"), times=1)
        with pytest.raises(Exception, match="could not be parked"):
            await built.registry.park("a")
        await asyncio.sleep(5.0)
        assert built.state("a") is UNLOADED
        await close(built)

    play(scene, seed=seed)
