"""The openai package against a server with fake engines: what is tested is the wire, bit by bit, and its retries."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from sie_testing import expected_vector

CONFIG = """
models:
  - {name: mini, adapter: fake, options: {matryoshka: [4]}}
  - {name: org/wide, adapter: fake, options: {dims: 384, salt: w}}
  - {name: busy, adapter: fake, queue: 1, options: {run_s: 0.7}}
  - {name: gone, adapter: fake, options: {fail_load: ModelSourceNotFound}}
"""


class Counting(httpx.BaseTransport):
    """Remembers what was answered."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.statuses: list[int] = []
        self.lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.inner.handle_request(request)
        with self.lock:
            self.statuses.append(response.status_code)
        return response

    def close(self) -> None:
        self.inner.close()


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    return start_server(CONFIG)


@pytest.fixture
def wire() -> Counting:
    return Counting()


@pytest.fixture
def client(server: Any, wire: Counting) -> Iterator[openai.OpenAI]:
    http = httpx.Client(transport=wire)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=http) as client:
        yield client


def test_the_default_call_is_bit_equal(client: openai.OpenAI) -> None:
    texts = [f"text number {number}" for number in range(100)]
    answer = client.embeddings.create(model="org/wide", input=texts)
    for text, row in zip(texts, answer.data, strict=True):
        assert np.array(row.embedding, np.float32).tobytes() == expected_vector(text, 384, salt="w").tobytes()


def test_base64_and_floats_by_name_are_bit_equal_too(client: openai.OpenAI) -> None:
    expected = expected_vector("hello", 384, salt="w").tobytes()
    packed = client.embeddings.create(model="org/wide", input="hello", encoding_format="base64").data[0].embedding
    floats = client.embeddings.create(model="org/wide", input="hello", encoding_format="float").data[0].embedding
    assert isinstance(packed, str)
    assert base64.b64decode(packed) == expected
    assert np.array(floats, np.float32).tobytes() == expected


def test_fewer_dimensions_where_the_model_allows_them(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="mini", input="hello", dimensions=4).data[0].embedding) == 4
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="mini", input="hello", dimensions=5)


def test_token_lists(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="mini", input=[[1, 2, 3], [4]])
    assert [row.index for row in answer.data] == [0, 1]
    assert answer.usage.total_tokens == 4


def test_a_model_with_a_slash_in_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("org/wide").id == "org/wide"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/narrow")


def test_a_full_queue_is_a_429_that_the_client_waits_out(client: openai.OpenAI, wire: Counting) -> None:
    client.embeddings.create(model="busy", input="warm up")
    impatient = client.with_options(max_retries=0)

    def ask(which: openai.OpenAI) -> str:
        try:
            which.embeddings.create(model="busy", input="hello")
        except openai.RateLimitError as error:
            assert error.code == "QUEUE_FULL"
            assert 1 <= int(error.response.headers["retry-after"]) <= 120
            return "full"
        return "ok"

    with ThreadPoolExecutor(6) as pool:
        first = list(pool.map(ask, [impatient] * 6))
        assert {"ok", "full"} == set(first)
        patient = list(pool.map(ask, [client.with_options(max_retries=5)] * 4))
    assert patient == ["ok"] * 4


@pytest.mark.parametrize(
    ("model", "input", "error", "status"),
    [
        ("none", "hello", openai.NotFoundError, 404),
        ("mini", "", openai.BadRequestError, 400),
        ("mini", "word " * 1000, openai.BadRequestError, 400),
        ("gone", "hello", openai.InternalServerError, 502),
    ],
)
def test_what_can_not_succeed_is_asked_once(
    client: openai.OpenAI, wire: Counting, model: str, input: str, error: type[openai.APIStatusError], status: int
) -> None:
    began = time.monotonic()
    with pytest.raises(error) as caught:
        client.embeddings.create(model=model, input=input)
    assert wire.statuses == [status]
    assert time.monotonic() - began < 5
    assert caught.value.code
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]
