"""The batcher, on the virtual clock: a run takes one second unless a test says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import Client, RecordingEngine, engine, request, words
from sie_core import DeadlineExceeded, DeviceOutOfMemory, EngineDied, InferenceError, InvalidInput, NonFiniteOutput
from sie_core.serving import Batcher, BatchLimits
from sie_testing import FaultPoints, VirtualWorker, expected_vector

Play = Callable[..., Any]
seeds = pytest.mark.parametrize("seed", range(5))


def start(made: RecordingEngine, tokens: int = 8192, **more: Any) -> Client:
    return Client(Batcher(made, VirtualWorker("m"), BatchLimits(tokens), **more))


async def settle() -> None:
    """Let what is ready happen; no time passes."""
    for _ in range(50):
        await asyncio.sleep(0)


# --- when runs happen, and what is in them -----------------------------------------------------------


@seeds
def test_an_idle_engine_starts_at_once(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0))
        await client.ask("hello")
        assert client.done["hello"] == pytest.approx(1.0)
        await asyncio.sleep(5)
        await client.ask("again")
        assert client.done["again"] == pytest.approx(7.0)

    play(scene(), seed)


@seeds
def test_what_comes_during_a_run_goes_together_into_the_next(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=1.0)
        client = start(made)
        first = asyncio.create_task(client.ask("first"))
        await asyncio.sleep(0.5)
        rest = [client.ask(f"text {number}") for number in range(20)]
        await asyncio.gather(first, *rest)
        assert [len(run) for run in made.ran] == [1, 20]
        assert client.done["text 7"] == pytest.approx(2.0)

    play(scene(), seed)


@seeds
def test_answers_belong_to_their_texts(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=0.1, dims=4), tokens=64)
        texts = [[words(1 + (7 * i + j) % 23, f"t{i}-{j}") for j in range(1 + i % 9)] for i in range(40)]
        answers = await asyncio.gather(*(client.ask(*some) for some in texts))
        for some, outputs in zip(texts, answers, strict=True):
            for text, output in zip(some, outputs, strict=True):
                assert output.dense is not None
                np.testing.assert_array_equal(output.dense, expected_vector(text, 4))
                assert output.tokens == len(text.split())

    play(scene(), seed)


def test_no_run_is_over_the_budget_of_model_or_engine(play: Play) -> None:
    async def scene(model: int, own: int | None) -> list[int]:
        made = engine(run_s=0.1, max_batch_tokens=own)
        client = start(made, tokens=model)
        await asyncio.gather(*(client.ask(words(3 + number % 8, f"n{number}")) for number in range(60)))
        return [len(run) * max(len(text.split()) for text in run) for run in made.ran]

    assert max(play(scene(100, None))) <= 100
    assert max(play(scene(100, 40))) <= 40


@seeds
def test_texts_of_one_length_run_together(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=1.0)
        client = start(made)
        first = asyncio.create_task(client.ask("first"))
        await asyncio.sleep(0.5)
        await asyncio.gather(first, *(client.ask(words(60 if n % 2 else 5, f"n{n}")) for n in range(16)))
        assert len(made.ran) == 3
        for run in made.ran[1:]:
            assert len({len(text.split()) for text in run}) == 1

    play(scene(), seed)


# --- fairness ----------------------------------------------------------------------------------------


@seeds
def test_a_large_request_does_not_starve_small_ones(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0), tokens=32)
        big = asyncio.create_task(client.ask(*(f"big{n}" for n in range(2048)), name="big"))
        await asyncio.sleep(3.5)
        for number in range(30):
            asked = asyncio.get_running_loop().time()
            await client.ask(f"small{number}")
            # The run under way, at most a turn of the large request, and its own.
            assert client.done[f"small{number}"] - asked <= 3.0
        await big

    play(scene(), seed)


@seeds
def test_small_requests_do_not_starve_a_large_one(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0), tokens=16)
        loop = asyncio.get_running_loop()

        async def keep_asking(who: int) -> None:
            while "big" not in client.done:
                await client.ask(f"{who}@{loop.time()}")

        crowd = [asyncio.create_task(keep_asking(who)) for who in range(30)]
        await asyncio.sleep(5)
        asked = loop.time()
        await client.ask(*(f"big{n}" for n in range(128)), name="big")
        # 128 items want 8 runs alone, and get at least half of each run.
        assert client.done["big"] - asked <= 25
        await asyncio.gather(*crowd)

    play(scene(), seed)


@seeds
def test_an_odd_length_is_passed_over_a_bounded_number_of_times(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=1.0)
        client = start(made, tokens=600)
        loop = asyncio.get_running_loop()

        async def keep_asking(who: int) -> None:
            while "odd" not in client.done:
                await client.ask(words(4, f"{who}@{loop.time()}"))

        crowd = [asyncio.create_task(keep_asking(who)) for who in range(200)]
        await asyncio.sleep(2.5)
        asked = loop.time()
        await client.ask(words(300, "odd"), name="odd")
        assert client.done["odd"] - asked <= 11
        await asyncio.gather(*crowd)

    play(scene(), seed)


# --- leaving early -----------------------------------------------------------------------------------


@seeds
def test_a_cancelled_request_is_not_run(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=1.0)
        client = start(made)
        first = asyncio.create_task(client.ask("first"))
        await asyncio.sleep(0.2)
        leaver = asyncio.create_task(client.ask("left 1", "left 2"))
        stayer = asyncio.create_task(client.ask("stays"))
        await asyncio.sleep(0.2)
        leaver.cancel()
        await asyncio.gather(first, stayer)
        with pytest.raises(asyncio.CancelledError):
            await leaver
        assert made.ran == [["first"], ["stays"]]
        assert client.batcher.pending == 0

    play(scene(), seed)


@seeds
def test_a_slow_request_goes_on_when_the_one_prepared_ahead_of_it_has_left(play: Play, seed: int) -> None:
    """F6: a sibling: with another model at work meanwhile, it was not prepared before its deadline."""

    async def scene() -> None:
        loop, turn = asyncio.get_running_loop(), asyncio.Semaphore(0)  # another engine has the right to run
        batcher = start(engine(run_s=1.0), decoder=VirtualWorker("decoder")).batcher

        async def ask() -> None:
            lease = SimpleNamespace(permit=turn)
            await batcher.submit(request(*["x" * 10_000] * 64), deadline=loop.time() + 1000, lease=lease)

        leaves = asyncio.create_task(ask())
        await asyncio.sleep(1)
        stays = asyncio.create_task(ask())
        await asyncio.sleep(1)
        leaves.cancel()
        await settle()
        turn.release()
        await stays

    play(scene(), seed)


@seeds
def test_a_request_ends_at_its_deadline_waiting_or_running(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=10.0)
        client, loop = start(made), asyncio.get_running_loop()
        running = asyncio.create_task(client.ask("running", within=4.0))
        await asyncio.sleep(1)
        with pytest.raises(DeadlineExceeded, match="waiting"):
            await client.ask("waiting", within=2.0)
        assert loop.time() == pytest.approx(3.0)
        with pytest.raises(DeadlineExceeded, match="running"):
            await running
        assert loop.time() == pytest.approx(4.0)
        await client.ask("next")
        assert client.done["next"] == pytest.approx(20.0)
        assert made.ran == [["running"], ["next"]]

    play(scene(), seed)


@seeds
def test_when_the_engine_dies_everybody_hears_of_it(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0))
        asked = [asyncio.create_task(client.ask(f"text {number}")) for number in range(30)]
        await asyncio.sleep(0.5)
        client.batcher.fail(EngineDied("the child process is gone"))
        assert all(isinstance(one, EngineDied) for one in await asyncio.gather(*asked, return_exceptions=True))
        with pytest.raises(EngineDied):
            await client.ask("late")

    play(scene(), seed)


# --- faults ------------------------------------------------------------------------------------------


@seeds
def test_an_item_that_fails_fails_its_own_request_only(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=1.0)
        made.poison = "poison"
        client = start(made)
        first = asyncio.create_task(client.ask("first"))
        await asyncio.sleep(0.5)
        asked = [client.ask("a"), client.ask("b", "poison"), client.ask("c", "d")]
        got = await asyncio.gather(first, *asked, return_exceptions=True)
        assert [isinstance(one, list) for one in got] == [True, True, False, True]
        assert isinstance(got[2], InferenceError)
        assert "this text is poison" in got[2].message
        assert isinstance(got[2].__cause__, ValueError)

    play(scene(), seed)


@seeds
def test_input_that_can_not_be_prepared_names_the_item_and_harms_nobody(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0))
        many = [f"text {number}" for number in range(200)]
        many[150] = ""
        bad, good = await asyncio.gather(client.ask(*many, name="bad"), client.ask("good"), return_exceptions=True)
        assert isinstance(bad, InvalidInput)
        assert bad.index == 150
        assert isinstance(good, list)

    play(scene(), seed)


@seeds
def test_output_that_is_not_finite_names_all_its_items(play: Play, seed: int) -> None:
    async def scene() -> None:
        client = start(engine(run_s=1.0, non_finite=("bad", words(80, "worse"))))
        bad, good = await asyncio.gather(
            client.ask("a", "bad", "b", words(80, "worse"), name="bad"), client.ask("good"), return_exceptions=True
        )
        assert isinstance(bad, NonFiniteOutput)
        assert bad.items == (1, 3)
        assert isinstance(good, list)

    play(scene(), seed)


@seeds
def test_a_run_that_is_too_large_for_the_device_is_halved_and_the_lesson_kept(play: Play, seed: int) -> None:
    async def scene() -> None:
        made = engine(run_s=0.1, oom_over_tokens=50)
        client = start(made)
        first = asyncio.create_task(client.ask("first"))
        await asyncio.sleep(0.05)
        answers = await asyncio.gather(first, *(client.ask(words(10, f"n{n}")) for n in range(32)))
        assert all(len(one) == 1 for one in answers)
        failed = sum(1 for run in made.ran if sum(len(text.split()) for text in run) > 50)
        assert 1 <= failed <= 7  # 320, 160, 160, 80, 80, 80, 80
        before = len(made.ran)
        await asyncio.gather(*(client.ask(words(10, f"again{n}")) for n in range(16)))
        again = [sum(len(text.split()) for text in run) for run in made.ran[before:]]
        assert sum(1 for tokens in again if tokens > 50) <= 1

    play(scene(), seed)


@pytest.mark.parametrize("granted", [True, False])
def test_a_single_item_that_does_not_fit_asks_for_room_once(play: Play, granted: bool) -> None:
    async def scene() -> None:
        made, asked = engine(run_s=0.1), []

        async def make_room(lease: Any, nbytes: int) -> bool:
            asked.append(nbytes)
            await asyncio.sleep(2)
            return granted

        client = start(made, make_room=make_room)
        busy = asyncio.create_task(client.ask("busy"))
        await asyncio.sleep(0.05)
        # The pair fails, then each alone; with more room, both go through.
        full = DeviceOutOfMemory("full", needed=700, free=200)
        FaultPoints.of("m").fail("run", full, times=2 if granted else 3)
        _, *pair = await asyncio.gather(busy, client.ask("a"), client.ask("b"), return_exceptions=True)
        assert asked == [500]
        assert [type(one) for one in pair] == ([list, list] if granted else [DeviceOutOfMemory] * 2)
        assert len(await client.ask("later")) == 1

    play(scene())


def test_memory_that_never_suffices_fails_that_batch_alone(play: Play) -> None:
    async def scene() -> None:
        client = start(engine(run_s=0.1, oom_over_tokens=20))
        large, small = await asyncio.gather(client.ask(words(30, "large")), client.ask("small"), return_exceptions=True)
        assert isinstance(large, DeviceOutOfMemory)
        assert isinstance(small, list)

    play(scene())


def test_an_engine_that_answers_too_few_items_is_found_out(play: Play) -> None:
    class Short(RecordingEngine):
        def run(self, batch: Any) -> Any:
            return super().run(batch)[:-1]

    async def scene() -> None:
        made = engine()
        made.__class__ = Short
        with pytest.raises(InferenceError, match="0 of 1 items"):
            await start(made).ask("text")

    play(scene())


def test_a_request_without_items_is_answered(play: Play) -> None:
    async def scene() -> None:
        batcher = start(engine()).batcher
        job = await batcher.submit(request(), deadline=10.0)
        assert job.outputs == []

    play(scene())
