"""What a client asks for reaches the engine as it is, and what the engine answers comes back as it is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

openai = pytest.importorskip("openai")

LAMP = {
    "type": "function",
    "function": {
        "name": "lamp",
        "description": "Küche 🦙",
        "strict": True,
        "parameters": {"type": "object", "properties": {"room": {"type": "string", "enum": ["a", "b"]}}},
    },
}
SCHEMA = {"name": "answer", "strict": True, "schema": {"type": "object", "$defs": {"a": {"type": "null"}}}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "light, please"}], "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "lamp", "arguments": '{"room": "a"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]
CHAT: dict[str, Any] = {
    "tools": [LAMP],
    "tool_choice": {"type": "function", "function": {"name": "lamp"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    "logit_bias": {"17": -100, "18": 2.5},
    "seed": 2**40,
    "temperature": 0.25,
    "top_p": 0.5,
    "frequency_penalty": -0.5,
    "presence_penalty": 0.5,
    "n": 2,
    "stop": ["\n", "END"],
    "logprobs": True,
    "top_logprobs": 3,
    "max_completion_tokens": 5,
    "reasoning_effort": "low",
    "user": "ann",
}
COMPLETION: dict[str, Any] = {
    **{name: CHAT[name] for name in ("logit_bias", "seed", "temperature", "top_p", "n", "stop", "user")},
    **{name: CHAT[name] for name in ("frequency_penalty", "presence_penalty")},
    "logprobs": 2,
    "echo": True,
    "suffix": "end",
    "best_of": 3,
    "max_tokens": 3,
}
OWN: dict[str, Any] = {  # SGLang's own
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "skip_special_tokens": False,
    "ebnf": 'root ::= "a"',
}
ARGUMENTS = {"room": 'Küche "1"'}


@pytest_asyncio.fixture
async def server(home: Any, front: Any) -> AsyncIterator[Any]:
    small = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}
    async with front(home.model(how=small, max_total_tokens=4096)) as server:
        await server.act("load")
        yield server


def heard(helpers: Any, server: Any, stream: bool) -> dict[str, Any]:
    """The body of the engine's last request, without what is ours: usage is asked for to count what was generated."""
    body: dict[str, Any] = helpers.told(server.engine())["body"]
    assert body.pop("rid")
    assert body.pop("model") == "sie"
    assert body.pop("stream", False) is stream
    assert body.pop("stream_options", None) == ({"include_usage": True} if stream else None)
    return body


def client_of(server: Any) -> Any:
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=server.http, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_field_of_a_chat_arrives(server: Any, helpers: Any, stream: bool) -> None:
    more = {**OWN, "chat_template_kwargs": {"thinking": False}}
    await client_of(server).chat.completions.create(
        model="tiny", messages=MESSAGES, **CHAT, extra_body=more, stream=stream
    )
    body = heard(helpers, server, stream)
    assert body == {"messages": MESSAGES, **CHAT, **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_field_of_a_completion_arrives(server: Any, helpers: Any, stream: bool) -> None:
    answer = await client_of(server).completions.create(
        model="tiny", prompt=["a", "ü"], **COMPLETION, extra_body={**OWN, "regex": "[a-c]+"}, stream=stream
    )
    body = heard(helpers, server, stream)
    if stream:
        assert [piece.choices[0].text async for piece in answer][:2] == ["w0 ", "w1 "]
    assert body == {"prompt": ["a", "ü"], **COMPLETION, **OWN, "regex": "[a-c]+"}


async def test_calls_of_tools_come_back_whole(server: Any) -> None:
    answer = await client_of(server).chat.completions.create(model="tiny", messages=MESSAGES, tools=[LAMP])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    first, second = choice.message.tool_calls
    assert (first.id, first.type, first.function.name) == ("call_1", "function", "lamp")
    assert json.loads(first.function.arguments) == ARGUMENTS
    assert (second.id, second.function.arguments) == ("call_2", "{}")


async def test_calls_of_tools_come_back_piece_by_piece(server: Any) -> None:
    stream = await client_of(server).chat.completions.create(model="tiny", messages=MESSAGES, tools=[LAMP], stream=True)
    pieces = [piece async for piece in stream]
    deltas = [piece.choices[0].delta.model_dump(exclude_unset=True) for piece in pieces]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 5 + ["tool_calls"]
    lamp = {"type": "function", "function": {"name": "lamp", "arguments": ""}}
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[1] == {"tool_calls": [{"index": 0, "id": "call_1", **lamp}]}
    assert deltas[4]["tool_calls"][0]["id"] == "call_2"
    assert deltas[5] == {}
    parts = [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:4]]
    assert parts[0] == ""
    assert json.loads("".join(parts)) == ARGUMENTS


async def test_the_client_puts_the_pieces_together(server: Any) -> None:
    """As its users do: with the helper that parses arguments while they come."""
    async with client_of(server).chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[LAMP], stream_options={"include_usage": False}
    ) as events:
        kinds = [event.type async for event in events]
        final = await events.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = final.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["lamp", "lamp"]
    assert calls[0].function.parsed_arguments == ARGUMENTS
