"""``/rerank``, ``/v1/rerank``, ``/v2/rerank`` and ``/v2/embed``: what Cohere's and Jina's clients send and read."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import pytest
from sie_core import RequestParams
from sie_core.http.vectors import convert
from sie_testing import FaultPoints, expected_score, expected_vector
from website import Start, until

DOCUMENTS = ["a blue whale", "a red fox", "red"]
RERANKS = ("/v1/rerank", "/rerank", "/v2/rerank")
ORDER = sorted(range(3), key=lambda index: -expected_score("red fox", DOCUMENTS[index]))
GIF = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "ranker", "query": "red fox", "documents": DOCUMENTS, **more}


@pytest.mark.parametrize("path", RERANKS)
async def test_results_come_best_first(served: Start, path: str) -> None:
    async with served() as s:
        response = await s.http.post(path, json=asked())
    body = response.json()
    assert response.status_code == 200
    assert body["results"] == [
        {"index": index, "relevance_score": expected_score("red fox", DOCUMENTS[index])} for index in ORDER
    ]
    assert isinstance(body["id"], str)
    assert body["meta"]["billed_units"] == {"search_units": 1}
    assert body["meta"]["api_version"] == {"version": "2" if path == "/v2/rerank" else "1"}
    if path != "/v2/rerank":
        assert body["model"] == "ranker"
        assert body["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("path", RERANKS)
@pytest.mark.parametrize("top_n", [1, 2, 9])
async def test_top_n_and_documents(served: Start, path: str, top_n: int) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    async with served() as s:
        response = await s.http.post(path, json=asked(documents=documents, top_n=top_n, return_documents=True))
    results = response.json()["results"]
    assert [one["index"] for one in results] == ORDER[:top_n]
    assert [one["document"] for one in results] == [{"text": DOCUMENTS[index]} for index in ORDER[:top_n]]


async def test_what_clients_send_beside_changes_nothing(served: Start) -> None:
    more = {"rank_fields": None, "max_chunks_per_doc": None, "priority": 3, "top_n": None, "return_documents": None}
    async with served() as s:
        response = await s.http.post("/v1/rerank", json=asked(**more))
    assert [one["index"] for one in response.json()["results"]] == ORDER


async def test_long_documents_are_cut_for_those_who_say_how_long_they_may_be(served: Start) -> None:
    long = [" ".join(["word"] * 20)]
    async with served() as s:
        refused = await s.http.post("/v2/rerank", json=asked(documents=long))
        cohere = await s.http.post("/v2/rerank", json=asked(documents=long, max_tokens_per_doc=4096))
        ours = await s.http.post("/v1/rerank", json=asked(documents=long, truncate=True))
    assert refused.json()["error"]["code"] == "INPUT_TOO_LONG"
    assert cohere.status_code == ours.status_code == 200


async def test_a_model_that_encodes_reranks_too(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/rerank", json=asked(model="late", query="a red fox"))
    assert response.json()["results"][0]["index"] == 1


BAD_RERANKS: list[tuple[dict[str, Any], str, int | None]] = [
    ({"model": ""}, "model", None),
    ({"model": None}, "model", None),
    ({"query": None}, "query", None),
    ({"query": ""}, "query", None),
    ({"query": ["a"]}, "query", None),
    ({"query": {}}, "query", None),
    ({"documents": []}, "documents", None),
    ({"documents": None}, "documents", None),
    ({"documents": "a text"}, "documents", None),
    ({"documents": ["fine", 7]}, "documents", 1),
    ({"documents": ["fine", ""]}, "documents", 1),
    ({"documents": ["fine", None]}, "documents", 1),
    ({"documents": ["fine", ["a"]]}, "documents", 1),
    ({"documents": ["fine", {"title": "a"}]}, "documents", 1),
    ({"documents": ["fine", {"text": 7}]}, "documents", 1),
    ({"documents": ["a"] * 1001}, "documents", 1000),
    ({"top_n": 0}, "top_n", None),
    ({"top_n": "3"}, "top_n", None),
    ({"top_n": True}, "top_n", None),
    ({"return_documents": "yes"}, "return_documents", None),
    ({"rank_fields": ["title"]}, "rank_fields", None),
    ({"relevant_spans": {"mode": "x"}}, "relevant_spans", None),
    ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", None),
    ({"model": "mini"}, "model", None),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD_RERANKS)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
async def test_bad_requests(served: Start, path: str, change: dict[str, Any], param: str, index: int | None) -> None:
    async with served() as s:
        response = await s.http.post(path, json=asked(**change))
    body = response.json()
    assert response.status_code == 400, body
    assert body.keys() == {"message", "detail", "error"}
    assert body["message"] == body["error"]["message"]
    assert (body["error"]["param"], body["error"].get("index")) == (param, index)
    assert body["error"]["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"


async def test_errors_as_these_clients_know_them(served: Start) -> None:
    async with served(queue=1) as s:
        unknown = await s.http.post("/v2/rerank", json=asked(model="rankr"))
        not_finite = await s.http.post("/rerank", json=asked(documents=["fine", "bad"]))
        packed = await s.http.post("/v1/rerank", content=b"\x80", headers={"content-type": "application/msgpack"})
        nowhere = await s.http.get("/v2/nothing")
    assert unknown.status_code == nowhere.status_code == 404
    assert unknown.json()["error"]["suggestions"] == ["ranker"]
    assert (not_finite.status_code, not_finite.json()["error"]["items"]) == (500, [1])
    assert packed.headers["content-type"] == "application/json"
    # Cohere's clients read the one, Jina's the other.
    assert packed.json()["message"] == packed.json()["detail"] == packed.json()["error"]["message"]
    assert nowhere.json().keys() == {"message", "detail", "error"}


# --- embed -------------------------------------------------------------------------------------------


async def embedded(served: Start, **body: Any) -> Any:
    async with served() as s:
        return await s.http.post("/v2/embed", json={"model": "mini", "input_type": "search_document", **body})


async def test_every_embedding_type_of_the_same_vectors(served: Start) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    response = await embedded(served, model="wide", texts=["hello", "there you are"], embedding_types=types)
    body = response.json()
    assert body["texts"] == ["hello", "there you are"]
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 4}}
    assert body["response_type"] == "embeddings_by_type"
    assert list(body["embeddings"]) == types
    vector = expected_vector("there you are", 384)
    shown = {name: values[1] for name, values in body["embeddings"].items()}
    assert shown["float"] == pytest.approx(vector.tolist())
    assert base64.b64decode(shown["base64"]) == vector.astype("<f4").tobytes()
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert shown[name] == convert(vector, name).tolist()
    assert len(shown["binary"]) == 48


async def test_the_first_version_of_embed_gives_bare_floats_unless_types_are_named(served: Start) -> None:
    asked = {"model": "mini", "texts": ["hello", "there you are"], "input_type": "search_query"}
    async with served() as s:
        bare = await s.http.post("/v1/embed", json=asked)
        typed = await s.http.post("/v1/embed", json={**asked, "embedding_types": ["float", "int8"], "truncate": "END"})
        unknown = await s.http.post("/v1/embed", json={**asked, "model": "minni"})
    expected = expected_vector("there you are", params=RequestParams(is_query=True))
    assert bare.json()["response_type"] == "embeddings_floats"
    assert bare.json()["embeddings"][1] == pytest.approx(expected.tolist())
    assert bare.json()["texts"] == asked["texts"]
    assert bare.json()["meta"]["api_version"] == {"version": "1"}
    assert typed.json()["response_type"] == "embeddings_by_type"
    assert typed.json()["embeddings"]["float"] == bare.json()["embeddings"]
    assert typed.json()["embeddings"]["int8"][1] == convert(expected, "int8").tolist()
    assert (unknown.status_code, unknown.json()["message"]) == (404, unknown.json()["detail"])


@pytest.mark.parametrize("kind", ["search_document", "search_query", "classification", "clustering", None])
async def test_queries_are_told_from_documents(served: Start, kind: str | None) -> None:
    response = await embedded(served, texts=["hello"], input_type=kind)
    expected = expected_vector("hello", params=RequestParams(is_query=kind == "search_query"))
    assert response.json()["embeddings"]["float"][0] == pytest.approx(expected.tolist())


async def test_mixed_inputs_and_images(served: Start) -> None:
    text = {"content": [{"type": "text", "text": "hello"}]}
    image = {"content": [{"type": "image_url", "image_url": {"url": GIF}}]}
    both = {"content": [*text["content"], *image["content"]]}
    plain = await embedded(served, inputs=[text])
    mixed = await embedded(served, model="looker", inputs=[text, image, both])
    images = await embedded(served, model="looker", images=[GIF], input_type="image")
    assert plain.json()["texts"] == ["hello"]
    vectors = mixed.json()["embeddings"]["float"]
    assert "texts" not in mixed.json()
    assert vectors[0] == pytest.approx(plain.json()["embeddings"]["float"][0])
    assert images.json()["embeddings"]["float"][0] == pytest.approx(vectors[1])
    assert vectors[2] != pytest.approx(vectors[1])


async def test_dimensions_and_truncation(served: Start) -> None:
    long = ["word " * 20]
    short = await embedded(served, texts=["hello"], output_dimension=4)
    cut = await embedded(served, texts=long, truncate="END")
    refused = await embedded(served, texts=long, truncate="NONE")
    assert len(short.json()["embeddings"]["float"][0]) == 4
    assert cut.status_code == 200
    assert refused.json()["error"]["code"] == "INPUT_TOO_LONG"


BAD_EMBEDS: list[tuple[dict[str, Any], str, int | None]] = [
    ({"texts": None}, "texts", None),
    ({"texts": []}, "texts", None),
    ({"texts": "hello"}, "texts", None),
    ({"texts": ["fine", ""]}, "texts", 1),
    ({"texts": ["fine", 7]}, "texts", 1),
    ({"images": [GIF]}, "images", None),
    ({"texts": None, "inputs": ["hello"]}, "inputs", 0),
    ({"texts": None, "inputs": [{"content": []}]}, "inputs", 0),
    ({"texts": None, "inputs": [{"content": [{"type": "video"}]}]}, "inputs", 0),
    ({"texts": None, "images": [GIF]}, "items", 0),
    ({"texts": None, "images": [GIF, "@@"]}, "images", 1),
    ({"input_type": "poem"}, "input_type", None),
    ({"embedding_types": []}, "embedding_types", None),
    ({"embedding_types": ["float64"]}, "embedding_types", None),
    ({"embedding_types": [["float"]]}, "embedding_types", None),
    ({"output_dimension": 5}, "dimensions", None),
    ({"output_dimension": "4"}, "output_dimension", None),
    ({"truncate": "START"}, "truncate", None),
    ({"truncate": ["END"]}, "truncate", None),
    ({"max_tokens": 10}, "max_tokens", None),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD_EMBEDS)
async def test_bad_embeds(served: Start, change: dict[str, Any], param: str, index: int | None) -> None:
    response = await embedded(served, **{"texts": ["hello"], **change})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["param"], error.get("index")) == (param, index)


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/rerank"])
async def test_a_full_queue_is_a_429(served: Start, path: str) -> None:
    async with served(queue=1) as s:
        model = "mini" if path == "/v2/embed" else "ranker"
        body = {"model": model, "texts": ["a"], "query": "q", "documents": ["a"]}
        assert (await s.http.post(path, json=body)).status_code == 200
        latch = FaultPoints.of(model).hold("run", times=1)
        waiting = [asyncio.create_task(s.http.post(path, json=body))]
        await latch.arrival()
        waiting.append(asyncio.create_task(s.http.post(path, json=body)))
        await until(lambda: s.registry.status(model).leases == 2)
        refused = await s.http.post(path, json=body)
        FaultPoints.of(model).reset()
        await asyncio.gather(*waiting)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert int(refused.headers["retry-after"]) >= 1


def test_float16_holds_what_it_can() -> None:
    halved = convert(np.array([1e9, -1e9, 0.5], np.float32), "float16")
    assert halved.tolist() == [65504.0, -65504.0, 0.5]
