"""The openai package, as its users call it, against a server with the real model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    running = start_server()
    running.load("minilm")
    return running


@pytest.fixture
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_the_default_call_returns_the_same_vector_as_floats(client: openai.OpenAI) -> None:
    # By default the package asks for base64 and decodes it; the floats are what the server sends as JSON numbers.
    packed = client.embeddings.create(model="minilm", input="A model that had been parked")
    plain = client.embeddings.create(model="minilm", input="A model that had been parked", encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)
    assert np.linalg.norm(packed.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert packed.usage.prompt_tokens > 5


def test_vectors_come_in_the_order_of_the_inputs_and_mean_something(client: openai.OpenAI) -> None:
    texts = ["A cat sits on the mat", "Interest rates rose again", "A kitten rests on a rug"]
    answer = client.embeddings.create(model="minilm", input=texts)
    assert [row.index for row in answer.data] == [0, 1, 2]
    cat, rates, kitten = (np.array(row.embedding) for row in answer.data)
    assert cat @ kitten > 0.5 > cat @ rates


def test_many_requests_at_once_from_the_asynchronous_client(server: Any, client: openai.OpenAI) -> None:
    texts = [f"sentence number {number} " * (number % 5 + 1) for number in range(40)]

    async def scene() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as many:
            asked = (many.embeddings.create(model="minilm", input=text) for text in texts)
            return [answer.data[0].embedding for answer in await asyncio.gather(*asked)]

    together = [row.embedding for row in client.embeddings.create(model="minilm", input=texts).data]
    np.testing.assert_allclose(asyncio.run(scene()), together, atol=1e-5)


def test_fields_that_openai_does_not_have_go_into_the_extra_body(client: openai.OpenAI) -> None:
    long = "word " * 1000
    with pytest.raises(openai.BadRequestError, match="1002 tokens"):
        client.embeddings.create(model="minilm", input=long)
    cut = client.embeddings.create(model="minilm", input=long, extra_body={"truncate": True})
    assert cut.usage.prompt_tokens == 256


def test_the_models_can_be_listed_and_fetched(client: openai.OpenAI) -> None:
    assert "minilm" in {model.id for model in client.models.list()}
    assert client.models.retrieve("minilm").id == "minilm"


def test_a_misspelt_model_is_a_404_with_a_suggestion(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="minilm"):
        client.embeddings.create(model="minilmm", input="Hello")


@pytest.mark.parametrize("nothing", [[], "", [""]])
def test_empty_input_is_refused_and_the_server_lives(client: openai.OpenAI, nothing: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="minilm", input=nothing)
    assert client.embeddings.create(model="minilm", input="still here").data


def test_a_refusal_is_not_retried(server: Any) -> None:
    attempts = []
    transport = httpx.HTTPTransport()

    class Counting(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            attempts.append(request.url.path)
            return transport.handle_request(request)

        def close(self) -> None:
            transport.close()

    http = httpx.Client(transport=Counting())
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=2, http_client=http) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.embeddings.create(model="no-such-model", input="Hello")
    assert len(attempts) == 1
