"""Tools and structured output with the real SGLang. Where no grammar runs on a CPU, its refusal is what is tested."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from sie_core import GenerateRequest, InvalidInput

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "color": {"enum": ["red", "blue"]}},
    "required": ["on", "color"],
    "additionalProperties": False,
}
ANSWER = r'\{"on": (true|false), "color": "(red|blue)"\}'
NAMED = {"type": "function", "function": {"name": "lamp"}}
BLANKS = {"198": -100, "199": -100, "202": -100, "221": -100}
"""Tokens of a tab, two line breaks and a space: see the tokenizer in ``support/tiny.py``."""


def lamp(description: str = "a lamp", parameters: Any = SCHEMA, strict: bool = True) -> dict[str, Any]:
    function = {"name": "lamp", "description": description, "strict": strict, "parameters": parameters}
    return {"type": "function", "function": function}


def asked(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}}


def chat(**body: Any) -> GenerateRequest:
    messages = [{"role": "user", "content": "hello"}]
    return GenerateRequest("chat", {"messages": messages, "max_tokens": 120, "temperature": 0, **body})


async def whole(engine: Any, **body: Any) -> Any:
    return (await engine.generate(chat(**body)))["choices"][0]


async def streamed(engine: Any, **body: Any) -> list[Any]:
    pieces = [json.loads(piece) async for run in engine.stream(chat(**body)) for piece in run]
    return [piece["choices"][0] for piece in pieces if piece["choices"]]


async def refused(engine: Any, match: str, **body: Any) -> None:
    """In one piece and in a stream, as the client's fault; and the engine goes on."""
    with pytest.raises(InvalidInput, match=match) as caught:
        await whole(engine, **body)
    assert 'File "' not in caught.value.message
    with pytest.raises(InvalidInput, match=match):
        await streamed(engine, **body)
    assert (await whole(engine, max_tokens=2, ignore_eos=True))["finish_reason"] == "length"


NO_GRAMMAR = "not supported when the server is launched with --grammar-backend none"


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [(asked(SCHEMA), ANSWER), ({"regex": "[a-c]{3}x"}, "[a-c]{3}x"), ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no")],
    ids=["schema", "regex", "ebnf"],
)
async def test_an_answer_has_the_form_that_was_asked_for(
    real: Any, engine: Any, wish: dict[str, Any], pattern: str
) -> None:
    if not real.grammar:
        await refused(engine, NO_GRAMMAR, **wish)
        return
    free = await whole(engine, max_tokens=8, ignore_eos=True)
    assert not re.fullmatch(pattern, free["message"]["content"])
    answer = await whole(engine, **wish)
    assert re.fullmatch(pattern, answer["message"]["content"])
    assert answer["finish_reason"] == "stop"
    pieces = await streamed(engine, **wish)
    assert "".join(piece["delta"].get("content") or "" for piece in pieces) == answer["message"]["content"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_tool_is_called(real: Any, engine: Any, choice: Any) -> None:
    wish = {"tools": [lamp()], "tool_choice": choice, "parallel_tool_calls": False, "logit_bias": BLANKS}
    if not real.grammar:
        await refused(engine, NO_GRAMMAR, **wish)
        return
    (call,) = (await whole(engine, **wish))["message"]["tool_calls"]
    assert call["function"]["name"] == "lamp"
    assert re.fullmatch(ANSWER, call["function"]["arguments"])
    deltas = [piece["delta"].get("tool_calls") for piece in await streamed(engine, **wish)]
    calls = [delta[0] for delta in deltas if delta]
    assert len(calls) > 2
    assert calls[0]["function"]["name"] == "lamp"
    assert calls[0]["id"]
    assert "".join(each["function"]["arguments"] for each in calls) == call["function"]["arguments"]


async def test_tools_reach_the_models_prompt(engine: Any) -> None:
    """A token a letter: how many there are tells what its chat template was given."""

    async def length(**body: Any) -> int:
        answer = await engine.generate(chat(max_tokens=1, **body))
        return int(answer["usage"]["prompt_tokens"])

    without = await length()
    short = await length(tools=[lamp("x", strict=False)])
    assert short - without > len(json.dumps(SCHEMA))
    assert await length(tools=[lamp("x" * 41, strict=False)]) == short + 40
    assert await length(tools=[lamp("x", strict=False)], tool_choice="none") == without


@pytest.mark.parametrize(
    ("wish", "match"),
    [
        ({"tools": [lamp()], "tool_choice": {"type": "function", "function": {"name": "door"}}}, "door"),
        ({"tools": [{"type": "function"}]}, "Field required"),
        ({"tools": [lamp(parameters={"type": "nonsense"})]}, "nonsense"),
        ({"tools": [], "tool_choice": "required"}, "[Tt]ools"),
        ({"logit_bias": {"5": "much"}}, "valid"),
        (asked({"type": "nonsense"}), "grammar"),
        ({"regex": "["}, "grammar"),
        ({"ebnf": "root ::= "}, "grammar"),
    ],
    ids=[
        "unknown tool",
        "no function",
        "bad parameters",
        "no tools",
        "bad bias",
        "bad schema",
        "bad regex",
        "bad ebnf",
    ],
)
async def test_what_it_can_not_do_is_refused_as_the_requests_fault(
    engine: Any, wish: dict[str, Any], match: str
) -> None:
    await refused(engine, match, **wish)


async def test_a_bias_steers_what_it_says(engine: Any) -> None:
    answer = await whole(engine, max_tokens=4, logit_bias={"5": 100})
    assert answer["message"]["content"] == "%%%%"


async def test_none_of_this_has_hurt_it(engine: Any, reported: Any) -> None:
    assert reported.deaths == []
    assert engine._running.process.alive
