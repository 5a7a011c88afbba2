"""Haystack's OpenAI components, and those of its Cohere and Jina integrations, as their users call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
from haystack import Document, Pipeline
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import Tool
from haystack.utils import Secret
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.embedders.jina import JinaDocumentEmbedder, JinaTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker
from haystack_integrations.components.rankers.jina import JinaRanker

KEY = Secret.from_token("unused")
QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]


def documents() -> list[Document]:
    return [Document(content=text) for text in TEXTS]


def ranker(house: Any, kind: str, model: str) -> Any:
    if kind == "cohere":
        return CohereRanker(model=model, api_base_url=house.url, api_key=KEY, top_k=2)
    return JinaRanker(model=model, base_url=f"{house.url}/v1/rerank", api_key=KEY, top_k=2)


def embedders(house: Any, kind: str) -> tuple[Any, Any]:
    """For texts, and for documents."""
    if kind == "openai":
        there: dict[str, Any] = {"model": "minilm", "api_base_url": f"{house.url}/v1", "api_key": KEY}
        return OpenAITextEmbedder(**there), OpenAIDocumentEmbedder(**there, progress_bar=False)
    if kind == "cohere":
        there = {"model": "minilm", "api_base_url": house.url, "api_key": KEY}
        return CohereTextEmbedder(**there), CohereDocumentEmbedder(**there, progress_bar=False)
    there = {"model": "minilm", "base_url": f"{house.url}/v1/embeddings", "api_key": KEY}
    return JinaTextEmbedder(**there), JinaDocumentEmbedder(**there, progress_bar=False)


@pytest.mark.parametrize("kind", ["openai", "cohere", "jina"])
def test_vectors_are_the_servers_own(house: Any, dense: Callable[..., Any], kind: str) -> None:
    texts, whole = embedders(house, kind)
    expected = dense("minilm", TEXTS)
    np.testing.assert_allclose(texts.run(TEXTS[1])["embedding"], expected[1], atol=1e-6)
    embedded = whole.run(documents())["documents"]
    np.testing.assert_allclose([one.embedding for one in embedded], expected, atol=1e-6)


def test_a_pipeline_retrieves_and_reranks(house: Any) -> None:
    texts, whole = embedders(house, "openai")
    store = InMemoryDocumentStore()
    store.write_documents(whole.run(documents())["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", texts)
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
    pipeline.add_component("ranker", ranker(house, "cohere", "splade"))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    found = pipeline.run({"embedder": {"text": QUERY}, "ranker": {"query": QUERY}})["ranker"]["documents"]
    assert found[0].content == TEXTS[1]


def test_a_conversation_whole_and_piece_by_piece(house: Any) -> None:
    chat = OpenAIChatGenerator(model="chat", api_base_url=f"{house.url}/v1", api_key=KEY, max_retries=0)
    messages = [ChatMessage.from_system("be brief"), ChatMessage.from_user("a b naïve")]
    reply = chat.run(messages)["replies"][0]
    assert reply.text == "naïve b a"
    assert reply.meta["usage"]["completion_tokens"] == 3
    pieces: list[StreamingChunk] = []
    streamed = chat.run(messages, streaming_callback=pieces.append)["replies"][0]
    assert streamed.text == "".join(piece.content for piece in pieces) == "naïve b a"
    assert len(pieces) > 2
    assert asyncio.run(chat.run_async(messages))["replies"][0].text == "naïve b a"


def test_a_tool_is_called(house: Any) -> None:
    look = Tool(name="look", description="looks", parameters={"type": "object"}, function=lambda **_: None)
    chat = OpenAIChatGenerator(
        model="chat",
        api_base_url=f"{house.url}/v1",
        api_key=KEY,
        tools=[look],
        generation_kwargs={"tool_choice": "required"},
    )
    reply = chat.run([ChatMessage.from_user("a b")])["replies"][0]
    assert [call.tool_name for call in reply.tool_calls] == ["look"]


@pytest.mark.parametrize("kind", ["cohere", "jina"])
@pytest.mark.parametrize("model", ["splade", "org/colbert", "cross-encoder"])
def test_documents_are_ranked(house: Any, ranked: Callable[..., Any], kind: str, model: str) -> None:
    expected = [(TEXTS[place], score) for place, score in ranked(model, QUERY, TEXTS)[:2]]
    component = ranker(house, kind, model)
    found = component.run(query=QUERY, documents=documents())["documents"]
    assert [(one.content, one.score) for one in found] == expected
    found = asyncio.run(component.run_async(query=QUERY, documents=documents()))["documents"]
    assert [(one.content, one.score) for one in found] == expected


@pytest.mark.parametrize("kind", ["cohere", "jina"])
def test_a_ranker_says_what_is_wrong(house: Any, kind: str) -> None:
    with pytest.raises(Exception, match="does not score; it can encode"):
        ranker(house, kind, "minilm").run(query=QUERY, documents=documents())


def test_errors_are_those_of_the_openai_package(house: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens and the model takes"):
        embedders(house, "openai")[0].run("word " * 1000)
