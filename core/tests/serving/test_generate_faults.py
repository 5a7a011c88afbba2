"""Generation through the service: engines that fail, models that go away, and what a model can't do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from generating import TIER, Reader, asked, now, serving, settled, talker
from sie_core import (
    DeadlineExceeded,
    EngineDied,
    GenerateRequest,
    InferenceError,
    InvalidInput,
    Item,
    Residency,
    ResourceExhausted,
    ShuttingDown,
    Unsupported,
)
from sie_core.serving import GenerateResult
from sie_testing import FakeStreamEngine, FaultPoints
from sie_testing.house import MIB, fake

Play = Callable[..., Any]


# --- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["run", "piece"])
def test_an_engine_that_fails_is_an_error_of_that_request_only(
    play: Play, fault_points: Callable[[str], FaultPoints], point: str
) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            site.engine().faults.fail(point, ValueError("a tensor went missing"), times=1)
            tasks = site.asking("a b", "a b")
            results = await settled(tasks)
            assert sorted(type(result) for result in results if isinstance(result, Exception)) == [InferenceError]
            assert sum(isinstance(result, GenerateResult) for result in results) == 1
            assert site.outcomes == {"ok": 1, "INFERENCE_ERROR": 1}

    play(scene())


def test_a_refusal_of_the_engine_is_the_callers_to_mend(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            for ask in (
                site.service.generate("chat", asked(refuse=True)),
                site.service.stream("chat", asked(refuse=True), Reader()),
            ):
                with pytest.raises(InvalidInput, match="refuses"):
                    await ask

    play(scene())


class Broken(FakeStreamEngine):
    """Ends as if all were well, and was cut short."""

    said: Sequence[bytes] = ()

    async def stream(self, request: GenerateRequest) -> Any:
        for piece in self.said:
            yield piece


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([b'{"choices":[{"index":0,"text":"a"}]}'], "before it was complete"),
        ([], "before it was complete"),
        ([b"{"], "no JSON"),
        ([b'{"error":{"message":"oh"}}'], "no piece"),
        ([b"[]"], "no piece"),
    ],
)
def test_an_answer_that_breaks_off_or_is_none_is_never_taken_for_a_whole_one(
    play: Play, monkeypatch: pytest.MonkeyPatch, said: list[bytes], why: str
) -> None:
    monkeypatch.setattr(FakeStreamEngine, "stream", Broken.stream)
    monkeypatch.setattr(FakeStreamEngine, "said", said, raising=False)

    async def scene() -> None:
        async with serving() as site:
            with pytest.raises(InferenceError, match=why):
                await site.service.stream("chat", asked(), Reader())

    play(scene())


def test_an_engine_that_refuses_before_it_begins_is_heard(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeStreamEngine, request: GenerateRequest) -> Any:
        raise InvalidInput("not that") if self.options.salt else KeyError("oops")

    monkeypatch.setattr(FakeStreamEngine, "stream", refuse)

    async def scene() -> None:
        async with serving(talker("chat"), talker("polite", salt="yes")) as site:
            with pytest.raises(InferenceError, match="KeyError"):
                await site.service.stream("chat", asked(), Reader())
            with pytest.raises(InvalidInput, match="not that"):
                await site.service.stream("polite", asked(), Reader())

    play(scene())


def test_what_becomes_of_a_piece_is_not_the_engines_fault(play: Play) -> None:
    async def unwilling(piece: bytes) -> None:
        raise OSError("the pipe is broken")

    async def scene() -> None:
        async with serving() as site:
            with pytest.raises(OSError, match="pipe"):
                await site.service.stream("chat", asked(), unwilling)
            assert (site.engine().running, site.engine().aborted) == (0, 1)

    play(scene())


def test_an_engine_that_dies_ends_its_streams_and_the_next_request_loads_it_again(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            tasks = site.asking("a b c", "a b c")
            await asyncio.sleep(1.5)
            site.engine().die("killed")
            began = now()
            results = await settled(tasks)
            assert [type(result) for result in results] == [EngineDied] * 2
            assert now() == began
            assert (await site.service.generate("chat", asked())).answer["choices"][0]["text"] == "c b a"

    play(scene())


@pytest.mark.parametrize("slow", [0.0, 1000.0], ids=["reading", "stuck on its reader"])
def test_a_forced_unload_ends_streams_with_an_error_and_a_plain_one_waits(play: Play, slow: float) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            (task,) = site.asking("a " * 100, reader=Reader(slow))
            await asyncio.sleep(2.5)
            engine = site.engine()
            with pytest.raises(DeadlineExceeded):
                await site.service.unload("chat", wait_s=1.0)
            assert not task.done()
            await site.service.unload("chat", force=True)
            (result,) = await settled([task])
            assert isinstance(result, ResourceExhausted)
            assert "unloaded" in result.message
            assert (engine.running, engine.aborted) == (0, 1)

    play(scene())


def test_a_park_waits_for_streams_and_the_model_wakes_for_the_next(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0), settings=TIER) as site:
            await site.service.load("chat")
            (task,) = site.asking("a b c d")
            await asyncio.sleep(1.5)
            began = now()
            await site.service.park("chat")
            assert now() - began == pytest.approx(2.5)
            assert isinstance((await settled([task]))[0], GenerateResult)
            assert site.house.state("chat") is Residency.PARKED
            assert (await site.service.generate("chat", asked())).answer["choices"][0]["text"] == "c b a"

    play(scene())


def test_a_shutdown_refuses_newcomers_and_waits_for_streams(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            (task,) = site.asking("a b c")
            await asyncio.sleep(0.5)
            site.service.begin_shutdown()
            with pytest.raises(ShuttingDown):
                await site.service.stream("chat", asked(), Reader())
            assert await site.service.drain(10.0) == 0
            assert task.done()

    play(scene())


# --- what a model can't do ---------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_that_does_not_generate_is_not_touched(play: Play, loaded: bool) -> None:
    async def scene() -> None:
        async with serving(talker(tasks=("encode",)), fake("mini", MIB)) as site:
            for name in ("chat", "mini"):
                if loaded:
                    await site.service.load(name)
                for ask in (
                    site.service.generate(name, asked(kind="chat")),
                    site.service.stream(name, asked(kind="chat"), Reader()),
                ):
                    with pytest.raises(Unsupported, match=f"'{name}' does not generate; it can encode") as refused:
                        await ask
                    assert refused.value.supported == ("encode",)
                assert FaultPoints.of(name).hits("run") == 0
                assert FaultPoints.of(name).hits("load") == loaded

    play(scene())


def test_a_model_that_only_generates_does_not_embed(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(tasks=("generate",))) as site:
            with pytest.raises(Unsupported, match="does not encode; it can generate"):
                await site.service.encode("chat", [Item(text="hello")])
            assert FaultPoints.of("chat").hits("load") == 0

    play(scene())


def test_images_are_refused_by_a_model_that_takes_none(play: Play) -> None:
    async def scene() -> None:
        parts = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
        async with serving(talker(), talker("seeing", inputs=("text", "image"))) as site:
            with pytest.raises(Unsupported, match="no images") as refused:
                await site.service.generate("chat", asked(parts, "chat"))
            assert refused.value.param == "messages"
            answer = (await site.service.generate("seeing", asked(parts, "chat"))).answer
            assert answer["choices"][0]["message"]["content"] == "what"

    play(scene())


def test_a_lora_adapter_is_loaded_for_the_request_that_names_it(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(max_loras=1, lora={"pirate": "path:/loras/pirate"})) as site:
            result = await site.service.generate("chat", asked(lora="pirate"))
            assert result.answer["choices"][0]["text"] == "[pirate] c b a"
            assert site.service.model("chat").loras[0].in_use == 0
            with pytest.raises(Unsupported, match="nobody"):
                await site.service.stream("chat", asked(lora="nobody"), Reader())

    play(scene())
