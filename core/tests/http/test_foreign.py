"""Fields of other servers that speak OpenAI's and Cohere's API: what would change an answer is done or refused."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from sie_core.http.vectors import convert
from sie_testing import expected_vector
from website import MODELS, Start

GIF = "data:image/gif;base64,R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="
OTHER = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
RANKED = {"model": "ranker", "query": "red fox", "documents": ["a whale", "a red fox", "the fox"]}


def vectors(answer: Any) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


# --- images ------------------------------------------------------------------------------------------


async def test_images_are_embedded_as_images(served: Start) -> None:
    """C8: with ``modality: image`` the vector is the one that the native dialect gives of the image."""
    items = [{"images": [url]} for url in (GIF, OTHER)]
    async with served() as s:
        native = (await s.http.post("/v1/encode/looker", json={"items": items})).json()["items"]
        several = await s.embed(model="looker", input=[GIF, OTHER], modality="image")
        one = await s.embed(model="looker", input=GIF, modality="image", encoding_format="base64", dimensions=4)
        text = await s.embed(model="looker", input="a cat", modality="text")
    assert vectors(several) == [item["dense"]["values"] for item in native]
    assert len(base64.b64decode(one.json()["data"][0]["embedding"])) == 16
    assert np.array_equal(np.array(vectors(text)[0], np.float32), expected_vector("a cat"))


@pytest.mark.parametrize("warm", [False, True])
async def test_a_data_url_without_a_modality_is_no_text_where_images_are_taken(served: Start, warm: bool) -> None:
    """C8: the vector of its letters is what nobody wants; a model of texts alone has nothing else to give."""
    async with served() as s:
        if warm:
            await s.embed(model="looker")
        pasted = await s.embed(model="looker", input=["a cat", GIF])
        state = s.service.model("looker").residency
        address = await s.embed(model="looker", input="https://example.org/cat.png")
        text = await s.embed(model="wide", input=GIF)
    error = pasted.json()["error"]
    assert (pasted.status_code, error["param"], error["index"]) == (400, "input", 1)
    assert "modality: image" in error["message"]
    assert state == ("resident" if warm else "unloaded")
    assert (address.status_code, text.status_code) == (200, 200)


@pytest.mark.parametrize(
    ("body", "param", "index"),
    [
        # C8: unknown modalities, and what is no image
        ({"modality": "audio", "input": GIF}, "modality", None),
        ({"modality": 7}, "modality", None),
        ({"modality": "image", "input": [[1, 2]]}, "input", 0),
        ({"modality": "image", "input": [GIF, {"image": GIF}]}, "input", 1),
        ({"modality": "image", "input": [GIF, "data:text/plain;base64,aGk="]}, "input", 1),
        ({"modality": "image", "input": "https://example.org/cat.png"}, "input", 0),
        ({"modality": "image", "input": []}, "input", None),
        ({"modality": "image", "input": GIF, "model": "mini"}, "items", 0),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_what_is_no_image_is_refused(served: Start, body: dict[str, Any], param: str, index: int | None) -> None:
    async with served() as s:
        response = await s.embed(**{"model": "looker", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error.get("index")) == (400, param, index), error


# --- what is done ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float", "float32", "float16", "int8", "uint8", "binary", "ubinary"])
async def test_packed_vectors(served: Start, dtype: str) -> None:
    """C9: Voyage's ``output_dtype`` gives what the native dialect gives."""
    async with served() as s:
        answer = await s.embed(output_dtype=dtype)
        jina = await s.embed(embedding_type=dtype) if dtype in ("float", "binary", "ubinary") else answer
    wanted = convert(expected_vector("hello"), "float32" if dtype == "float" else dtype)
    assert np.array_equal(np.array(vectors(answer)[0], wanted.dtype), wanted)
    assert jina.json() == answer.json()


async def test_other_names_of_what_there_is(served: Start) -> None:
    """C9: ``output_dimension``, ``truncation``, ``task``, ``top_k`` are what Voyage and Jina call it."""
    long = "word " * 40
    async with served() as s:
        short = await s.embed(dimensions=4, input_type="query", truncate=True, input=long)
        voyage = await s.embed(output_dimension=4, input_type="query", truncation=True, input=long)
        jina = await s.embed(dimensions=4, task="retrieval.query", truncate=True, input=long)
        native = await s.embed(dimensions=4, is_query=True, truncate=True, input=long)
        too_long = await s.embed(truncation=False, input=long)
        plain = await s.http.post("/v1/rerank", json=RANKED)
        best = await s.http.post("/v1/rerank", json={**RANKED, "top_k": 1})
        cut = await s.http.post("/v2/rerank", json={**RANKED, "documents": [long], "truncation": True, "top_k": None})
        cohere = {"model": "mini", "texts": ["hello"], "embedding_types": ["float"]}
        sized = [
            await s.http.post("/v2/embed", json={**cohere, name: 4}) for name in ("output_dimension", "dimensions")
        ]
    assert vectors(short) == vectors(voyage) == vectors(jina) == vectors(native)
    assert too_long.status_code == 400
    assert best.json()["results"] == plain.json()["results"][:1]
    assert cut.status_code == 200
    assert sized[0].json()["embeddings"] == sized[1].json()["embeddings"]
    assert len(sized[0].json()["embeddings"]["float"][0]) == 4


async def test_vectors_of_length_one(served: Start) -> None:
    """C9: ``normalize: true`` holds whatever the model does; the reverse is refused."""
    async with served() as s:
        answer = await s.embed(normalize=True, normalized=True)
        refused = await s.embed(normalize=False)
    assert np.allclose(np.linalg.norm(vectors(answer)[0]), 1.0, atol=1e-6)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "normalize")


async def test_what_changes_nothing_is_ignored(served: Start) -> None:
    """C9: what clients send beside keeps working."""
    more = {
        "user": "me", "priority": 3, "encoding_format": "float", "metadata": {}, "late_chunking": False,
        "normalized": True, "return_multivector": None, "add_special_tokens": True, "modality": "text",
        "endianness": "little", "request_id": "x", "unheard_of": 7,
    }  # fmt: skip
    beside = {"raw_scores": False, "max_chunks_per_doc": 1, "rank_fields": ["text"], "top_k": 3, "user": "me"}
    async with served() as s:
        assert vectors(await s.embed(**more)) == vectors(await s.embed())
        plain = await s.http.post("/v1/rerank", json=RANKED)
        full = await s.http.post("/v1/rerank", json={**RANKED, **beside})
    assert full.json()["results"] == plain.json()["results"]


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        # C9: fields that would have changed the answer and were passed over
        ("/v1/embeddings", {"output_dtype": "int4"}, "output_dtype"),
        ("/v1/embeddings", {"output_dtype": "int8", "encoding_format": "base64"}, "encoding_format"),
        ("/v1/embeddings", {"output_dtype": "int8", "embedding_type": "binary"}, "output_dtype"),
        ("/v1/embeddings", {"output_dimension": 4, "dimensions": 8}, "output_dimension"),
        ("/v1/embeddings", {"output_dimension": 5}, "dimensions"),
        ("/v1/embeddings", {"truncate": True, "truncation": False}, "truncation"),
        ("/v1/embeddings", {"input_type": "document", "task": "retrieval.query"}, "task"),
        ("/v1/embeddings", {"task": "text-matching"}, "task"),
        ("/v1/embeddings", {"late_chunking": True}, "late_chunking"),
        ("/v1/embeddings", {"return_multivector": True}, "return_multivector"),
        ("/v1/embeddings", {"normalized": 1}, "normalized"),
        ("/v1/embeddings", {"prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"embedding_types": ["int8"]}, "embedding_types"),
        ("/v1/embeddings", {"params": {"is_query": True}}, "params"),
        ("/v1/embeddings", {"output_types": ["sparse"]}, "output_types"),
        ("/v1/rerank", {"top_n": 1, "top_k": 2}, "top_k"),
        ("/v1/rerank", {"top_k": 0}, "top_k"),
        ("/v1/rerank", {"raw_scores": "yes"}, "raw_scores"),
        ("/v1/rerank", {"truncate": True, "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/v1/rerank", {"max_chunks_per_doc": 10}, "max_chunks_per_doc"),
        ("/v2/rerank", {"normalize": True}, "normalize"),
        ("/rerank", {"activation": "sigmoid"}, "activation"),
        ("/v2/embed", {"output_dtype": "int8"}, "output_dtype"),
        ("/v1/embed", {"normalize": False}, "normalize"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_would_change_the_answer_is_not_passed_over(
    served: Start, path: str, change: dict[str, Any], param: str
) -> None:
    body = {"/v1/embeddings": {"model": "mini", "input": "hello"}, "/v2/embed": {"model": "mini", "texts": ["hello"]}}
    body["/v1/embed"] = body["/v2/embed"]
    async with served() as s:
        response = await s.http.post(path, json={**body.get(path, RANKED), **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


# --- known before ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "wanted", "supported"),
    [("wide", 385, ["384"]), ("wide", 12, ["384"]), ("mini", 5, ["4", "8"]), ("any", 9, ["8"])],
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed", "/v1/encode"])
async def test_sizes_that_a_cold_model_does_not_have_load_nothing(
    served: Start, path: str, model: str, wanted: int, supported: list[str]
) -> None:
    """C4: what is known of a model refuses before it is loaded."""
    bodies = {
        "/v1/embeddings": {"model": model, "input": "hello", "dimensions": wanted},
        "/v2/embed": {"model": model, "texts": ["hello"], "output_dimension": wanted},
        "/v1/encode": {"items": [{"text": "hello"}], "params": {"dimensions": wanted}},
    }
    async with served() as s:
        url = f"{path}/{model}" if path == "/v1/encode" else path
        response = await s.http.post(url, json=bodies[path])
        state = s.service.model(model).residency
        own = await s.embed(model=model, dimensions=MODELS[model].dims)
    error = response.json().get("error") or response.json()["detail"]
    assert (response.status_code, error["param"], error["supported"]) == (400, "dimensions", supported), error
    assert state == "unloaded"
    assert own.status_code == 200


async def test_parts_of_coheres_inputs_may_have_fields_of_their_own(served: Start) -> None:
    """C9: what stands beside ``image_url`` changes nothing, and is ignored as in the rest of that dialect."""
    part = {"type": "image_url", "image_url": {"url": GIF, "detail": "low"}}
    async with served() as s:
        plain, more = [
            await s.http.post("/v2/embed", json={"model": "looker", "inputs": [{"content": [one]}]})
            for one in (part, {**part, "cache_control": {}})
        ]
    assert plain.status_code == more.status_code == 200
    assert plain.json()["embeddings"] == more.json()["embeddings"]
