"""Requests to an engine: answers, streams, errors, and what becomes of a request that is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sie_core import (
    EngineDied,
    GenerateRequest,
    InferenceError,
    InvalidInput,
    ResourceExhausted,
    Task,
    Unsupported,
)


def chat(**body: Any) -> GenerateRequest:
    return GenerateRequest("chat", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **body})


def completion(**body: Any) -> GenerateRequest:
    return GenerateRequest("completion", {"prompt": "hi", "max_tokens": 4, **body})


async def until(check: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


async def test_answers_chat_and_completions(home: Any, start: Any) -> None:
    engine = start(home.model())
    assert (await engine.generate(chat()))["choices"][0]["message"]["content"] == "w0 w1 w2 w3 "
    assert (await engine.generate(completion()))["choices"][0]["text"] == "w0 w1 w2 w3 "
    assert engine.capabilities.tasks == {Task.GENERATE}
    assert engine.capabilities.max_sequence_length == 512


async def test_streams_piece_by_piece_without_the_frames(home: Any, start: Any) -> None:
    engine = start(home.model())
    pieces = [piece async for run in engine.stream(chat(stream_options={"include_usage": True})) for piece in run]
    parsed = [json.loads(piece) for piece in pieces]
    texts = [piece["choices"][0]["delta"]["content"] for piece in parsed if piece["choices"]]
    assert "".join(texts) == "w0 w1 w2 w3 "
    assert parsed[-2]["choices"][0]["finish_reason"] == "length"
    assert parsed[-1]["usage"]["total_tokens"] == 7


async def test_requests_run_side_by_side(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"token_s": 0.02}))
    await asyncio.gather(*(engine.generate(chat(max_tokens=10)) for _ in range(16)))
    assert helpers.told(engine)["most"] > 8


@pytest.mark.parametrize("whole", [True, False])
async def test_a_request_that_is_left_is_aborted_in_the_engine(
    home: Any, start: Any, helpers: Any, whole: bool
) -> None:
    engine = start(home.model(how={"token_s": 0.01}))
    request = chat(max_tokens=5000)
    if whole:
        task = asyncio.create_task(engine.generate(request))
        await until(lambda: helpers.told(engine)["running"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        stream = engine.stream(request)
        await anext(stream)
        await stream.aclose()
    await until(lambda: helpers.told(engine)["running"] == 0 and helpers.told(engine)["aborted"] == 1)


async def test_an_aborted_request_is_no_answer(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"token_s": 0.01}))
    whole = asyncio.create_task(engine.generate(chat(max_tokens=5000)))
    stream = engine.stream(completion(max_tokens=5000))
    await anext(stream)
    await until(lambda: helpers.told(engine)["running"] == 2)
    await asyncio.to_thread(engine.parking.control.abort_all)
    with pytest.raises(InferenceError, match="abort"):
        await whole
    with pytest.raises(InferenceError, match="abort"):
        async for _ in stream:
            pass


async def test_what_the_engine_refuses_is_invalid(home: Any, start: Any) -> None:
    engine = start(home.model())
    with pytest.raises(InvalidInput, match="max_tokens is too large"):
        await engine.generate(completion(max_tokens=10**6))
    with pytest.raises(InvalidInput, match="rid"):
        await anext(engine.stream(chat(rid="mine")))


@pytest.mark.parametrize(("status", "error"), [(502, InferenceError), (503, ResourceExhausted), (422, InvalidInput)])
async def test_one_bad_answer_fails_one_request(home: Any, start: Any, status: int, error: type[Exception]) -> None:
    engine = start(home.model(how={"fail_once": {"/v1/chat/completions": status}}))
    with pytest.raises(error):
        await engine.generate(chat())
    assert (await engine.generate(chat()))["choices"]


async def test_half_a_stream_is_an_error(home: Any, start: Any) -> None:
    engine = start(home.model(how={"half": True}))
    seen = []
    with pytest.raises(InferenceError, match="broke off"):
        async for run in engine.stream(chat()):
            seen += run
    assert len(seen) <= 2


async def test_an_engine_that_dies_in_a_stream_says_so(home: Any, start: Any, helpers: Any) -> None:
    events = helpers.Events()
    engine = start(home.model(how={"die_in_stream": True}), events=events)
    with pytest.raises(EngineDied, match="exit code 7"):
        async for _ in engine.stream(chat()):
            pass
    await until(lambda: bool(events.deaths))
    assert "standin: keys *** ***" in events.deaths[0]
    with pytest.raises(EngineDied):
        await engine.generate(chat())


async def test_a_slow_reader_slows_the_engine(home: Any, start: Any, helpers: Any) -> None:
    """Nothing is read ahead: what nobody takes piles up in the engine's own socket, and it waits."""
    engine = start(home.model(how={"token_s": 0, "word": 1000 * "w"}))  # more in all than sockets hold
    stream = engine.stream(completion(max_tokens=100_000))
    await anext(stream)

    async def stands_still() -> int:
        before, now = -1, 0
        async with asyncio.timeout(20):
            while now != before:
                await asyncio.sleep(0.1)
                before, now = now, helpers.told(engine)["tokens"]
        return now

    stopped = await stands_still()
    assert stopped < 100_000
    async with asyncio.timeout(20):
        while helpers.told(engine)["tokens"] == stopped:
            await anext(stream)
    assert await stands_still() < 100_000
    await stream.aclose()


async def test_lora_is_refused_where_it_is_off(home: Any, start: Any) -> None:
    engine = start(home.model())
    with pytest.raises(Unsupported, match="max_loras"):
        await engine.generate(GenerateRequest("chat", {"messages": []}, lora="style"))
