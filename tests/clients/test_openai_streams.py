"""The openai package generating, as its users call it, against a server with a fake engine that reverses its prompt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

CONFIG = """
models:
  - {name: chat, adapter: fake-stream}
  - {name: org/chat, adapter: fake-stream}
  - {name: slow, adapter: fake-stream, options: {token_s: 0.05}}
  - {name: embedder, adapter: fake-stream, options: {tasks: [encode]}}
  - {name: busy, adapter: fake-stream, queue: 1, options: {token_s: 0.3, max_running: 1}}
  - {name: late, adapter: fake-stream, deadline_s: 0.5, options: {token_s: 2.0}}
"""
HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "naïve 🦙🏽 日本語"},
]
ANSWER = "日本語 🦙🏽 naïve"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    running = start_server(CONFIG)
    for model in ("chat", "slow", "busy"):
        running.load(model)
    return running


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def leases(server: Any, model: str) -> int:
    models = httpx.get(f"{server.url}/v1/status").json()["models"]
    return next(int(one["leases"]) for one in models if one["name"] == model)


def test_a_conversation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=HELLO)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 6


def test_a_conversation_piece_by_piece_with_its_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/chat", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == ANSWER
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 3
    assert len({piece.id for piece in pieces}) == 1
    assert {piece.model for piece in pieces} == {"org/chat"}


def test_a_conversation_piece_by_piece_without_usage(client: openai.OpenAI) -> None:
    pieces = list(client.chat.completions.create(model="chat", messages=HELLO, stream=True, n=2))
    assert all(piece.choices for piece in pieces)
    second = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices[0].index == 1]
    assert "".join(second) == ANSWER


def test_the_helper_that_gathers_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="chat", messages=HELLO) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == ANSWER


def test_a_tool_call_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat",
        messages=HELLO,
        tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        tool_choice="required",
        logprobs=True,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].type == "function"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.logprobs.content[0].logprob == -0.5


def test_completions_of_text_and_token_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt=["a b", "c"], max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["b", "c"]
    assert answer.choices[0].finish_reason == "length"
    pieces = list(client.completions.create(model="chat", prompt=[5, 6], stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "6 5"


def test_many_conversations_at_once_from_the_asynchronous_client(server: Any) -> None:
    async def scene() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="slow", messages=[{"role": "user", "content": f"a b {number}"}], stream=True
                )
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])

            return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(scene()) == [f"{number} b a" for number in range(20)]


def test_who_breaks_off_is_let_go_of_by_the_server(server: Any, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="slow", messages=[{"role": "user", "content": "a " * 1000}], stream=True
    )
    assert next(stream).choices[0].delta.content == "a"
    assert leases(server, "slow") == 1
    stream.close()
    tick = threading.Event()
    for _ in range(100):
        if leases(server, "slow") == 0:
            return
        tick.wait(0.05)
    pytest.fail("the request went on without its client")


def test_a_stream_that_the_server_breaks_off_is_an_error_and_never_a_short_answer(
    server: Any, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(
        model="slow", messages=[{"role": "user", "content": "a " * 1000}], stream=True
    )
    next(stream)
    unload = threading.Thread(
        target=httpx.post, args=(f"{server.url}/v1/admin/models/slow/unload",), kwargs={"json": {"force": True}}
    )
    unload.start()
    with pytest.raises(openai.APIError, match="unloaded") as caught:
        list(stream)
    unload.join()
    assert not isinstance(caught.value, openai.APIStatusError)
    assert caught.value.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_before_the_first_piece_has_its_class(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="does not generate"):
        client.chat.completions.create(model="embedder", messages=HELLO, stream=stream)
    with pytest.raises(openai.NotFoundError, match="chat"):
        client.chat.completions.create(model="chatt", messages=HELLO, stream=stream)
    with pytest.raises(openai.BadRequestError, match="message or more"):
        client.chat.completions.create(model="chat", messages=[], stream=stream)
    with pytest.raises(openai.InternalServerError) as late:
        client.chat.completions.create(model="late", messages=HELLO, stream=stream)
    assert late.value.status_code == 504


def test_a_full_queue_is_a_rate_limit_that_the_client_waits_out(server: Any, client: openai.OpenAI) -> None:
    async def scene() -> tuple[list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

            def ask(which: openai.AsyncOpenAI) -> Any:
                return which.completions.create(model="busy", prompt="a b")

            hasty = await asyncio.gather(*(ask(client) for _ in range(6)), return_exceptions=True)
            patient = client.with_options(max_retries=6)
            return hasty, await asyncio.gather(*(ask(patient) for _ in range(4)), return_exceptions=True)

    hasty, patient = asyncio.run(scene())
    assert {type(one).__name__ for one in hasty} == {"Completion", "RateLimitError"}
    assert {type(one).__name__ for one in patient} == {"Completion"}
