"""sie-sdk, as its users call it, against a server with a fake engine: what is tested is the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sie_sdk import RequestError, SIEAsyncClient, SIEClient
from sie_testing import expected_vector

CONFIG = """
models:
  - {name: fake, adapter: fake, options: {dims: 16}}
  - {name: org/fake-large, adapter: fake, options: {dims: 32}}
  - {name: org/chat, adapter: fake-stream, lora: {pirate: "path:/loras/pirate"}, options: {max_loras: 1}}
"""
NAMES = {"fake", "org/fake-large", "org/chat"}


@pytest.fixture(scope="module")
def client(start_server: Callable[..., Any]) -> Iterator[SIEClient]:
    server = start_server(CONFIG)
    for model in NAMES:
        server.load(model)
    with SIEClient(server.url, timeout_s=30) as client:
        yield client


def test_one_item_gives_one_vector_as_an_array(client: SIEClient) -> None:
    answer = client.encode("fake", {"text": "Hello"})
    dense = answer["dense"]
    assert isinstance(dense, np.ndarray)
    assert dense.dtype == np.float32
    np.testing.assert_allclose(dense, expected_vector("Hello", 16), atol=1e-6)


def test_many_items_keep_their_order_and_their_ids(client: SIEClient) -> None:
    texts = [f"text number {number}" for number in range(70)]
    answers = client.encode("fake", [{"id": str(place), "text": text} for place, text in enumerate(texts)])
    assert [answer["id"] for answer in answers] == [str(place) for place in range(len(texts))]
    for text, answer in zip(texts, answers, strict=True):
        np.testing.assert_allclose(answer["dense"], expected_vector(text, 16), atol=1e-6)


def test_a_model_with_a_slash_in_its_name(client: SIEClient) -> None:
    assert client.encode("org/fake-large", {"text": "Hello"})["dense"].shape == (32,)


def test_models_are_listed_with_what_they_can_do(client: SIEClient) -> None:
    listed = {model["name"]: model for model in client.list_models()}
    assert set(listed) == NAMES
    assert listed["fake"]["loaded"]
    assert listed["fake"]["dims"]["dense"] == 16
    assert client.get_model("org/fake-large")["name"] == "org/fake-large"


def test_a_model_that_is_not_there_is_an_error_not_a_wait(client: SIEClient) -> None:
    with pytest.raises(RequestError) as caught:
        client.encode("nobody", {"text": "Hello"})
    assert caught.value.status_code == 404


def test_watching_starts_with_a_whole_snapshot(client: SIEClient) -> None:
    snapshot = next(iter(client.watch(mode="worker")))
    assert {model["name"] for model in snapshot["models"]} == NAMES


# --- generation ---


def test_a_prompt_is_gone_on_from(client: SIEClient) -> None:
    answer = client.generate("org/chat", "a b naïve", max_new_tokens=2, temperature=0.1, top_p=0.9, seed=7, stop=["x"])
    assert answer["model"] == "org/chat"
    assert answer["text"] == "naïve b"
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert answer["ttft_ms"] is not None


def test_a_prompt_is_gone_on_from_piece_by_piece(client: SIEClient) -> None:
    pieces = list(client.stream_generate("org/chat", "a b naïve", max_new_tokens=50, logprobs=True))
    assert "".join(piece["text_delta"] for piece in pieces) == "naïve b a"
    assert [piece["seq"] for piece in pieces] == list(range(len(pieces)))
    assert pieces[0]["logprobs"][0]["token"] == "naïve"
    assert [piece["done"] for piece in pieces[-2:]] == [False, True]
    assert pieces[-1]["usage"]["total_tokens"] == 6
    assert pieces[-1]["finish_reason"] == "stop"


async def test_the_asynchronous_client_generates_too(client: SIEClient) -> None:
    async with SIEAsyncClient(client.base_url, timeout_s=30) as other:
        assert (await other.generate("org/chat", "a b", max_new_tokens=9))["text"] == "b a"
        pieces = [piece async for piece in other.stream_generate("org/chat", "a b", max_new_tokens=9)]
        assert "".join(piece["text_delta"] for piece in pieces) == "b a"


def test_a_grammar_and_options_and_an_adapter(client: SIEClient) -> None:
    answer = client.generate(
        "org/chat",
        "a b",
        max_new_tokens=9,
        grammar={"json_schema": {"type": "object"}, "label": "thing", "strict": True},
        options={"temperature": 0.5},
        lora_adapter="pirate",
        prompt_cache_key="k",
    )
    assert answer["text"] == "[pirate] b a"


def test_chat_through_the_sdk(client: SIEClient) -> None:
    messages = [{"role": "user", "content": "a b"}]
    answer = client.chat_completions("org/chat", messages)
    assert answer["choices"][0]["message"]["content"] == "b a"
    pieces = list(client.stream_chat_completions("org/chat", messages))
    assert "".join(choice["delta"].get("content", "") for piece in pieces for choice in piece["choices"]) == "b a"


def test_what_a_model_can_not_do_is_an_error_not_a_wait(client: SIEClient) -> None:
    with pytest.raises(RequestError, match="does not generate"):
        client.generate("fake", "a", max_new_tokens=1)
    with pytest.raises(RequestError, match="does not generate"):
        list(client.stream_generate("fake", "a", max_new_tokens=1))
    with pytest.raises(RequestError, match="images"):
        client.generate("org/chat", "a", max_new_tokens=1, images=[Image.new("RGB", (2, 2))])
