"""Packed vectors: ranges for int8 and uint8, every output in every dtype, in both wires, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from sie_core import EncodeOutput, Item
from sie_core.http.vectors import convert, native_items
from sie_testing import expected_vector
from website import Start

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
DTYPES = ["float32", "float16", "int8", "uint8", "binary", "ubinary"]
TEXTS = ["hello there", "a longer text of six words"]
RANGES = [[-0.5] * 7 + [0.25], [0.5] * 7 + [0.25]]
"""The last dimension has no range at all."""


def array(value: dict[bytes, Any]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(value[b"data"], value[b"type"]).reshape(value[b"shape"])


def request(**params: Any) -> dict[str, Any]:
    return {"items": [{"text": text} for text in TEXTS], "params": params}


@pytest.mark.parametrize("dtype", DTYPES)
async def test_several_outputs_at_once_in_both_wires(served: Start, dtype: str) -> None:
    body = request(output_types=["multivector", "dense"], output_dtype=dtype)
    async with served() as s:
        plain = await s.http.post("/v1/encode/any", json=body)
        packed = await s.http.post("/v1/encode/any", content=msgspec.msgpack.encode(body), headers=MSGPACK)
    items = msgspec.msgpack.decode(packed.content)["items"]
    for text, shown, item in zip(TEXTS, plain.json()["items"], items, strict=True):
        assert shown.keys() == item.keys() == {"multivector", "dense"}
        dense, multivector = array(item["dense"]["values"]), array(item["multivector"]["values"])
        assert (dense == convert(expected_vector(text), dtype)).all()
        assert len(multivector) == len(text.split())
        assert multivector.dtype == dense.dtype
        for name in ("dense", "multivector"):
            assert (shown[name]["dims"], shown[name]["dtype"]) == (8, dtype)
            assert item[name]["dims"] == 8
        assert np.array(shown["dense"]["values"]) == pytest.approx(dense.astype(float))
        assert np.array(shown["multivector"]["values"]) == pytest.approx(multivector.astype(float))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("where", ["options", "beside"])
async def test_ranges_cut_each_dimension_into_steps(served: Start, dtype: str, where: str) -> None:
    params = {"ranges": RANGES} if where == "beside" else {"options": {"ranges": RANGES}}
    async with served() as s:
        response = await s.http.post("/v1/encode/mini", json=request(output_dtype=dtype, **params))
    lowest = np.array(RANGES[0], np.float32)
    steps = np.array([1 / 255] * 7 + [1.0], np.float32)
    for text, item in zip(TEXTS, response.json()["items"], strict=True):
        stepped = np.clip(np.floor((expected_vector(text) - lowest) / steps), 0, 255)
        assert item["dense"]["values"] == (stepped - (128 if dtype == "int8" else 0)).astype(int).tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
async def test_sparse_weights_are_floats(served: Start, dtype: str) -> None:
    body = request(output_types=["sparse"], output_dtype=dtype)
    async with served() as s:
        answer = await s.http.post("/v1/encode/any", content=msgspec.msgpack.encode(body), headers=MSGPACK)
    sparse = msgspec.msgpack.decode(answer.content)["items"][0]["sparse"]
    assert array(sparse["values"]).dtype == np.dtype(dtype)
    assert array(sparse["indices"]).dtype == np.int32
    assert sparse["dtype"] == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["json", "msgpack"])
async def test_beside_packed_vectors_sparse_ones_stay_floats(served: Start, dtype: str, kind: str) -> None:
    """C11, C12: dense and token vectors packed, sparse weights float32 (float16 if asked), as sie-server answers."""
    body = request(output_types=["dense", "sparse", "multivector"], output_dtype=dtype)
    headers = {**MSGPACK, "accept": f"application/{kind}"}
    async with served() as s:
        answer = await s.http.post("/v1/encode/any", content=msgspec.msgpack.encode(body), headers=headers)
        plain = await s.http.post("/v1/encode/any", json=request(output_types=["sparse"]))
        known = s.service.model("any").capabilities
    assert known is not None
    decode = msgspec.msgpack.decode if kind == "msgpack" else msgspec.json.decode
    for item, weights in zip(decode(answer.content)["items"], plain.json()["items"], strict=True):
        dense, sparse, tokens = item["dense"], item["sparse"], item["multivector"]
        assert dense["dtype"] == tokens["dtype"] == dtype
        assert sparse["dtype"] == ("float16" if dtype == "float16" else "float32")
        assert sparse["dims"] == known.dims.get("sparse")
        assert (tokens["token_dims"], tokens["dims"]) == (known.dims["multivector"],) * 2
        values = [
            array(value) if kind == "msgpack" else np.array(value) for value in (sparse["values"], tokens["values"])
        ]
        assert tokens["num_tokens"] == len(values[1])
        assert np.allclose(values[0], weights["sparse"]["values"], rtol=1e-3)


BAD: list[tuple[dict[str, Any], str]] = [
    *(({"output_types": ["sparse"], "output_dtype": dtype}, "output_dtype") for dtype in DTYPES[2:]),
    ({"ranges": RANGES}, "ranges"),
    ({"ranges": RANGES, "output_dtype": "binary"}, "ranges"),
    *(
        ({"ranges": ranges, "output_dtype": "int8"}, "ranges")
        for ranges in (
            *("x", 7, [], [[], []], [[0.0] * 8], [[0.0] * 8, [1.0] * 7], [["a"] * 8, ["b"] * 8], {"a": 1}),
            *([["0"] * 8, ["1"] * 8], [[False] * 8, [True] * 8], [[-1e308] * 8, [1e308] * 8]),
            *([[0.0] * 7, [1.0] * 7], [[1.0] * 8, [0.0] * 8], [[1e400] * 8, [1e401] * 8], [[None] * 8, [1.0] * 8]),
        )
    ),
]


@pytest.mark.parametrize(("params", "param"), BAD)
async def test_what_does_not_go_together_is_refused(served: Start, params: dict[str, Any], param: str) -> None:
    body = msgspec.msgpack.encode(request(**params))
    headers = {**MSGPACK, "accept": "application/json"}
    async with served() as s:
        response = await s.http.post("/v1/encode/any", content=body, headers=headers)
    detail = response.json()["detail"]
    assert (response.status_code, detail["param"]) == (400, param), detail
    if param == "output_dtype":
        assert detail["supported"] == ["float32", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (3, 12), (1, 1)])
async def test_odd_matrices(dtype: str, shape: tuple[int, int]) -> None:
    """No tokens at all, and sizes that are no multiple of eight."""
    outputs = [EncodeOutput(1, multivector=np.zeros(shape, np.float32))]
    (entry,) = await native_items([Item(text="a")], outputs, ("multivector",), dtype, msgpack=True)
    values = array(entry["multivector"]["values"])
    assert len(values) == shape[0]
    assert values.shape[1] == ((shape[1] + 7) // 8 if "binary" in dtype else shape[1])
