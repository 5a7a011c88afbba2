"""``POST /v1/encode``: the native dialect in JSON and msgpack."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from sie_core import EncodeOutput, Item, RequestParams
from sie_core.http.vectors import native_items, openai_data
from sie_testing import expected_vector
from website import Start

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}


def array(value: dict[bytes, Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """Read the convention of msgpack-numpy, strictly: keys are bytes, ``kind`` is empty."""
    assert value.keys() == {b"nd", b"type", b"kind", b"shape", b"data"}
    assert value[b"nd"] is True
    assert value[b"kind"] == b""
    assert isinstance(value[b"type"], str)
    return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])


async def test_json(served: Start) -> None:
    async with served() as s:
        response = await s.encode(items=[{"id": "one", "text": "hello world"}, {"text": "there"}])
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["model"] == "mini"
    assert body["usage"] == {"input_tokens": 3}
    assert body["timing"].keys() == {"total_ms", "queue_ms", "tokenization_ms", "inference_ms"}
    assert body["timing"]["total_ms"] > 0
    first, second = body["items"]
    assert first["id"] == "one"
    assert "id" not in second
    assert (first["dense"]["dims"], first["dense"]["dtype"]) == (8, "float32")
    assert first["dense"]["values"] == pytest.approx(expected_vector("hello world").tolist())


async def test_msgpack_carries_arrays_in_the_numpy_convention(served: Start) -> None:
    body = msgspec.msgpack.encode({"items": [{"id": "one", "text": "hello"}, {"text": "there"}]})
    async with served() as s:
        response = await s.http.post("/v1/encode/org/mini", content=body, headers=MSGPACK)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/msgpack"
    answer = msgspec.msgpack.decode(response.content)
    assert answer["model"] == "org/mini"
    assert answer["items"][0]["id"] == "one"
    values = array(answer["items"][0]["dense"]["values"])
    assert values.dtype.str == "<f4"
    assert values.tobytes() == expected_vector("hello", salt="org").tobytes()


@pytest.mark.parametrize(
    ("content_type", "accept", "expected"),
    [
        ("application/json", None, "application/json"),
        ("application/json", "application/msgpack", "application/msgpack"),
        ("application/msgpack", "application/json", "application/json"),
        ("application/msgpack", "*/*", "application/msgpack"),
        ("application/x-msgpack", "*/*", "application/msgpack"),
        ("application/json; charset=utf-8", "*/*", "application/json"),
        ("APPLICATION/JSON", "*/*", "application/json"),
        ("application/vnd.client+json", "*/*", "application/json"),
        ("application/json", "application/json, application/msgpack", "application/msgpack"),
        ("application/json", "application/json;q=0.1, application/msgpack", "application/msgpack"),
        ("application/json", "application/json, application/msgpack; q=0.5", "application/json"),
        ("application/json", "application/msgpack;q=0, */*", "application/json"),
        ("application/msgpack", "application/msgpack;q=0, */*;q=0.1", "application/json"),
        ("application/msgpack", "application/msgpack;q=high", "application/msgpack"),
        ("application/msgpack", "text/html, */*;q=0.8", "application/msgpack"),
    ],
)
async def test_the_answer_speaks_what_the_client_accepts(
    served: Start, content_type: str, accept: str | None, expected: str
) -> None:
    body = {"items": [{"text": "hello"}]}
    raw = msgspec.msgpack.encode(body) if "msgpack" in content_type else b'{"items":[{"text":"hello"}]}'
    headers = {"content-type": content_type, **({"accept": accept} if accept else {})}
    async with served() as s:
        response = await s.http.post("/v1/encode/mini", content=raw, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == expected


async def test_prompts_and_query_mode_reach_the_engine_from_both_places(served: Start) -> None:
    expected = expected_vector("hello", params=RequestParams(instruction="find", is_query=True)).tolist()
    async with served() as s:
        beside = await s.encode(params={"instruction": "find", "is_query": True})
        inside = await s.encode(params={"instruction": "find", "options": {"is_query": True}})
    assert beside.json()["items"][0]["dense"]["values"] == pytest.approx(expected)
    assert inside.json()["items"][0]["dense"]["values"] == pytest.approx(expected)


async def test_truncation_and_dimensions_in_options(served: Start) -> None:
    items = [{"text": "word " * 20}]
    async with served() as s:
        refused = await s.encode(items=items)
        cut = await s.encode(items=items, params={"options": {"truncate": True, "dimensions": 4}})
    assert refused.json()["detail"]["code"] == "INPUT_TOO_LONG"
    assert refused.json()["detail"]["index"] == 0
    assert cut.json()["items"][0]["dense"]["dims"] == 4
    assert cut.json()["usage"] == {"input_tokens": 16}


async def test_every_output_type_that_the_model_has(served: Start) -> None:
    body = msgspec.msgpack.encode(
        {"items": [{"text": "hello there"}], "params": {"output_types": ["dense", "sparse", "multivector"]}}
    )
    async with served() as s:
        answer = (await s.http.post("/v1/encode/any", content=body, headers=MSGPACK)).content
        refused = await s.encode(params={"output_types": ["sparse"]})
        unknown = await s.encode(params={"output_types": ["smell"]})
    item = msgspec.msgpack.decode(answer)["items"][0]
    assert item.keys() == {"dense", "sparse", "multivector"}
    assert array(item["sparse"]["indices"]).dtype == np.int32
    assert array(item["sparse"]["values"]).dtype == np.float32
    assert array(item["multivector"]["values"]).shape == (2, 8)
    assert refused.status_code == 400
    assert refused.json()["detail"]["supported"] == ["dense"]
    assert unknown.status_code == 400
    assert unknown.json()["detail"]["param"] == "output_types"


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "binary", "ubinary"])
async def test_dtypes(served: Start, dtype: str) -> None:
    vector = expected_vector("hello", 384)
    body = msgspec.msgpack.encode({"items": [{"text": "hello"}], "params": {"output_dtype": dtype}})
    async with served() as s:
        packed = await s.http.post("/v1/encode/wide", content=body, headers=MSGPACK)
        plain = await s.encode("wide", params={"output_dtype": dtype})
    dense = msgspec.msgpack.decode(packed.content)["items"][0]["dense"]
    values = array(dense["values"])
    assert (dense["dims"], dense["dtype"]) == (384, dtype)
    assert plain.json()["items"][0]["dense"]["values"] == pytest.approx(values.tolist())
    if dtype in ("float32", "float16"):
        assert values.dtype == np.dtype(dtype)
        assert np.abs(values.astype(np.float32) - vector).max() < 1e-3
    elif dtype in ("binary", "ubinary"):
        raw = (values.astype(np.int16) + (128 if dtype == "binary" else 0)).astype(np.uint8)
        assert values.shape == (48,)
        assert (np.unpackbits(raw) == (vector > 0)).all()
    else:
        centred = values.astype(np.float32) - (128 if dtype == "uint8" else 0)
        cosine = float(centred @ vector / np.linalg.norm(centred) / np.linalg.norm(vector))
        assert values.dtype == np.dtype(dtype)
        assert cosine > 0.999


@pytest.mark.parametrize("dialect", ["native", "openai"])
async def test_a_large_answer_is_written_in_many_turns_of_the_loop(dialect: str) -> None:
    texts = [f"text {number}" for number in range(2048)]
    outputs = [EncodeOutput(2, dense=expected_vector(text, 384)) for text in texts]
    items = [Item(text=text) for text in texts]
    native = native_items(items, outputs, ("dense",), "float32", msgpack=False)
    writing = asyncio.create_task(native if dialect == "native" else openai_data(outputs, as_base64=False))
    if dialect == "openai":
        native.close()
    turns = 0
    while not writing.done():
        turns += 1
        await asyncio.sleep(0)
    numbers = 2048 * 384
    assert turns >= numbers / 20_000
    assert await writing


BAD: list[tuple[dict[str, Any], str, int | None]] = [
    ({"items": []}, "items", None),
    ({"items": None}, "items", None),
    ({"items": "hello"}, "items", None),
    ({"items": {"text": "hello"}}, "items", None),
    ({"items": ["hello"]}, "items", 0),
    ({"items": [{"text": "fine"}, {}]}, "items", 1),
    ({"items": [{"text": ""}]}, "items", 0),
    ({"items": [{"text": 7}]}, "items", 0),
    ({"items": [{"text": "fine", "id": 7}]}, "items", 0),
    ({"items": [{"text": "fine"}, {"audio": "x"}]}, "items", 1),
    ({"items": [{"text": "a", "images": [{"data": "@@@"}]}]}, "items", 0),
    ({"items": [{"text": "a", "images": [7]}]}, "items", 0),
    ({"items": [{"images": [{"data": "aGVsbG8="}]}]}, "items", 0),
    ({"params": []}, "params", None),
    ({"params": {"output_types": []}}, "output_types", None),
    ({"params": {"output_types": "dense"}}, "output_types", None),
    ({"params": {"output_types": [["dense"]]}}, "output_types", None),
    ({"params": {"output_dtype": "float64"}}, "output_dtype", None),
    ({"params": {"output_dtype": ["float32"]}}, "output_dtype", None),
    ({"params": {"instruction": 7}}, "instruction", None),
    ({"params": {"is_query": "yes"}}, "is_query", None),
    ({"params": {"is_qeury": True}}, "params", None),
    ({"params": {"options": [1]}}, "params.options", None),
    *(({"params": {"options": nothing}}, "params.options", None) for nothing in ([], "", 0, False)),
    *(({"params": {"output_dtype": nothing}}, "output_dtype", None) for nothing in ([], "", 0, False, {})),
    *(({"items": [{"text": "a", "images": nothing}]}, "items", 0) for nothing in ({}, "", 0, False)),
    ({"params": {"options": {"truncate": 1}}}, "truncate", None),
    ({"params": {"options": {"dimensions": "4"}}}, "dimensions", None),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD)
async def test_bad_input_is_a_400_that_says_what_is_wrong(
    served: Start, change: dict[str, Any], param: str, index: int | None
) -> None:
    async with served() as s:
        response = await s.encode(**change)
        after = await s.encode()
    assert response.status_code == 400, response.text
    detail = response.json()["detail"]
    assert detail["code"] == "INVALID_INPUT"
    assert detail["param"] == param
    assert detail.get("index") == index
    assert response.headers["x-should-retry"] == "false"
    assert after.status_code == 200


async def test_a_misspelt_parameter_is_not_silently_dropped(served: Start) -> None:
    async with served() as s:
        response = await s.encode(params={"is_qeury": True})
    assert "did you mean 'is_query'" in response.json()["detail"]["message"]
