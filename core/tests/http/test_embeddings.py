"""``POST /v1/embeddings``: what OpenAI's clients send and expect."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from sie_testing import expected_vector
from website import Start


def unpack(text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(base64.b64decode(text), "<f4")


async def test_a_string_is_one_vector(served: Start) -> None:
    async with served() as s:
        response = await s.embed(input="hello world")
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "list"
    assert body["model"] == "mini"
    assert body["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    (entry,) = body["data"]
    assert (entry["object"], entry["index"]) == ("embedding", 0)
    assert np.array(entry["embedding"], np.float32).tobytes() == expected_vector("hello world").tobytes()


async def test_base64_is_bit_equal_to_the_floats(served: Start) -> None:
    texts = [f"text number {number}" for number in range(50)]
    async with served() as s:
        floats = (await s.embed(model="wide", input=texts, encoding_format="float")).json()["data"]
        packed = (await s.embed(model="wide", input=texts, encoding_format="base64")).json()["data"]
    assert [entry["index"] for entry in packed] == list(range(50))
    for text, plain, coded in zip(texts, floats, packed, strict=True):
        assert unpack(coded["embedding"]).tobytes() == expected_vector(text, 384).tobytes()
        assert np.array(plain["embedding"], np.float32).tobytes() == expected_vector(text, 384).tobytes()


async def test_token_lists_are_ids_of_the_models_vocabulary(served: Start) -> None:
    async with served() as s:
        one = (await s.embed(input=[3, 1, 4])).json()
        two = (await s.embed(input=[[3, 1, 4], [1]])).json()
    assert [len(answer["data"]) for answer in (one, two)] == [1, 2]
    assert one["data"][0]["embedding"] == two["data"][0]["embedding"]
    assert one["data"][0]["embedding"] == pytest.approx(expected_vector("3 1 4").tolist())


async def test_dimensions_where_the_model_allows_them(served: Start) -> None:
    async with served() as s:
        shorter = await s.embed(dimensions=4)
        refused = await s.embed(dimensions=5)
        elsewhere = await s.embed(model="wide", dimensions=4)
    vector = shorter.json()["data"][0]["embedding"]
    assert len(vector) == 4
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    for response in (refused, elsewhere):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "dimensions"


async def test_long_text_is_a_400_unless_truncation_is_asked_for(served: Start) -> None:
    long = "word " * 17
    async with served() as s:
        refused = await s.embed(input=["short", long])
        truncated = await s.embed(input=["short", long], truncate=True)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["index"]) == (400, "INPUT_TOO_LONG", 1)
    assert (error["tokens"], error["limit"]) == (17, 16)
    assert truncated.json()["usage"]["prompt_tokens"] == 17


async def test_a_query_is_read_as_one_where_the_client_says_so(served: Start) -> None:
    async with served() as s:
        vectors = [
            (await s.embed(input="red fox", **said)).json()["data"][0]["embedding"]
            for said in ({"input_type": "query"}, {"input_type": "document"}, {"input_type": "passage"}, {})
        ]
        native = await s.encode(params={"is_query": True}, items=[{"text": "red fox"}])
        refused = await s.embed(input="red fox", input_type="search")
    assert vectors[0] == native.json()["items"][0]["dense"]["values"]
    assert vectors[0] != vectors[1] == vectors[2] == vectors[3]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_type")


async def test_the_double_underscore_means_a_slash(served: Start) -> None:
    async with served() as s:
        answer = (await s.embed(model="org__mini")).json()
    assert answer["model"] == "org/mini"
    assert answer["data"][0]["embedding"] == pytest.approx(expected_vector("hello", salt="org").tolist())


async def test_fields_of_other_servers_are_ignored(served: Start) -> None:
    async with served() as s:
        response = await s.embed(user="somebody", input_type="query", extra={"a": [1]}, encoding_format=None)
    assert response.status_code == 200


BAD: list[tuple[dict[str, Any], str, int | None]] = [
    ({"input": []}, "input", None),
    ({"input": ""}, "input", 0),
    ({"input": [""]}, "input", 0),
    ({"input": [[]]}, "input", 0),
    ({"input": ["fine", ""]}, "input", 1),
    ({"input": None}, "input", None),
    ({"input": 7}, "input", None),
    ({"input": True}, "input", None),
    ({"input": {"text": "a"}}, "input", None),
    ({"input": ["fine", 7]}, "input", 1),
    ({"input": ["fine", None]}, "input", 1),
    ({"input": [1, "fine"]}, "input", 0),
    ({"input": [1, True]}, "input", 0),
    ({"input": [1, -1]}, "input", 0),
    ({"input": [1, 2**31]}, "input", 0),
    ({"input": [1, 1e30]}, "input", 0),
    ({"input": [[1, 2], [3, 4.5]]}, "input", 1),
    ({"input": [[1, 2], "fine"]}, "input", 1),
    ({"input": [[1, 2], []]}, "input", 1),
    ({"input": [[[1]]]}, "input", 0),
    ({"encoding_format": "hex"}, "encoding_format", None),
    ({"encoding_format": 7}, "encoding_format", None),
    ({"encoding_format": ["base64"]}, "encoding_format", None),
    ({"dimensions": 0}, "dimensions", None),
    ({"dimensions": -4}, "dimensions", None),
    ({"dimensions": 4.0}, "dimensions", None),
    ({"dimensions": True}, "dimensions", None),
    ({"dimensions": "4"}, "dimensions", None),
    ({"dimensions": 2**70}, "dimensions", None),
    ({"truncate": "yes"}, "truncate", None),
    ({"model": ""}, "model", None),
    ({"model": None}, "model", None),
    ({"model": ["mini"]}, "model", None),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD)
async def test_bad_input_is_a_400_that_says_what_is_wrong(
    served: Start, change: dict[str, Any], param: str, index: int | None
) -> None:
    async with served() as s:
        body = {"model": "mini", "input": "hello", **change}
        response = await s.http.post("/v1/embeddings", content=orjson_dumps(body), headers=JSON)
        after = await s.embed()
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "INVALID_INPUT"
    assert error["param"] == param
    assert error.get("index") == index
    assert error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert after.status_code == 200


JSON = {"content-type": "application/json"}


def orjson_dumps(body: dict[str, Any]) -> bytes:
    import json  # takes integers of any size, which clients may send and orjson would not write

    return json.dumps(body).encode()


async def test_an_unknown_model_is_a_404_with_a_suggestion(served: Start) -> None:
    async with served() as s:
        response = await s.embed(model="minii")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "MODEL_NOT_FOUND")
    assert "mini" in error["suggestions"]
    assert "did you mean" in error["message"]


async def test_an_answer_that_is_not_finite_names_the_item(served: Start) -> None:
    async with served() as s:
        response = await s.embed(model="nan", input=["good", "bad"])
        good = await s.embed(model="nan", input=["good"])
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["items"]) == (500, "INFERENCE_ERROR", [1])
    assert response.headers["x-should-retry"] == "false"
    assert good.status_code == 200


async def test_two_thousand_vectors_come_in_order(served: Start) -> None:
    texts = [str(number) for number in range(2048)]
    async with served() as s:
        data = (await s.embed(model="wide", input=texts)).json()["data"]
    assert [entry["index"] for entry in data] == list(range(2048))
    assert data[2047]["embedding"] == pytest.approx(expected_vector("2047", 384).tolist())
