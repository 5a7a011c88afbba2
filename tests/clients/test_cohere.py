"""Cohere's package in both versions of its API, and what Jina's clients send: rerank and embed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any

import cohere
import httpx
import numpy as np
import pytest

QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]
RANKERS = ["splade", "org/colbert", "cross-encoder"]
GIF = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="


@pytest.fixture
def client(house: Any) -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(base_url=house.url, api_key="unused") as client:
        yield client


@pytest.fixture
def first(house: Any) -> Iterator[cohere.Client]:
    with cohere.Client(base_url=house.url, api_key="unused") as client:
        yield client


# --- rerank ---


@pytest.mark.parametrize("model", RANKERS)
def test_rerank(client: cohere.ClientV2, ranked: Callable[..., Any], model: str) -> None:
    answer = client.rerank(model=model, query=QUERY, documents=TEXTS, top_n=2)
    assert [(one.index, one.relevance_score) for one in answer.results] == ranked(model, QUERY, TEXTS)[:2]
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1


@pytest.mark.parametrize("model", RANKERS)
def test_rerank_in_the_first_version_gives_documents_back(
    first: cohere.Client, ranked: Callable[..., Any], model: str
) -> None:
    answer = first.rerank(model=model, query=QUERY, documents=TEXTS, return_documents=True)
    assert [(one.index, one.relevance_score) for one in answer.results] == ranked(model, QUERY, TEXTS)
    assert all(one.document is not None and one.document.text == TEXTS[one.index] for one in answer.results)


def test_rerank_from_the_asynchronous_client(house: Any) -> None:
    async def best() -> list[int]:
        async with cohere.AsyncClientV2(base_url=house.url, api_key="unused") as client:
            asked = (client.rerank(model="splade", query=QUERY, documents=TEXTS, top_n=1) for _ in range(20))
            return [answer.results[0].index for answer in await asyncio.gather(*asked)]

    assert asyncio.run(best()) == [1] * 20


def test_long_documents_are_cut_for_who_says_how_long_they_may_be(client: cohere.ClientV2) -> None:
    long = "word " * 1000
    with pytest.raises(cohere.BadRequestError, match="tokens and the model takes"):
        client.rerank(model="splade", query="word", documents=[long])
    assert client.rerank(model="splade", query="word", documents=[long], max_tokens_per_doc=4096).results


# --- embed ---


def test_every_embedding_type(client: cohere.ClientV2, native: Callable[..., Any], dense: Callable[..., Any]) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = client.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=types)
    vectors = answer.embeddings
    np.testing.assert_allclose(vectors.float_, dense("minilm", TEXTS), atol=1e-6)
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert getattr(vectors, name) == dense("minilm", TEXTS, output_dtype=name)
    assert vectors.base64 is not None
    unpacked = np.frombuffer(base64.b64decode(vectors.base64[1]), "<f4")
    np.testing.assert_allclose(unpacked, vectors.float_[1], atol=1e-7)


def test_queries_images_and_fewer_dimensions(client: cohere.ClientV2, dense: Callable[..., Any]) -> None:
    asked: dict[str, Any] = {"model": "everything", "embedding_types": ["float"]}
    query = client.embed(**asked, texts=["hello"], input_type="search_query").embeddings.float_
    np.testing.assert_allclose(query, dense("everything", ["hello"], is_query=True), atol=1e-6)
    assert query != client.embed(**asked, texts=["hello"], input_type="search_document").embeddings.float_
    image = client.embed(**asked, images=[GIF], input_type="image", output_dimension=4).embeddings.float_
    parts = [{"type": "image_url", "image_url": {"url": GIF}}]
    mixed = client.embed(**asked, inputs=[{"content": parts}], input_type="image", output_dimension=4)
    assert mixed.embeddings.float_ == image
    assert len(image[0]) == 4


def test_embed_in_the_first_version(first: cohere.Client, dense: Callable[..., Any]) -> None:
    texts = [f"{text} {number}" for number in range(40) for text in TEXTS]  # more than it sends at a time
    bare = first.embed(model="minilm", texts=texts, input_type="search_document")
    np.testing.assert_allclose(bare.embeddings, dense("minilm", texts), atol=1e-6)
    typed = first.embed(model="minilm", texts=TEXTS, input_type="search_document", embedding_types=["int8"])
    assert typed.embeddings.int8 == dense("minilm", TEXTS, output_dtype="int8")


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"model": "spladee"}, cohere.NotFoundError, "splade"),
        ({"model": "minilm"}, cohere.BadRequestError, "does not score; it can encode"),
        ({"documents": ["fine", ""]}, cohere.BadRequestError, "item 1"),
        ({"documents": []}, cohere.BadRequestError, "documents"),
    ],
)
def test_errors_have_their_class(
    client: cohere.ClientV2, first: cohere.Client, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    body = {"model": "splade", "query": QUERY, "documents": TEXTS, **asked}
    for which in (client, first):
        with pytest.raises(error) as caught:
            which.rerank(**body)
        assert message in str(caught.value.body["message"])


def test_what_is_not_there_is_a_404(client: cohere.ClientV2, first: cohere.Client) -> None:
    with pytest.raises(cohere.NotFoundError):
        client.chat(model="chat", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(cohere.NotFoundError):
        first.tokenize(model="minilm", text="hello")


# --- Jina ---


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
@pytest.mark.parametrize("model", RANKERS)
def test_rerank_as_jina_has_it(house: Any, ranked: Callable[..., Any], path: str, model: str) -> None:
    body = {"model": model, "query": QUERY, "documents": [{"text": text} for text in TEXTS], "top_n": 2}
    answer = httpx.post(f"{house.url}{path}", json={**body, "return_documents": True}).json()
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == ranked(model, QUERY, TEXTS)[:2]
    assert all(one["document"] == {"text": TEXTS[one["index"]]} for one in answer["results"])
    assert answer["model"] == model
    assert answer["usage"]["total_tokens"] > 20
    bare = httpx.post(f"{house.url}{path}", json=body).json()
    assert all("document" not in one for one in bare["results"])


def test_errors_are_where_jinas_clients_look(house: Any) -> None:
    answer = httpx.post(f"{house.url}/v1/rerank", json={"model": "minilm", "query": QUERY, "documents": TEXTS})
    assert answer.status_code == 400
    assert answer.json()["detail"] == "model 'minilm' does not score; it can encode"
