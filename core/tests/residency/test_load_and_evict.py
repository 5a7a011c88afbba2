"""Loading, leasing, evicting by unload: the promises of the registry, on the virtual clock, under several orders."""

from __future__ import annotations

import asyncio

import pytest
from sie_core import ModelLoadFailed, ModelLoading, ModelNotFound, Residency, ResourceExhausted
from sie_testing.house import MIB, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(8))


@seeds
def test_a_request_loads_the_model_and_the_next_one_finds_it(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=3.0))
        assert built.registry.try_acquire("a") is None
        with await built.registry.acquire("a") as lease:
            assert lease.model.name == "a"
            assert built.registry.status("a").leases == 1
        quick = built.registry.try_acquire("a")
        assert quick is not None
        quick.release()
        quick.release()
        assert built.registry.status("a").leases == 0
        await close(built)

    play(scene, seed=seed)


@seeds
def test_two_models_that_do_not_fit_together_take_turns(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=1.0), fake("b", load_s=1.0), fake("c", load_s=1.0))

        async def use(name: str) -> None:
            for _ in range(3):
                with await built.registry.acquire(name, wait_s=1000):
                    await asyncio.sleep(0.2)

        await asyncio.gather(use("a"), use("b"), use("c"))
        assert built.peak["emulated:0"] == 87 * MIB
        await close(built)

    play(scene, seed=seed)


@seeds
def test_concurrent_requests_share_one_load(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=2.0))
        seen: list[str] = []
        built.registry.subscribe(lambda event: seen.append(event.after))

        async def use() -> None:
            with await built.registry.acquire("a"):
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(use()) for _ in range(20)]
        await asyncio.sleep(1.0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 1
        assert seen.count("loading") == 1
        assert built.registry.status("a").leases == 0
        await close(built)

    play(scene, seed=seed)


def test_too_large_for_the_empty_device_fails_at_once_and_evicts_nobody() -> None:
    async def scene() -> None:
        built = house(fake("a"), fake("huge", 300 * MIB))
        (await built.registry.acquire("a")).release()
        with pytest.raises(ModelLoadFailed) as caught:
            await built.registry.acquire("huge")
        assert caught.value.error_class == "NeverFits"
        assert caught.value.permanent
        assert built.state("a") is Residency.RESIDENT
        assert built.state("huge") is Residency.FAILED
        await close(built)

    play(scene)


def test_pins_in_the_way_are_503_and_not_a_failure() -> None:
    async def scene() -> None:
        built = house(fake("a", pinned=True), fake("b"))
        (await built.registry.acquire("a")).release()
        with pytest.raises(ResourceExhausted) as caught:
            await built.registry.acquire("b")
        assert "a" in caught.value.message
        assert built.state("b") is Residency.UNLOADED
        built.registry.pin("a", False)
        (await built.registry.acquire("b")).release()
        assert built.state("a") is Residency.UNLOADED
        await close(built)

    play(scene)


def test_a_load_longer_than_the_inline_wait_is_503_with_the_measured_time_and_goes_on() -> None:
    async def scene() -> None:
        built = house(fake("a", load_s=100.0))
        with pytest.raises(ModelLoading):
            await built.registry.acquire("a")
        assert built.state("a") is Residency.LOADING
        with pytest.raises(ModelLoading):
            await built.registry.acquire("a")
        await built.until(lambda: built.state("a") is Residency.RESIDENT)
        assert built.registry.status("a").load_s == pytest.approx(100.0, abs=1)
        await built.registry.unload("a")
        with pytest.raises(ModelLoading) as caught:
            await built.registry.acquire("a", wait_s=10)
        assert caught.value.retry_after_s == pytest.approx(90, abs=1)
        await close(built)

    play(scene)


def test_an_unknown_name_suggests_the_ones_that_are_near() -> None:
    async def scene() -> None:
        built = house(fake("minilm"))
        with pytest.raises(ModelNotFound) as caught:
            built.registry.try_acquire("minilm2")
        assert caught.value.suggestions == ("minilm",)

    play(scene)


def test_transient_failures_cool_down_and_double() -> None:
    async def scene() -> None:
        built = house(fake("a", fail_load="EngineStartError", fail_load_times=2))
        loop = asyncio.get_running_loop()
        with pytest.raises(ModelLoadFailed) as caught:
            await built.registry.acquire("a")
        assert not caught.value.permanent
        with pytest.raises(ModelLoading) as cooling:
            await built.registry.acquire("a")
        assert cooling.value.retry_after_s == pytest.approx(30, abs=1)
        await asyncio.sleep(31)
        with pytest.raises(ModelLoadFailed) as caught:
            await built.registry.acquire("a")
        assert caught.value.attempts == 2
        start = loop.time()
        with pytest.raises(ModelLoading) as cooling:
            await built.registry.acquire("a")
        assert cooling.value.retry_after_s == pytest.approx(60, abs=1)
        assert loop.time() == start
        await asyncio.sleep(61)
        (await built.registry.acquire("a")).release()
        assert built.registry.status("a").failure is None
        await close(built)

    play(scene)


@seeds
def test_out_of_memory_at_load_evicts_one_more_and_tries_again(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", 40 * MIB), fake("b", 40 * MIB, oom_at_load=1))
        (await built.registry.acquire("a")).release()
        (await built.registry.acquire("b")).release()
        assert built.states() == {"a": "unloaded", "b": "resident"}
        assert any("out of memory" in decision.reason for decision in built.registry.decisions())
        await close(built)

    play(scene, seed=seed)


def test_a_busy_victim_that_does_not_drain_is_let_off() -> None:
    async def scene() -> None:
        built = house(fake("a"), fake("b"))
        lease = await built.registry.acquire("a")
        with pytest.raises(ResourceExhausted):
            await built.registry.acquire("b")
        assert built.state("a") is Residency.RESIDENT
        await built.until(lambda: built.state("b") is Residency.UNLOADED)
        lease.release()
        await close(built)

    play(scene)


@seeds
def test_idle_models_unload_in_time_and_come_back(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", idle_evict_s=5.0))
        for pause in (4.9, 5.0, 5.1, 4.99, 20.0):
            (await built.registry.acquire("a")).release()
            await asyncio.sleep(pause)
        assert built.state("a") is Residency.UNLOADED
        await close(built)

    play(scene, seed=seed)
