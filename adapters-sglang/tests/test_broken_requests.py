"""Requests that would end an engine are refused before they reach it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sie_core import BatchRequest, GenerateRequest, InvalidInput, Item, Task

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"prompt": "hello", "max_tokens": 3}
HUGE = 10**18
DEADLY: list[tuple[str, dict[str, Any]]] = [
    ("top_logprobs", CHAT | {"logprobs": True, "top_logprobs": 300}),
    ("logprobs", TEXT | {"logprobs": 10**6}),
    ("top_k", CHAT | {"top_k": HUGE}),
    ("top_k", TEXT | {"top_k": 2**31}),
    ("min_tokens", {"messages": CHAT["messages"], "min_tokens": HUGE}),
    ("min_tokens", {"messages": CHAT["messages"], "min_tokens": str(HUGE)}),
    ("stop_token_ids", CHAT | {"stop_token_ids": [-5], "min_tokens": 2}),
    ("stop_token_ids", TEXT | {"stop_token_ids": [999_999], "min_tokens": 2}),
    ("stop_token_ids", TEXT | {"stop_token_ids": ["999999"], "min_tokens": 2}),
    ("input_ids", CHAT | {"input_ids": [50_000_000]}),
    ("input_ids", CHAT | {"input_ids": ["50000000"]}),
    ("prompt", TEXT | {"prompt": [50_000_000]}),
    ("prompt", TEXT | {"prompt": [[1], [300]]}),
    ("chat_template_kwargs", CHAT | {"chat_template_kwargs": {"chat_template": "{{ 1 / 0 }}"}}),
    ("chat_template_kwargs", CHAT | {"chat_template_kwargs": {"tokenize": False}}),
]


def request_of(body: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest("chat" if "messages" in body else "completion", body)


def names(folder: Any, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


@pytest.mark.parametrize("inner", [False, True])
async def test_what_would_end_the_engine_never_gets_there(home: Any, start: Any, helpers: Any, inner: bool) -> None:
    names(home.model_folder, vocab_size=257)
    if inner:
        file = home.model_folder / "config.json"
        file.write_text(json.dumps({"text_config": json.loads(file.read_text())}))
    engine = start(home.model())
    for param, body in DEADLY:
        with pytest.raises(InvalidInput) as caught:
            await engine.generate(request_of(body))
        assert caught.value.param == param
        with pytest.raises(InvalidInput):
            await anext(engine.stream(request_of(body)))
    assert helpers.told(engine)["requests"] == 0


async def test_what_is_at_the_edge_gets_there(home: Any, start: Any) -> None:
    names(home.model_folder, vocab_size=257)
    engine = start(home.model())
    for body in (
        CHAT | {"logprobs": True, "top_logprobs": 20, "top_k": 2**31 - 1, "min_tokens": 2},
        TEXT | {"stop_token_ids": [0, 256], "min_tokens": 2, "logprobs": 0, "top_k": -1},
        TEXT | {"prompt": [[0], [256]]},
        TEXT | {"prompt": ["a", "b"]},
        CHAT | {"chat_template_kwargs": {"enable_thinking": False}, "stop_token_ids": []},
    ):
        assert (await engine.generate(request_of(body)))["choices"]


async def test_a_vocabulary_that_no_config_names_is_as_large_as_its_embedding(home: Any, start: Any) -> None:
    file = home.model_folder / "model.safetensors"
    content = file.read_bytes().replace(b'{"w":', b'{"x.embed_tokens.weight":', 1)[8:]
    head, _, _ = content.partition(b"}}")
    file.write_bytes((len(head) + 2).to_bytes(8, "little") + content)
    engine = start(home.model())
    assert await engine.generate(request_of(TEXT | {"prompt": [7]}))
    with pytest.raises(InvalidInput, match="token id 8 is none of the model's 8"):
        await engine.generate(request_of(TEXT | {"prompt": [8]}))


async def test_a_vocabulary_that_nobody_knows_allows_no_penalties_for_its_ids(home: Any, start: Any) -> None:
    engine = start(home.model())
    assert await engine.generate(request_of(TEXT | {"stop_token_ids": [300]}))
    with pytest.raises(InvalidInput):
        await engine.generate(request_of(TEXT | {"stop_token_ids": [300], "min_tokens": 1}))


async def test_ids_that_an_embedding_model_has_not(home: Any, start: Any, helpers: Any) -> None:
    names(home.model_folder, vocab_size=257)
    engine = start(home.model("sglang-embedding"))
    with pytest.raises(InvalidInput) as caught:
        await engine.encode(BatchRequest(Task.ENCODE, (Item(text="a"), Item(token_ids=(1, 257)))))
    assert caught.value.index == 1
    assert helpers.told(engine)["requests"] == 0


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_the_real_one_survives_them(engine: Any) -> None:
    for _, body in DEADLY:
        with pytest.raises(InvalidInput):
            await engine.generate(request_of(body))
    edge = {"logprobs": True, "top_logprobs": 20, "top_k": 2**31 - 1, "stop_token_ids": [0, 256], "min_tokens": 2}
    assert (await engine.generate(request_of(CHAT | edge)))["choices"]
    assert (await engine.generate(request_of(TEXT | {"prompt": [256], "logprobs": 20})))["choices"]
