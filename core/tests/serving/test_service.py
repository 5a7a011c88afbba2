"""The service over a real registry of fake models, on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import numpy as np
import pytest
from sie_core import (
    DeadlineExceeded,
    DeviceOutOfMemory,
    EngineDied,
    InvalidInput,
    Item,
    ModelLoadFailed,
    ModelLoading,
    ModelNotFound,
    ModelSpec,
    QueueFull,
    RequestParams,
    Residency,
    ResourceExhausted,
    ShuttingDown,
    Unsupported,
)
from sie_core.residency import RegistrySettings
from sie_core.serving import EncodeResult, Service
from sie_testing import FaultPoints, expected_vector
from sie_testing.house import MIB, House, close, fake, house

Play = Callable[..., Any]
seeds = pytest.mark.parametrize("seed", range(5))


@attrs.define(eq=False)
class Site:
    house: House
    service: Service

    async def ask(self, model: str, *texts: str, within: float | None = None, **params: Any) -> EncodeResult:
        return await self.service.encode(
            model, [Item(text=text) for text in texts], RequestParams(**params), deadline_s=within
        )


@asynccontextmanager
async def serving(*specs: ModelSpec, **more: Any) -> AsyncIterator[Site]:
    built = house(*specs, **more)
    service = Service(built.registry, side_thread=False)
    await built.registry.start()
    try:
        yield Site(built, service)
    finally:
        service.begin_shutdown()
        await close(built)
        service.close()


def now() -> float:
    return asyncio.get_running_loop().time()


# --- answers -----------------------------------------------------------------------------------------


@seeds
def test_the_first_request_loads_the_model_and_is_answered(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=2.0, run_s=0.5)) as site:
            result = await site.ask("a", "one", "two words")
            assert now() == pytest.approx(2.5)
            assert result.model == "a"
            assert result.tokens == 3
            assert result.outputs[1].dense is not None
            np.testing.assert_array_equal(result.outputs[1].dense, expected_vector("two words"))
            assert min(result.queue_s, result.tokenise_s, result.inference_s) >= 0.0
            assert site.service.model("a").leases == 0

    play(scene(), seed)


@seeds
def test_models_that_do_not_fit_together_take_turns_and_everybody_is_answered(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=1.0, run_s=0.1), fake("b", load_s=1.0, run_s=0.1)) as site:
            asked = [site.ask("ab"[number % 2], f"text {number}", within=100.0) for number in range(40)]
            results = await asyncio.gather(*asked)
            assert [result.model for result in results] == ["a", "b"] * 20
            assert site.house.peak["emulated:0"] == 87 * MIB

    play(scene(), seed)


def test_engines_of_one_pool_run_one_at_a_time(play: Play) -> None:
    async def scene() -> None:
        small = {"size": MIB, "pool": "torch", "run_s": 1.0}
        async with serving(fake("a", **small), fake("b", **small)) as site:
            await asyncio.gather(site.ask("a", "warm"), site.ask("b", "warm"))
            began = now()
            await asyncio.gather(site.ask("a", "text"), site.ask("b", "text"))
            assert now() - began == pytest.approx(2.0)

    play(scene())


def test_an_engine_that_schedules_for_itself_runs_requests_side_by_side(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("s", MIB, adapter="fake-stream", run_s=1.0)) as site:
            await site.ask("s", "warm")
            began = now()
            results = await asyncio.gather(*(site.ask("s", f"text {number}") for number in range(5)))
            assert now() - began == pytest.approx(1.0)
            np.testing.assert_array_equal(results[3].outputs[0].dense, expected_vector("text 3"))
            with pytest.raises(DeadlineExceeded):
                await site.ask("s", "late", within=0.5)

    play(scene())


# --- what can't be served ----------------------------------------------------------------------------


def test_unknown_models_come_with_what_may_have_been_meant(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("org/minilm")) as site:
            with pytest.raises(ModelNotFound) as caught:
                await site.ask("org/minilmm", "text")
            assert caught.value.suggestions == ("org/minilm",)
            assert (await site.ask("org__minilm", "text")).model == "org/minilm"
            assert site.service.model("org__minilm").name == "org/minilm"
            with pytest.raises(ModelNotFound, match="other__model"):
                site.service.model("other__model")

    play(scene())


def test_what_the_model_can_not_do_is_refused_with_what_it_can(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a")) as site:
            with pytest.raises(Unsupported) as caught:
                await site.ask("a", "text", output_types=("sparse",))
            assert caught.value.supported == ("dense",)
            assert caught.value.param == "output_types"
            with pytest.raises(Unsupported, match="takes no images") as images:
                await site.service.encode("a", [Item(text="x"), Item(text="y", images=(b"png",))])
            assert images.value.index == 1
            with pytest.raises(InvalidInput, match="no items"):
                await site.ask("a")

    play(scene())


def test_what_is_known_to_be_impossible_loads_nothing(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a"), fake("b")) as site:
            await site.ask("a", "text")
            await site.ask("b", "text")  # evicts a, whose capabilities are known by now
            with pytest.raises(Unsupported):
                await site.ask("a", "text", output_types=("multivector",))
            assert site.house.state("a") is Residency.UNLOADED

    play(scene())


def test_a_model_that_can_not_load_says_so(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a", fail_load="ModelSourceInvalid")) as site:
            for _ in range(2):
                with pytest.raises(ModelLoadFailed) as caught:
                    await site.ask("a", "text")
                assert caught.value.permanent

    play(scene())


# --- queue, deadlines, leaving -----------------------------------------------------------------------


@seeds
def test_the_queue_is_bounded_and_leaving_frees_a_place(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=4.0, queue=3)) as site:
            await site.ask("a", "warm")
            running = asyncio.create_task(site.ask("a", "running"))
            await asyncio.sleep(0.5)
            waiting = [asyncio.create_task(site.ask("a", f"waiting {number}")) for number in range(3)]
            await asyncio.sleep(0.5)
            with pytest.raises(QueueFull) as caught:
                await site.ask("a", "one too many")
            assert caught.value.retry_after_s >= 1.0
            waiting[0].cancel()
            await asyncio.sleep(0.1)
            with pytest.raises(DeadlineExceeded):
                await site.ask("a", "short", within=0.2)
            late = await site.ask("a", "in the place of those that left")
            assert len(late.outputs) == 1
            await asyncio.gather(running, *waiting, return_exceptions=True)

    play(scene(), seed)


@seeds
def test_requests_that_wait_for_the_model_take_places_too(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=5.0, queue=2)) as site:
            waiting = [asyncio.create_task(site.ask("a", f"waiting {number}")) for number in range(2)]
            await asyncio.sleep(1)
            with pytest.raises(QueueFull):
                await site.ask("a", "one too many")
            await asyncio.gather(*waiting)
            await site.ask("a", "fine now")

    play(scene(), seed)


def test_the_deadline_counts_while_the_model_loads(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=5.0), fake("b", load_s=5.0, deadline_s=2.0)) as site:
            with pytest.raises(DeadlineExceeded, match="loading"):
                await site.ask("a", "text", within=1.0)
            assert now() == pytest.approx(1.0)
            with pytest.raises(DeadlineExceeded):
                await site.ask("b", "text", within=100.0)
            assert now() == pytest.approx(3.0)

    play(scene())


@seeds
def test_a_cancelled_request_leaves_nothing_behind(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=1.0, run_s=1.0)) as site:
            for moment in (0.43, 1.37, 0.11, 0.23):
                asked = asyncio.create_task(site.ask("a", "text"))
                await asyncio.sleep(moment)
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                status = site.service.model("a")
                assert (status.leases, status.queued) == (0, 0)
            assert len((await site.ask("a", "text")).outputs) == 1

    play(scene(), seed)


def test_a_changed_queue_or_deadline_counts_without_a_new_engine(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=4.0)) as site:
            await site.ask("a", "warm")
            site.house.registry.apply([fake("a", run_s=4.0, queue=1, deadline_s=6.0)])
            running = asyncio.create_task(site.ask("a", "running"))
            await asyncio.sleep(0.5)
            waiting = asyncio.create_task(site.ask("a", "waiting"))
            await asyncio.sleep(0.5)
            with pytest.raises(QueueFull):
                await site.ask("a", "one too many")
            await running
            with pytest.raises(DeadlineExceeded):
                await waiting
            assert site.service.model("a").epoch == 1

    play(scene())


@seeds
def test_memory_that_runs_out_while_running_is_taken_from_other_models(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("idle", 40 * MIB), fake("busy", 40 * MIB, run_s=0.1)) as site:
            await asyncio.gather(site.ask("idle", "text"), site.ask("busy", "text"))
            full = DeviceOutOfMemory("full", needed=60 * MIB, free=0)
            FaultPoints.of("busy").fail("run", full, times=1)
            assert len((await site.ask("busy", "text")).outputs) == 1
            assert site.house.state("idle") is Residency.UNLOADED
            assert site.house.state("busy") is Residency.RESIDENT

    play(scene(), seed)


# --- engines that go away ----------------------------------------------------------------------------


@seeds
def test_after_an_engine_died_the_next_request_gets_a_new_one(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=1.0, die_after=2)) as site:
            await site.ask("a", "one")
            await site.ask("a", "two")
            with pytest.raises(EngineDied):
                await site.ask("a", "three")
            await site.house.until(lambda: site.house.state("a") is not Residency.RESIDENT)
            assert len((await site.ask("a", "four")).outputs) == 1

    play(scene(), seed)


@pytest.mark.parametrize("turns", range(6))
def test_a_request_that_failed_as_its_engine_died_leaves_its_caller_alone(play: Play, turns: int) -> None:
    """The engine's own error may come in the same turn of the loop as the news of its death."""

    async def scene() -> None:
        async with serving(fake("s", MIB, adapter="fake-stream")) as site:
            with await site.house.registry.acquire("s", wait_s=10.0) as lease:
                engine: Any = lease.engine

            async def fails(request: Any) -> Any:
                engine.die("killed")
                for _ in range(turns):
                    await asyncio.sleep(0)
                raise EngineDied("its own word")

            engine.encode = fails
            with pytest.raises(EngineDied):
                await site.ask("s", "text")
            for _ in range(10):
                await asyncio.sleep(0)

    play(scene(), 0)


@seeds
def test_an_engine_that_dies_again_and_again_is_started_less_and_less_often(play: Play, seed: int) -> None:
    """After its first death at once, then after a cool-down that doubles; one that lived for long begins anew."""

    async def scene() -> None:
        async with serving(fake("a", die_after=0)) as site:

            async def kill() -> None:
                with pytest.raises(EngineDied):
                    await site.ask("a", "text")
                await site.house.until(lambda: str(site.house.state("a")) in ("unloaded", "failed"))

            async def refused() -> float:
                with pytest.raises(ModelLoading, match=r"died \d times in a row") as caught:
                    await site.ask("a", "text")
                assert caught.value.retry_after_s is not None
                return caught.value.retry_after_s

            await kill()
            await kill()
            assert 29.0 < await refused() <= 30.0
            assert site.house.ledger.claims() == []
            await asyncio.sleep(31.0)
            await kill()
            assert 59.0 < await refused() <= 60.0
            await site.service.load("a")  # by hand: at once
            await asyncio.sleep(301.0)
            await kill()
            await kill()
            assert 29.0 < await refused() <= 30.0

    play(scene(), seed)


@seeds
def test_an_unload_by_force_ends_what_runs_with_an_error_to_try_again_on(play: Play, seed: int) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=5.0)) as site:
            await site.service.load("a")
            asked = [asyncio.create_task(site.ask("a", f"text {number}")) for number in range(3)]
            await asyncio.sleep(1.0)
            status = await site.service.unload("a", force=True)
            assert status.residency is Residency.UNLOADED
            ended = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(one, ResourceExhausted) for one in ended)

    play(scene(), seed)


@seeds
def test_a_changed_configuration_lets_requests_finish_and_serves_the_next_with_the_new_engine(
    play: Play, seed: int
) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=1.0, salt="old")) as site:
            await site.service.load("a")
            old = asyncio.create_task(site.ask("a", "text"))
            await asyncio.sleep(0.5)
            site.house.registry.apply([fake("a", run_s=1.0, salt="new")])
            new = await site.ask("a", "text")
            np.testing.assert_array_equal((await old).outputs[0].dense, expected_vector("text", salt="old"))
            np.testing.assert_array_equal(new.outputs[0].dense, expected_vector("text", salt="new"))

    play(scene(), seed)


# --- operators ---------------------------------------------------------------------------------------


def test_load_unload_pin_and_status(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a", load_s=1.0), fake("b")) as site:
            service = site.service
            events: list[str] = []
            leave = service.subscribe(lambda event: events.append(f"{event.model}:{event.after}"))
            assert (await service.load("a")).residency is Residency.RESIDENT
            assert service.pin("a").pinned
            assert not service.unpin("a").pinned
            assert (await service.unload("a")).residency is Residency.UNLOADED
            leave()
            assert "a:resident" in events
            status = service.status()
            assert [model.name for model in status.models] == ["a", "b"] == [model.name for model in service.models()]
            assert {account.account for account in status.accounts} == {"host", "emulated:0"}
            assert status.version and status.uptime_s >= 0
            with pytest.raises(ModelNotFound):
                await service.load("c")

    play(scene())


def test_without_a_host_tier_parking_is_refused(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a")) as site:
            for act in (site.service.park, site.service.wake):
                with pytest.raises(Unsupported, match="host tier is off"):
                    await act("a")

    play(scene())


def test_why_a_model_was_evicted_can_be_asked(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a"), fake("b")) as site:
            await site.ask("a", "text")
            await site.ask("b", "text")
            assert any("a" in (decision.model, *decision.victims) for decision in site.service.decisions())

    play(scene())


def test_a_server_that_shuts_down_is_not_ready_refuses_and_drains(play: Play) -> None:
    async def scene() -> None:
        async with serving(fake("a", run_s=3.0)) as site:
            await site.ask("a", "warm")
            assert site.service.ready() == (True, [])
            asked = asyncio.create_task(site.ask("a", "text"))
            await asyncio.sleep(1.0)
            site.service.begin_shutdown()
            ready, problems = site.service.ready()
            assert not ready
            assert problems == ["the server is shutting down"]
            with pytest.raises(ShuttingDown):
                await site.ask("a", "late")
            with pytest.raises(ShuttingDown):
                await site.service.load("a")
            assert await site.service.drain(1.0) == 1
            assert await site.service.drain(10.0) == 0
            assert len((await asked).outputs) == 1

    play(scene())


def test_a_loader_that_is_stuck_makes_the_server_not_ready(play: Play) -> None:
    async def scene() -> None:
        settings = RegistrySettings(load_timeout_s=10.0)
        async with serving(fake("a"), fake("b", MIB), settings=settings) as site:
            latch = FaultPoints.of("a").hold("load")
            asked = asyncio.create_task(site.ask("a", "text"))
            await site.house.until(lambda: not site.service.ready()[0])
            assert "'a'" in site.service.ready()[1][0]
            assert len((await site.ask("b", "others are served")).outputs) == 1
            latch.release()
            await asyncio.gather(asked, return_exceptions=True)
            await site.house.until(lambda: site.service.ready()[0])

    play(scene())
