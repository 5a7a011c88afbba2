"""``/v1/chat/completions``, ``/v1/completions`` and ``/v1/generate``, without a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import pytest
from sie_core import GenerateRequest, InferenceError
from sie_core.config import TelemetryConfig
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints
from website import Served, Start, key_line

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/v1/generate/chat"
HELLO = [{"role": "user", "content": "a b c"}]


async def chat(s: Served, **body: Any) -> httpx.Response:
    return await s.http.post(CHAT, json={"model": "chat", "messages": HELLO, **body})


async def complete(s: Served, **body: Any) -> httpx.Response:
    return await s.http.post(COMPLETIONS, json={"model": "chat", "prompt": "a b c", **body})


async def native(s: Served, model: str = "chat", **body: Any) -> httpx.Response:
    return await s.http.post(f"/v1/generate/{model}", json={"prompt": "a b c", **body})


def events(response: httpx.Response) -> list[Any]:
    """What was sent, each as JSON; the end mark as it is."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.text.endswith("\n\n")
    told = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    return [event if event == "[DONE]" else json.loads(event) for event in told]


# --- OpenAI ------------------------------------------------------------------------------------------


async def test_a_conversation_is_answered_as_a_whole(served: Start) -> None:
    async with served() as s:
        answer = (await chat(s)).json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == "chat"
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "c b a"}
        assert choice["finish_reason"] == "stop"
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("a b", ["b a"]), (["a b", "c"], ["b a", "c"]), ([7, 8], ["8 7"]), ([[7, 8], [9]], ["8 7", "9"])],
)
async def test_prompts_of_all_kinds_are_gone_on_from(served: Start, prompt: Any, texts: list[str]) -> None:
    async with served() as s:
        answer = (await complete(s, prompt=prompt)).json()
        assert answer["object"] == "text_completion"
        assert [choice["text"] for choice in answer["choices"]] == texts


@pytest.mark.parametrize("usage", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_a_stream_ends_with_its_mark_and_tells_usage_to_those_who_ask(served: Start, usage: Any) -> None:
    async with served() as s:
        told = events(await chat(s, stream=True, stream_options=usage))
        assert told[-1] == "[DONE]"
        pieces = told[:-1]
        assert len({(piece["id"], piece["created"], piece["model"]) for piece in pieces}) == 1
        text = "".join(c["delta"].get("content", "") for piece in pieces for c in piece["choices"])
        assert text == "c b a"
        told_usage = [piece for piece in pieces if not piece["choices"]]
        assert len(told_usage) == (1 if usage and usage.get("include_usage") else 0)
        if told_usage:
            assert pieces[-1]["usage"]["total_tokens"] == 6


async def test_a_completion_streams_too(served: Start) -> None:
    async with served() as s:
        told = events(await complete(s, stream=True, n=2))
        assert "".join(c["text"] for piece in told[:-1] for c in piece["choices"] if c["index"] == 1) == "c b a"
        assert {piece["object"] for piece in told[:-1]} == {"text_completion"}


async def test_what_may_be_passed_on_reaches_the_engine(served: Start) -> None:
    async with served() as s:
        more = {"metadata": {"a": 1}, "store": False, "ignore_eos": False, "chat_template_kwargs": {"thinking": False}}
        assert (await chat(s, **more)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_logit_processor", "gASV"),  # code
        ("custom_params", {"a": 1}),
        ("bootstrap_host", "169.254.169.254"),  # an address that the engine calls
        ("bootstrap_port", 80),
        ("bootstrap_room", 1),
        ("session_params", {"id": "another's"}),
        ("session_id", "another's"),
        ("rid", "another's"),
        ("lora_path", "/etc"),
        ("image_data", "/etc/passwd"),
        ("data_parallel_rank", 1),
        ("routed_dp_rank", 1),
        ("disagg_prefill_dp_rank", 1),
        ("priority", -(10**9)),
        ("return_hidden_states", True),
        ("return_routed_experts", True),
        ("mm_processor_kwargs", {"max_pixels": 10**12}),
        ("max_dynamic_patch", 10**6),
        ("custom_labels", {"a": "b"}),
        ("unheard_of", [1]),
    ],
)
async def test_what_is_not_for_clients_is_refused(served: Start, field: str, value: Any) -> None:
    """F14: on every route that generates, before any model is loaded for it."""
    async with served() as s:
        for refused in (await chat(s, **{field: value}), await complete(s, **{field: value})):
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == field
            assert repr(field) in refused.json()["error"]["message"]
        refused = await native(s, "org/chat", **{field: value})
        assert refused.status_code == 400, refused.text
        assert (await chat(s, **{field: None})).status_code == 200, "as if not sent"


async def test_tools_and_logprobs_and_stops_pass_through(served: Start) -> None:
    async with served() as s:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        called = (await chat(s, tools=[tool], tool_choice="required")).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        assert called["message"]["tool_calls"][0]["function"]["name"] == "look"
        measured = (await chat(s, logprobs=True, top_logprobs=2, stop="a")).json()["choices"][0]
        assert [entry["token"] for entry in measured["logprobs"]["content"]] == ["c", " b"]


async def test_a_lora_adapter_is_named_in_the_body(served: Start) -> None:
    async with served() as s:
        body = {"source": "path:/loras/pirate"}
        assert (await s.http.post("/v1/admin/models/pirates/loras/pirate", json=body)).status_code == 200
        assert "[pirate]" in (await chat(s, model="pirates", lora="pirate")).text
        assert "[pirate]" in (await native(s, "pirates", lora_adapter="pirate")).text
        assert "[pirate]" not in (await chat(s, model="pirates")).text
        missing = await chat(s, model="pirates", lora="nobody", stream=True)
        assert missing.status_code == 400


async def test_a_history_with_tools_and_parts_is_taken(served: Start) -> None:
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {}}]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]},
    ]
    async with served() as s:
        assert (await chat(s, messages=history)).json()["choices"][0]["message"]["content"] == "c b a"


async def test_nulls_are_as_if_not_sent(served: Start) -> None:
    async with served() as s:
        names = (
            "stop",
            "n",
            "temperature",
            "stream",
            "stream_options",
            "tools",
            "seed",
            "lora",
            "max_tokens",
            "refuse",
        )
        assert (await chat(s, **dict.fromkeys(names))).status_code == 200


# --- native ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["org/chat", "org__chat", "org%2Fchat"])
async def test_the_native_answer_has_its_figures(served: Start, model: str) -> None:
    async with served() as s:
        answer = (await native(s, model, max_new_tokens=2)).json()
        assert answer["model"] == "org/chat"
        assert answer["text"] == "c b"
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2
        assert answer["ttft_ms"] >= 0


async def test_the_native_answer_comes_as_msgpack_where_that_is_asked_for(served: Start) -> None:
    async with served() as s:
        body = msgspec.msgpack.encode({"prompt": "a b"})
        headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
        answer = await s.http.post(GENERATE, content=body, headers=headers)
        assert msgspec.msgpack.decode(answer.content)["text"] == "b a"


async def test_the_native_stream_counts_its_pieces_and_ends_with_the_figures(served: Start) -> None:
    async with served() as s:
        told = events(await native(s, stream=True, logprobs=True))
        assert told[-1] == "[DONE]"
        pieces = told[:-1]
        assert [piece["seq"] for piece in pieces] == list(range(len(pieces)))
        assert len({piece["request_id"] for piece in pieces}) == 1
        assert "".join(piece["text_delta"] for piece in pieces) == "c b a"
        assert [piece["done"] for piece in pieces] == [False] * 3 + [True]
        assert pieces[0]["logprobs"] == [{"token": "c", "logprob": -0.5, "top_logprobs": {"c": -0.5}}]
        assert pieces[-1]["finish_reason"] == "stop"
        assert pieces[-1]["usage"]["total_tokens"] == 6
        assert pieces[-1]["ttft_ms"] >= 0


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_pieces_that_came_together_are_events_of_their_own(served: Start, path: str) -> None:
    async with served() as s:
        await s.service.load("chat")
        engine = s.engine("chat")
        alone = engine.stream

        async def stream(request: GenerateRequest) -> AsyncGenerator[list[bytes]]:
            yield [piece async for piece in alone(request)]

        body = {"model": "chat", "prompt": "a b c"} if path == COMPLETIONS else {"prompt": "a b c"}
        expected = (await s.http.post(path, json=body)).json()
        apart = events(await s.http.post(path, json={**body, "stream": True}))
        engine.stream = stream  # type: ignore[method-assign, assignment]
        together = events(await s.http.post(path, json={**body, "stream": True}))
        changes = ("id", "request_id", "created", "ttft_ms")
        assert [_without(changes, piece) for piece in together] == [_without(changes, piece) for piece in apart]
        assert len(together) == 5  # three words, the reason, the end
        whole = (await s.http.post(path, json=body)).json()
        assert _without(changes, whole) == _without(changes, expected)


def _without(names: tuple[str, ...], piece: Any) -> Any:
    return piece if isinstance(piece, str) else {name: value for name, value in piece.items() if name not in names}


async def test_explicit_sampling_wins_over_options_and_hints_do_no_harm(served: Start) -> None:
    async with served() as s:
        answer = await native(s, stop=["a"], options={"stop": ["b"], "temperature": 0.5}, routing_key="k", seed=None)
        assert answer.json()["text"] == "c b"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": None}, "prompt", "string"),
        ({"prompt": [1, 2]}, "prompt", "string"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"images": [{"data": "AA==", "format": "png"}]}, "images", "chat/completions"),
        ({"max_new_token": 5}, "max_new_token", "'max_new_tokens'"),
        ({"max_new_tokens": 0}, "max_new_tokens", "1 or more"),
        ({"options": {"temprature": 1}}, "options", "'temperature'"),
        ({"options": []}, None, None),
        ({"options": [1]}, "options", "object"),
        ({"options": {"top_p": 7}}, "top_p", "from 0 to 1"),
        ({"grammar": "x"}, "grammar", "object"),
        ({"grammar": {}}, "grammar", "one of"),
        ({"grammar": {"regex": "a", "ebnf": "b"}}, "grammar", "one of"),
        ({"grammar": {"regex": "a", "what": 1}}, "grammar", "one of"),
        ({"grammar": {"regex": 1}}, "grammar.regex", "string"),
        ({"grammar": {"json_schema": "x"}}, "grammar.json_schema", "object"),
        ({"grammar": {"regex": "a+"}}, None, None),
        ({"grammar": {"json_schema": {"type": "object"}, "strict": True}}, None, None),
        ({"routing_key": 5}, "routing_key", "string"),
        ({"seed": 2**63}, "seed", "number"),
    ],
)
async def test_the_native_path_says_what_it_does_not_take(served: Start, body: Any, param: Any, says: Any) -> None:
    async with served() as s:
        answer = await native(s, **body)
        if param is None:
            assert answer.status_code == 200
            return
        assert answer.status_code == 400
        detail = answer.json()["detail"]
        assert (detail["code"], detail["param"]) == ("INVALID_INPUT", param)
        assert says in detail["message"]
        assert answer.headers["x-should-retry"] == "false"


# --- what is wrong with a request --------------------------------------------------------------------

WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"model": None}, "model", "name of a model"),
    (CHAT, {"model": 5}, "model", "name of a model"),
    (CHAT, {"messages": None}, "messages", "list"),
    (CHAT, {"messages": []}, "messages", "a message or more"),
    (CHAT, {"messages": "hello"}, "messages", "list"),
    (CHAT, {"messages": ["hello"]}, "messages", "item 0: a message must be an object"),
    (CHAT, {"messages": [*HELLO, {"role": "usr", "content": "x"}]}, "messages", "item 1: role 'usr' is none of"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "must have a content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "string or a list"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages", "'type'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "must have a 'text'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages", "'text' must"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "takes no images"),
    (CHAT, {"n": 0}, "n", "whole number"),
    (CHAT, {"n": True}, "n", "whole number"),
    (CHAT, {"n": 1000}, "n", "from 1 to 128"),
    (CHAT, {"stop": 5}, "stop", "list of strings"),
    (CHAT, {"stop": [5]}, "stop", "list of strings"),
    (CHAT, {"temperature": "hot"}, "temperature", "number"),
    (CHAT, {"temperature": -1}, "temperature", "0 or more"),
    (CHAT, {"top_p": 1.5}, "top_p", "from 0 to 1"),
    (CHAT, {"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
    (CHAT, {"logprobs": 3}, "logprobs", "true or false"),
    (CHAT, {"stream": "yes"}, "stream", "true or false"),
    (CHAT, {"stream_options": True}, "stream_options", "object"),
    (CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    (CHAT, {"tools": {}}, "tools", "list"),
    (CHAT, {"tools": [1]}, "tools", "a tool must be"),
    (CHAT, {"tool_choice": 1}, "tool_choice", "string or an object"),
    (CHAT, {"response_format": "json"}, "response_format", "object"),
    (CHAT, {"response_format": {}}, "response_format", "'type'"),
    (CHAT, {"logit_bias": {"hello": 1}}, "logit_bias", "token ids"),
    (CHAT, {"logit_bias": {"5": "much"}}, "logit_bias", "number"),
    (CHAT, {"lora": ""}, "lora", "LoRA"),
    (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens", "whole number"),
    (COMPLETIONS, {"prompt": None}, "prompt", "missing"),
    (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "item 1: the prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt", "mixture"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt", "whole numbers"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt", "item 1: the prompt is empty"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt", "not an object"),
    (COMPLETIONS, {"logprobs": True}, "logprobs", "whole number"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "0 or more"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_faulty_request_is_told_which_field_is_wrong_and_the_engine_is_spared(
    served: Start, stream: bool
) -> None:
    async with served() as s:
        for path, wrong, param, says in WRONG:
            body = {"model": "chat", "messages": HELLO, "prompt": "a", "stream": stream, **wrong}
            answer = await s.http.post(path, json=body)
            assert answer.status_code == 400, (wrong, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, wrong
            assert says in error["message"], wrong
            assert error["type"] == "invalid_request_error"
        assert FaultPoints.of("chat").hits("load") == 0


async def test_a_text_over_its_limit_and_too_many_prompts_are_refused(served: Start) -> None:
    async with served(max_item_bytes=100, max_items=3) as s:
        assert (await chat(s, messages=[{"role": "user", "content": "ä" * 51}])).status_code == 413
        assert (await complete(s, prompt=["a", "b" * 101])).status_code == 413
        assert (await complete(s, prompt=[5] * 26)).status_code == 413
        assert (await native(s, prompt="b" * 101)).status_code == 413
        assert (await complete(s, prompt=["a"] * 4)).status_code == 400
        assert (await chat(s, messages=[{"role": "user", "content": "ä" * 50}] * 5)).status_code == 200


async def test_what_no_engine_could_be_handed_is_refused(served: Start) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    msgpack = {"content-type": "application/msgpack"}
    async with served() as s:
        assert "deep" in (await chat(s, tools=[{"deep": deep}])).json()["error"]["message"]
        for odd in (b"bytes", float("nan"), {5: "x"}):
            body = msgspec.msgpack.encode({"model": "chat", "messages": HELLO, "odd": odd})
            assert (await s.http.post(CHAT, content=body, headers=msgpack)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_who_can_not_generate_is_never_asked_and_who_can_not_embed_neither(served: Start, stream: bool) -> None:
    async with served() as s:
        for model in ("embedder", "mini"):
            for answer in (await chat(s, model=model, stream=stream), await complete(s, model=model, stream=stream)):
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert (error["param"], error["supported"]) == ("model", ["encode"])
            answer = await native(s, model, stream=stream)
            assert answer.json()["detail"]["supported"] == ["encode"]
            assert FaultPoints.of(model).hits("load") == 0
        answer = await s.embed(model="talks-only")
        assert answer.status_code == 400
        assert answer.json()["error"]["supported"] == ["generate"]
        assert (await s.encode("talks-only")).status_code == 400
        assert FaultPoints.of("talks-only").hits("load") == 0


async def test_a_model_that_is_not_there_has_a_suggestion_and_keys_are_asked_for(served: Start) -> None:
    async with served() as s:
        missing = await chat(s, model="chatt", stream=True)
        assert missing.status_code == 404
        assert "chat" in missing.json()["error"]["suggestions"]
    async with served(api_keys=(key_line("inference", "k"),)) as s:
        for path in (CHAT, COMPLETIONS, GENERATE):
            assert (await s.http.post(path, json={})).status_code == 401


async def test_answers_are_in_the_metrics(served: Start) -> None:
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(telemetry=telemetry) as s:
        await chat(s)
        events(await chat(s, stream=True))
        FaultPoints.of("chat").fail("piece", InferenceError("out of ideas"), after=1)
        events(await chat(s, stream=True))
        told = (await s.http.get("/metrics")).text
    for series, value in (
        ('sie_worker_model_requests_total{model="chat",outcome="ok"}', 2),
        ('sie_worker_model_requests_total{model="chat",outcome="INFERENCE_ERROR"}', 1),
        ('sie_worker_model_generated_tokens_total{model="chat"}', 6),
        ('sie_worker_model_time_to_first_token_seconds_count{model="chat"}', 1),
    ):
        assert f"{series} {value}.0\n" in told


# --- errors before and after the first piece ---------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_an_error_before_the_first_piece_has_its_status(served: Start, path: str) -> None:
    async with served() as s:
        FaultPoints.of("chat").fail("piece", InferenceError("out of ideas"))
        body = {"model": "chat", "messages": HELLO, "prompt": "a", "stream": True}
        if path == GENERATE:
            body = {"prompt": "a", "stream": True}
        answer = await s.http.post(path, json=body)
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/json"
        assert "out of ideas" in answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_an_error_half_way_ends_the_stream_without_the_mark_of_a_complete_one(served: Start, path: str) -> None:
    async with served() as s:
        FaultPoints.of("chat").fail("piece", InferenceError("out of ideas"), after=2)
        body = {"model": "chat", "messages": HELLO, "prompt": "a b c", "stream": True}
        if path == GENERATE:
            body = {"prompt": "a b c", "stream": True}
        told = events(await s.http.post(path, json=body))
        assert len(told) == 3
        error = told[-1]["error"]
        assert (error["code"], error["type"]) == ("INFERENCE_ERROR", "server_error")
        assert "out of ideas" in error["message"]
        assert "[DONE]" not in told
        assert not any(piece.get("done") for piece in told)
        assert s.service.model("chat").leases == 0


async def test_a_fault_of_the_engines_own_is_logged_and_the_client_learns_its_kind(served: Start, caplog: Any) -> None:
    async with served() as s:
        FaultPoints.of("chat").fail("piece", ValueError("tensor 7 is odd"), after=1)
        told = events(await chat(s, stream=True))
        assert told[-1]["error"]["code"] == "INFERENCE_ERROR"
        assert "tensor 7 is odd" in caplog.text
