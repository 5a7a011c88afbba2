"""The packages for LangChain, Haystack and LlamaIndex that go with sie-sdk: what other APIs have no word for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sie_haystack
import sie_langchain
import sie_llamaindex
from haystack import Document as HaystackDocument
from langchain_core.documents import Document
from llama_index.core.schema import NodeWithScore, TextNode

QUERY = "Which animal sleeps on the rug?"
TEXTS = ["Interest rates rose again.", "A cat is asleep on the carpet.", "The train was late."]
FOX = "the fox met an owl"


@pytest.fixture
def sparse(native: Callable[..., Any]) -> list[Any]:
    """The sparse vectors of the texts."""
    params = {"output_types": ["sparse"]}
    answer = native("encode", "splade", items=[{"text": text} for text in TEXTS], params=params)
    return [item["sparse"] for item in answer["items"]]


def test_langchain_embeds(house: Any, dense: Callable[..., Any], sparse: list[Any]) -> None:
    embeddings = sie_langchain.SIEEmbeddings(base_url=house.url, model="everything")
    np.testing.assert_allclose(embeddings.embed_documents(TEXTS), dense("everything", TEXTS), atol=1e-6)
    queries = dense("everything", [QUERY], is_query=True)
    np.testing.assert_allclose(embeddings.embed_query(QUERY), queries[0], atol=1e-6)
    np.testing.assert_allclose(asyncio.run(embeddings.aembed_query(QUERY)), queries[0], atol=1e-6)
    found = sie_langchain.SIESparseEncoder(base_url=house.url, model="splade").encode_documents(TEXTS)
    assert [one["indices"] for one in found] == [one["indices"] for one in sparse]


@pytest.mark.parametrize("model", ["splade", "org/colbert", "cross-encoder"])
def test_langchain_reranks(house: Any, ranked: Callable[..., Any], model: str) -> None:
    ranker = sie_langchain.SIEReranker(base_url=house.url, model=model, top_k=2)
    found = ranker.compress_documents([Document(text) for text in TEXTS], QUERY)
    expected = [(TEXTS[place], score) for place, score in ranked(model, QUERY, TEXTS)[:2]]
    assert [(one.page_content, one.metadata["relevance_score"]) for one in found] == expected


def test_langchain_extracts(house: Any) -> None:
    found = sie_langchain.SIEExtractor(base_url=house.url, model="finder", labels=["fox", "owl"]).invoke(FOX)
    assert [(one["text"], one["start"]) for one in found["entities"]] == [("fox", 4), ("owl", 15)]
    assert found["relations"]


@pytest.mark.filterwarnings("ignore:Mutating attribute")
def test_haystack_embeds(house: Any, dense: Callable[..., Any], sparse: list[Any]) -> None:
    def component(name: str, model: str) -> Any:
        return getattr(sie_haystack, name)(base_url=house.url, model=model)

    expected = dense("minilm", TEXTS)
    vector = component("SIETextEmbedder", "minilm").run(TEXTS[1])["embedding"]
    np.testing.assert_allclose(vector, expected[1], atol=1e-6)
    whole = component("SIEDocumentEmbedder", "minilm").run([HaystackDocument(content=text) for text in TEXTS])
    np.testing.assert_allclose([one.embedding for one in whole["documents"]], expected, atol=1e-6)
    found = component("SIESparseTextEmbedder", "splade").run(TEXTS[1])["sparse_embedding"]
    assert found["indices"] == sparse[1]["indices"]
    matrix = component("SIEMultivectorTextEmbedder", "org/colbert").run(TEXTS[1])["multivector_embedding"]
    assert np.array(matrix).shape[1] == 384


def test_haystack_ranks_and_extracts(house: Any, ranked: Callable[..., Any]) -> None:
    documents = [HaystackDocument(content=text) for text in TEXTS]
    found = sie_haystack.SIERanker(base_url=house.url, model="splade").run(query=QUERY, documents=documents)
    assert [one.content for one in found["documents"]] == [TEXTS[place] for place, _ in ranked("splade", QUERY, TEXTS)]
    extractor = sie_haystack.SIEExtractor(base_url=house.url, model="finder", labels=["fox", "owl"])
    assert [(one.text, one.start) for one in extractor.run(FOX)["entities"]] == [("fox", 4), ("owl", 15)]


def test_llamaindex_embeds_reranks_and_extracts(
    house: Any, dense: Callable[..., Any], ranked: Callable[..., Any], sparse: list[Any]
) -> None:
    embedding = sie_llamaindex.SIEEmbedding(base_url=house.url, model_name="minilm")
    np.testing.assert_allclose(embedding.get_text_embedding_batch(TEXTS), dense("minilm", TEXTS), atol=1e-6)
    indices, _ = sie_llamaindex.SIESparseEmbeddingFunction(base_url=house.url, model_name="splade").encode_documents(
        TEXTS
    )
    assert indices == [one["indices"] for one in sparse]
    ranker = sie_llamaindex.SIENodePostprocessor(base_url=house.url, model="splade", top_n=2)
    found = ranker.postprocess_nodes([NodeWithScore(node=TextNode(text=text)) for text in TEXTS], query_str=QUERY)
    expected = [(TEXTS[place], score) for place, score in ranked("splade", QUERY, TEXTS)[:2]]
    assert [(one.node.get_content(), one.score) for one in found] == expected
    tool = sie_llamaindex.create_sie_extractor_tool(base_url=house.url, model="finder", labels=["owl"])
    assert "owl" in str(tool.call(FOX).content)


def test_what_is_wrong_is_an_error(house: Any) -> None:
    with pytest.raises(Exception, match="does not score; it can encode"):
        sie_langchain.SIEReranker(base_url=house.url, model="minilm").compress_documents([Document("a")], QUERY)
