"""LlamaIndex's OpenAI-like classes and its rerankers, as their users call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank

QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]


@pytest.fixture
def embedding(house: Any) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name="minilm", api_base=f"{house.url}/v1", api_key="unused", max_retries=0)


def language_model(house: Any, **more: Any) -> OpenAILike:
    return OpenAILike(model="chat", api_base=f"{house.url}/v1", api_key="unused", max_retries=0, **more)


def reranker(house: Any, kind: str, model: str) -> Any:
    if kind == "cohere":
        return CohereRerank(model=model, api_key="unused", base_url=house.url, top_n=2)
    return JinaRerank(model=model, api_key="unused", base_url=f"{house.url}/v1", top_n=2)


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]


def test_vectors_are_the_servers_own(embedding: OpenAILikeEmbedding, dense: Callable[..., Any]) -> None:
    texts = [f"{text} {number}" for number in range(5) for text in TEXTS]
    expected = dense("minilm", texts)
    np.testing.assert_allclose(embedding.get_text_embedding_batch(texts), expected, atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding(texts[1]), expected[1], atol=1e-6)
    np.testing.assert_allclose(asyncio.run(embedding.aget_text_embedding(texts[1])), expected[1], atol=1e-6)


def test_an_index_finds_what_is_meant_and_a_model_answers(house: Any, embedding: OpenAILikeEmbedding) -> None:
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=embedding)
    found = index.as_retriever(similarity_top_k=1).retrieve(QUERY)
    assert [one.node.get_content() for one in found] == [TEXTS[1]]
    answer = index.as_query_engine(llm=language_model(house, is_chat_model=True), similarity_top_k=1).query(
        "rug the on"
    )
    assert "carpet. the on asleep is cat A" in str(answer)  # it reverses its prompt, which has the text in it


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_a_completion_whole_and_piece_by_piece(house: Any, is_chat_model: bool) -> None:
    model = language_model(house, is_chat_model=is_chat_model)
    assert model.complete("a b naïve").text == "naïve b a"
    assert "".join(piece.delta or "" for piece in model.stream_complete("a b naïve")) == "naïve b a"
    assert asyncio.run(model.acomplete("a b")).text == "b a"


def test_a_conversation_whole_and_piece_by_piece(house: Any) -> None:
    model = language_model(house, is_chat_model=True)
    messages = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="a b")]
    assert model.chat(messages).message.content == "b a"
    assert "".join(piece.delta or "" for piece in model.stream_chat(messages)) == "b a"

    async def pieces() -> str:
        return "".join([piece.delta or "" async for piece in await model.astream_chat(messages)])

    assert asyncio.run(pieces()) == "b a"


def test_errors_are_those_of_the_openai_package(house: Any, embedding: OpenAILikeEmbedding) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens and the model takes"):
        embedding.get_text_embedding("word " * 1000)
    with pytest.raises(openai.NotFoundError, match="chat"):
        OpenAILike(model="chatt", api_base=f"{house.url}/v1", api_key="unused", is_chat_model=True).complete("a")


@pytest.mark.parametrize("kind", ["cohere", "jina"])
@pytest.mark.parametrize("model", ["splade", "org/colbert", "cross-encoder"])
def test_nodes_are_reranked(house: Any, ranked: Callable[..., Any], kind: str, model: str) -> None:
    found = reranker(house, kind, model).postprocess_nodes(nodes(), QueryBundle(QUERY))
    expected = [(TEXTS[place], score) for place, score in ranked(model, QUERY, TEXTS)[:2]]
    assert [(one.node.get_content(), one.score) for one in found] == expected


@pytest.mark.parametrize("kind", ["cohere", "jina"])
def test_a_reranker_says_what_is_wrong(house: Any, kind: str) -> None:
    with pytest.raises(Exception, match="does not score; it can encode"):
        reranker(house, kind, "minilm").postprocess_nodes(nodes(), QueryBundle(QUERY))


def test_what_text_embeddings_inference_sends_names_no_model(house: Any) -> None:
    """Why its reranker is of no use here."""
    answer = httpx.post(f"{house.url}/rerank", json={"query": QUERY, "texts": TEXTS})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
