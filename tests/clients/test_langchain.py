"""LangChain's OpenAI and Cohere classes, as their users call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import cohere
import numpy as np
import pytest
import tiktoken
import tiktoken.registry
from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]


@pytest.fixture
def embeddings(house: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model="minilm", base_url=f"{house.url}/v1", api_key="unused", check_embedding_ctx_length=False
    )


@pytest.fixture
def chat(house: Any) -> ChatOpenAI:
    return ChatOpenAI(model="chat", base_url=f"{house.url}/v1", api_key="unused", max_retries=0)


def test_vectors_are_the_servers_own(embeddings: OpenAIEmbeddings, dense: Callable[..., Any]) -> None:
    expected = dense("minilm", TEXTS)
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), expected[1], atol=1e-6)
    np.testing.assert_allclose(asyncio.run(embeddings.aembed_documents(TEXTS)), expected, atol=1e-6)


def test_with_the_default_settings_vectors_are_silently_wrong(
    house: Any, dense: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the documentation says ``check_embedding_ctx_length=False``: text becomes ids of OpenAI's vocabulary, which
    mean other words to the model. The vocabulary, which LangChain would download, is one of single bytes here."""
    ranks = {bytes([value]): value for value in range(256)}
    letters = tiktoken.Encoding("cl100k_base", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", letters)
    trapped = OpenAIEmbeddings(model="minilm", base_url=f"{house.url}/v1", api_key="unused")
    vector = trapped.embed_query(TEXTS[1])
    assert float(np.dot(vector, dense("minilm", [TEXTS[1]])[0])) < 0.5


def test_a_vector_store_finds_what_is_meant(embeddings: OpenAIEmbeddings) -> None:
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    assert [found.page_content for found in store.similarity_search(QUERY, k=1)] == [TEXTS[1]]


def test_a_conversation_whole_and_piece_by_piece(chat: ChatOpenAI) -> None:
    answer = chat.invoke([("system", "be brief"), ("user", "a b naïve")])
    assert answer.content == "naïve b a"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == 6
    assert "".join(str(piece.content) for piece in chat.stream("a b naïve")) == "naïve b a"

    async def pieces() -> str:
        return "".join([str(piece.content) async for piece in chat.astream("a b naïve")])

    assert asyncio.run(pieces()) == "naïve b a"


def test_a_stream_says_what_was_used(house: Any) -> None:
    chat = ChatOpenAI(model="chat", base_url=f"{house.url}/v1", api_key="unused", stream_usage=True)
    used = [piece.usage_metadata for piece in chat.stream("a b") if piece.usage_metadata]
    assert [one["total_tokens"] for one in used] == [4]


def test_a_tool_is_called(chat: ChatOpenAI) -> None:
    look = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}
    calls = chat.bind_tools([look], tool_choice="required").invoke("a b").tool_calls
    assert [call["name"] for call in calls] == ["look"]


def test_a_completion(house: Any) -> None:
    assert OpenAI(model="chat", base_url=f"{house.url}/v1", api_key="unused").invoke("a b").strip() == "b a"


def test_errors_are_those_of_the_openai_package(embeddings: OpenAIEmbeddings, house: Any) -> None:
    with pytest.raises(Exception, match="the text is empty") as caught:
        embeddings.embed_documents(["fine", ""])
    assert getattr(caught.value, "status_code", None) == 400
    with pytest.raises(Exception, match="does not generate"):
        ChatOpenAI(model="minilm", base_url=f"{house.url}/v1", api_key="unused").invoke("a")


@pytest.mark.parametrize("model", ["splade", "org/colbert", "cross-encoder"])
def test_documents_are_reranked(house: Any, ranked: Callable[..., Any], model: str) -> None:
    ranker = CohereRerank(model=model, base_url=house.url, cohere_api_key="unused", top_n=2)
    found = ranker.compress_documents([Document(text, metadata={"n": n}) for n, text in enumerate(TEXTS)], QUERY)
    expected = ranked(model, QUERY, TEXTS)[:2]
    assert [(one.metadata["n"], one.metadata["relevance_score"]) for one in found] == expected


def test_cohere_embeddings(house: Any, dense: Callable[..., Any]) -> None:
    embeddings = CohereEmbeddings(model="minilm", base_url=house.url, cohere_api_key="unused")
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), dense("minilm", TEXTS), atol=1e-6)
    queries = dense("minilm", [QUERY], is_query=True)
    np.testing.assert_allclose(embeddings.embed_query(QUERY), queries[0], atol=1e-6)


def test_a_model_that_does_not_rank_is_an_error(house: Any) -> None:
    ranker = CohereRerank(model="minilm", base_url=house.url, cohere_api_key="unused")
    with pytest.raises(cohere.BadRequestError, match="does not score"):
        ranker.compress_documents([Document("a")], "b")


def test_the_responses_api_is_not_there(house: Any) -> None:
    chat = ChatOpenAI(model="chat", base_url=f"{house.url}/v1", api_key="unused", use_responses_api=True)
    with pytest.raises(Exception, match="404"):
        chat.invoke("a")
