"""Generation through the service, over a real registry of fake models, on the virtual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from generating import Reader, asked, now, numbered, serving, settled, talker
from sie_core import (
    DeadlineExceeded,
    GenerateRequest,
    Item,
    QueueFull,
    Residency,
)
from sie_testing import FakeStreamEngine

Play = Callable[..., Any]


# --- answers -----------------------------------------------------------------------------------------


def test_an_answer_is_signed_by_the_server_and_counted(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            result = await site.service.generate("chat", asked(kind="chat"))
            answer = result.answer
            assert answer["choices"][0]["message"]["content"] == "c b a"
            assert (answer["model"], answer["object"], answer["id"]) == ("chat", "chat.completion", result.id)
            assert result.id.startswith("chatcmpl-")
            assert answer["created"] > 1_500_000_000
            meter = site.telemetry.model("chat")
            assert (meter.tokens, meter.generated_tokens, meter.items) == (6, 3, 1)
            assert site.outcomes == {"ok": 1}
            assert site.service.model("chat").leases == 0

    play(scene())


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_all_pieces_carry_one_id_and_one_name_and_no_usage_unasked(play: Play, kind: Any) -> None:
    async def scene() -> None:
        async with serving() as site:
            reader = Reader()
            result = await site.service.stream("chat", asked(kind=kind), reader)
            assert {piece["id"] for piece in reader.pieces} == {result.id}
            assert {piece["model"] for piece in reader.pieces} == {"chat"}
            assert len({piece["created"] for piece in reader.pieces}) == 1
            expected = "chat.completion.chunk" if kind == "chat" else "text_completion"
            assert {piece["object"] for piece in reader.pieces} == {expected}
            assert all(piece["choices"] for piece in reader.pieces)
            assert result.usage["total_tokens"] == 6

    play(scene())


def test_usage_comes_last_for_those_who_ask_and_other_options_reach_the_engine(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            reader = Reader()
            request = asked(stream_options={"include_usage": True}, n=2, stop="a")
            result = await site.service.stream("chat", request, reader)
            assert reader.pieces[-1]["choices"] == []
            assert reader.pieces[-1]["usage"] == dict(result.usage) == {
                "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
            }  # fmt: skip
            assert reader.text == "cc b b"

    play(scene())


def test_pieces_go_out_as_they_come_and_the_first_is_timed(play: Play) -> None:
    async def scene() -> None:
        timed: list[float] = []
        async with serving() as site:
            site.telemetry.model("chat")._first_time = lambda seconds, attributes: timed.append(seconds)
            await site.service.load("chat")
            began, reader = now(), Reader()
            await site.service.stream("chat", asked(), reader)
            assert [at - began for at in reader.at[:3]] == pytest.approx([1.0, 2.0, 3.0])
            await site.service.generate("chat", asked())
            assert len(timed) == 1

    play(scene())


def test_pieces_that_came_together_go_out_together(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker()) as site:
            await site.service.load("chat")
            engine = site.engine()
            alone = engine.stream

            async def stream(request: GenerateRequest) -> AsyncGenerator[bytes | list[bytes]]:
                pieces = [piece async for piece in alone(request)]
                yield pieces[:2]
                yield pieces[2]
                yield pieces[3:-1]
                yield pieces[-1:]  # the usage alone, which nobody asked for: nothing is left to send

            engine.stream = stream  # type: ignore[method-assign, assignment]
            reader = Reader()
            result = await site.service.stream("chat", asked(), reader)
            assert [len(lines.split(b"\n")) for lines in reader.got] == [2, 1, 1]
            said = [json.loads(line) for lines in reader.got for line in lines.split(b"\n")]
            assert "".join(choice["text"] for piece in said for choice in piece["choices"]) == "c b a"
            assert {piece["id"] for piece in said} == {result.id}
            assert result.usage["total_tokens"] == 6

    play(scene())


def test_words_of_many_bytes_are_never_split(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker()) as site:
            words, reader = "naïve 🦙🏽 日本語 \ud7ff".split(), Reader()
            await site.service.stream("chat", asked(" ".join(words)), reader)
            assert reader.text == " ".join(reversed(words))
            for piece in reader.got:
                assert b"\n" not in piece

    play(scene())


# --- many at once ------------------------------------------------------------------------------------


def test_requests_run_side_by_side_in_the_engine(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            began = now()
            await asyncio.gather(*site.asking(*["a b c"] * 20))
            assert now() - began == pytest.approx(3.0)
            assert site.engine().most_running == 20

    play(scene())


def test_an_engine_gets_no_more_than_it_takes_and_the_queue_bounds_the_rest(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0, max_running=2, queue=3)) as site:
            await site.service.load("chat")
            began = now()
            tasks = site.asking(*["a b"] * 5)
            await asyncio.sleep(0.5)
            with pytest.raises(QueueFull) as full:
                await site.service.stream("chat", asked(), Reader())
            assert full.value.retry_after_s >= 1.0
            await asyncio.gather(*tasks)
            assert now() - began == pytest.approx(6.0)
            assert site.engine().most_running == 2

    play(scene())


def test_embedding_requests_of_a_stream_engine_take_turns_too(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(run_s=1.0, max_running=1)) as site:
            await site.service.load("chat")
            began = now()
            await asyncio.gather(*(site.service.encode("chat", [Item(text="one")]) for _ in range(3)))
            assert now() - began == pytest.approx(3.0)

    play(scene())


def test_who_leaves_while_waiting_for_a_turn_costs_nobody_theirs(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0, max_running=1, queue=2)) as site:
            await site.service.load("chat")
            first, second, third = site.asking("a b", "a b", "a b")
            await asyncio.sleep(0.5)
            second.cancel()
            await settled([second])
            fourth = site.asking("a b")
            await settled([first, third, *fourth])
            assert [task.exception() for task in (first, third, *fourth)] == [None] * 3
            assert site.engine().aborted == 0

    play(scene())


# --- those who leave, and those who are slow ---------------------------------------------------------


@pytest.mark.parametrize("after", [0.5, 1.5], ids=["before the first piece", "half way"])
def test_who_leaves_is_aborted_in_the_engine_at_once(play: Play, after: float) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            (task,) = site.asking("a b c")
            await asyncio.sleep(after)
            assert site.engine().running == 1
            task.cancel()
            assert isinstance((await settled([task]))[0], asyncio.CancelledError)
            assert (site.engine().running, site.engine().aborted) == (0, 1)
            assert site.service.model("chat").leases == 0
            assert site.outcomes == {"cancelled": 1}
            assert await site.service.drain(1.0) == 0

    play(scene())


def test_who_leaves_while_a_piece_is_on_its_way_to_them_is_aborted_too(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            (task,) = site.asking("a b c", reader=Reader(slow=100.0))
            await asyncio.sleep(3.0)
            engine = site.engine()
            assert engine.emitted == 1  # the engine is read no faster than its reader takes it
            task.cancel()
            await settled([task])
            assert (engine.running, engine.aborted) == (0, 1)

    play(scene())


def test_a_request_that_leaves_frees_the_model_for_its_unload(play: Play) -> None:
    async def scene() -> None:
        async with serving() as site:
            await site.service.load("chat")
            (task,) = site.asking("a " * 1000)
            await asyncio.sleep(2.0)
            unload = asyncio.ensure_future(site.service.unload("chat"))
            await asyncio.sleep(1.0)
            assert site.house.state("chat") is Residency.DRAINING
            task.cancel()
            await settled([task])
            assert (await unload).residency is Residency.UNLOADED

    play(scene())


# --- deadlines ---------------------------------------------------------------------------------------


def test_the_deadline_bounds_the_first_piece_of_a_stream_and_all_of_a_whole_answer(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0, deadline_s=2.5)) as site:
            await site.service.load("chat")
            reader = Reader()
            await site.service.stream("chat", asked("a " * 10), reader)
            assert len(reader.got) == 11
            for late in (
                site.service.generate("chat", asked("a " * 10)),
                site.service.stream("chat", asked("a " * 10), Reader(), whole=True),
                site.service.stream("chat", asked("a " * 10), Reader(), deadline_s=0.5),
            ):
                began = now()
                with pytest.raises(DeadlineExceeded, match="running"):
                    await late
                assert now() - began <= 2.5
            assert (site.engine().running, site.engine().aborted) == (0, 3)
            assert site.outcomes == {"ok": 1, "DEADLINE_EXCEEDED": 3}

    play(scene())


def test_a_deadline_that_passes_in_the_queue_says_so(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0, max_running=1)) as site:
            await site.service.load("chat")
            (first,) = site.asking("a b c d")
            await asyncio.sleep(0.5)
            with pytest.raises(DeadlineExceeded, match="turn"):
                await site.service.stream("chat", asked(), Reader(), deadline_s=1.0)
            await first

    play(scene())


def test_a_deadline_that_passes_while_the_model_loads_names_it(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(load_s=20.0)) as site:
            with pytest.raises(DeadlineExceeded, match="loading"):
                await site.service.stream("chat", asked(), Reader(), deadline_s=1.0)

    play(scene())


@pytest.mark.parametrize("silent_s", [2.4, 2.6, 3600.0])
def test_an_engine_that_falls_silent_in_the_middle_of_an_answer_is_not_waited_for_for_ever(
    play: Play, monkeypatch: pytest.MonkeyPatch, silent_s: float
) -> None:
    said = FakeStreamEngine.stream

    async def falls_silent(self: FakeStreamEngine, request: GenerateRequest) -> AsyncGenerator[bytes | list[bytes]]:
        async with aclosing(said(self, request)) as pieces:
            async for place, piece in numbered(pieces):
                if place == 3:
                    await asyncio.sleep(silent_s)
                yield piece

    async def scene() -> None:
        async with serving(talker(token_s=1.0, deadline_s=3.5)) as site:
            await site.service.load("chat")
            monkeypatch.setattr(FakeStreamEngine, "stream", falls_silent)
            reader = Reader()
            asking = site.service.stream("chat", asked("a " * 10), reader)
            if silent_s < 2.5:  # with the second that a piece takes anyway
                await asking
                assert (len(reader.got), site.outcomes) == (11, {"ok": 1})
                return
            with pytest.raises(DeadlineExceeded, match=r"nothing for 3\.5 s"):
                await asking
            assert (len(reader.got), now() - reader.at[-1]) == (3, pytest.approx(3.5))
            assert (site.engine().running, site.outcomes) == (0, {"DEADLINE_EXCEEDED": 1})

    play(scene())


def test_a_client_that_takes_its_time_over_a_piece_is_not_taken_for_a_silent_engine(play: Play) -> None:
    async def scene() -> None:
        async with serving(talker(token_s=1.0, deadline_s=2.5)) as site:
            await site.service.load("chat")
            reader = Reader(slow=20.0)
            await site.service.stream("chat", asked("a b c"), reader)
            assert (len(reader.got), site.outcomes) == (4, {"ok": 1})

    play(scene())
