"""What is neither used nor right is refused, rather than passed over: the document promises it, and a typo is told."""

from __future__ import annotations

from typing import Any

import pytest
from website import Start

RERANK = {"model": "ranker", "query": "red fox", "documents": ["a red fox"]}
SCORE = {"query": "red fox", "items": [{"text": "a red fox"}]}
EXTRACT = {"items": [{"text": "the fox"}]}
ITEMS = {"items": [{"text": "hello"}]}
GIF = "R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/generate/chat", {"top_p": 0.5, "options": {"top_p": 7}}, "top_p"),
        ("/v1/generate/chat", {"options": ""}, "options"),
        ("/v1/generate/chat", {"images": ""}, "images"),
        ("/v1/generate/chat", {"images": False}, "images"),
        ("/v1/generate/chat", {"grammar": {"regex": "a", "strict": "yes"}}, "grammar.strict"),
        ("/v1/generate/chat", {"grammar": {"json_schema": {}, "label": 7}}, "grammar.label"),
        ("/v1/rerank", {**RERANK, "relevant_spans": 0}, "relevant_spans"),
        ("/v1/score/ranker", {**SCORE, "truncate": True, "options": {"truncate": "no"}}, "truncate"),
        ("/v1/score/adaptable", {**SCORE, "lora": "pirate", "options": {"lora": 7}}, "lora"),
        ("/v1/extract/tagger", {**EXTRACT, "params": {"truncate": True, "options": {"truncate": 1}}}, "truncate"),
        ("/v1/admin/models/mini/pin", {"wait_s": -1}, "wait_s"),
        ("/v1/admin/models/mini/unpin", {"wait_s": "soon"}, "wait_s"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_values_that_would_not_be_used_are_checked_too(
    served: Start, path: str, body: dict[str, Any], param: str
) -> None:
    if path.startswith("/v1/generate"):
        body = {"prompt": "the cat sat", **body}
    async with served() as s:
        response = await s.http.post(path, json=body)
    assert (response.status_code, (response.json().get("error") or response.json()["detail"])["param"]) == (400, param)


async def test_what_says_nothing_may_stand_there(served: Start) -> None:
    async with served() as s:
        answers = [
            await s.http.post("/v1/generate/chat", json={"prompt": "a b", "images": [], "options": []}),
            await s.http.post("/v1/generate/chat", json={"prompt": "a b", "images": None, "options": None}),
            await s.http.post("/v1/generate/chat", json={"prompt": "a b", "options": {"top_p": None}}),
            await s.http.post("/v1/rerank", json={**RERANK, "relevant_spans": False}),
            await s.http.post("/v1/admin/models/mini/pin", json={"wait_s": None}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.parametrize(
    ("method", "address", "param"),
    [
        ("GET", "/v1/admin/decisions?modle=mini", "modle"),
        ("GET", "/v1/admin/decisions?limit=1&limit=x", "limit"),
        ("GET", "/v1/admin/decisions?limit=-1", "limit"),
        ("GET", "/v1/admin/decisions?limit=1e3", "limit"),
        ("GET", "/v1/admin/decisions?%FF%00=1", "\ufffd\x00"),
        ("DELETE", "/v1/admin/models/adaptable/loras/pirate?wait=5", "wait"),
        ("DELETE", "/v1/admin/models/adaptable/loras/pirate?wait_s=", "wait_s"),
        ("DELETE", "/v1/admin/models/adaptable/loras/pirate?wait_s=nan", "wait_s"),
    ],
)
async def test_a_query_is_as_strict_as_a_body(served: Start, method: str, address: str, param: str) -> None:
    async with served() as s:
        response = await s.http.request(method, address)
    assert response.status_code == 400
    assert response.json()["detail"]["param"] == param


async def test_of_a_query_field_that_comes_twice_the_last_counts(served: Start) -> None:
    async with served() as s:
        for model in ("half", "other-half", "half"):
            await s.encode(model)
        everything = (await s.http.get("/v1/admin/decisions")).json()["decisions"]
        newest = await s.http.get("/v1/admin/decisions?limit=9&limit=1&model=half&model=other-half")
    assert len(everything) > 1
    assert (
        newest.json()["decisions"]
        == [one for one in everything if "other-half" in (one["model"], *one["victims"])][-1:]
    )


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        # C1: what stands in the wrong place used to be passed over, and ordinary document vectors came back
        ("/v1/encode/mini", {**ITEMS, "is_query": True}, "'is_query' belongs under 'params'"),
        ("/v1/encode/mini", {**ITEMS, "output_dtype": "int8"}, "'output_dtype' belongs under 'params'"),
        ("/v1/encode/mini", {**ITEMS, "options": {"is_query": True}}, "'options' belongs under 'params'"),
        ("/v1/encode/mini", {**ITEMS, "parms": {}}, "did you mean 'params'?"),
        ("/v1/encode/mini", {**ITEMS, "text": "hello"}, "'text' belongs in an item of 'items'"),
        ("/v1/encode/mini", {**ITEMS, "params": {"items": []}}, "'items' belongs beside 'params'"),
        ("/v1/encode/mini", {**ITEMS, "params": {"text": "a"}}, "'text' belongs in an item of 'items'"),
        ("/v1/encode/mini", {**ITEMS, "params": {"labels": ["fox"]}}, "Unknown field 'labels' in 'params'"),
        ("/v1/encode/mini", {"items": [{"text": "a", "is_query": True}]}, "'is_query' belongs under 'params'"),
        ("/v1/encode/mini", {"items": [{"text": "a"}, {"text": "b", "txt": "c"}]}, "item 1: Unknown field 'txt'"),
        ("/v1/encode/looker", {"items": [{"image": GIF}]}, "did you mean 'images'?"),
        ("/v1/encode/looker", {"items": [{"images": [{"data": GIF, "fromat": "gif"}]}]}, "did you mean 'format'?"),
        ("/v1/encode/looker", {"items": [{"images": [{"data": GIF, "url": GIF}]}]}, "one of 'data', 'url' and 'image"),
        (
            "/v1/score/ranker",
            {**SCORE, "params": {"truncate": True}},
            "Unknown field 'params' in the request; known: model, query, items",
        ),
        ("/v1/score/ranker", {**SCORE, "is_query": True}, "Unknown field 'is_query'"),
        ("/v1/score/ranker", {**SCORE, "query": {"text": "a", "instruction": "b"}}, "'instruction' belongs beside"),
        ("/v1/score/ranker", {**SCORE, "items": [{"text": "a", "truncate": True}]}, "'truncate' belongs beside"),
        ("/v1/extract/finder", {**EXTRACT, "labels": ["fox"]}, "'labels' belongs under 'params'"),
        ("/v1/extract/finder", {"items": [{"text": "a", "labels": ["fox"]}]}, "'labels' belongs under 'params'"),
        ("/v1/extract/finder", {**EXTRACT, "params": {"output_types": ["dense"]}}, "Unknown field 'output_types'"),
        (
            "/v1/encode/mini",
            {**ITEMS, "params": {"options": {"output_types": ["dense"]}}},
            "'output_types' belongs beside 'options'",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_a_field_in_the_wrong_place_is_refused(served: Start, path: str, body: dict[str, Any], said: str) -> None:
    """C1: a field that would be passed over is refused, and the message says where it belongs."""
    async with served() as s:
        response = await s.http.post(path, json=body)
    assert response.status_code == 400, response.text
    detail = response.json()["detail"]
    assert said in detail["message"]
    assert detail["param"]


async def test_what_clients_send_beside_is_no_mistake(served: Start) -> None:
    """C1: the model again, and an item's metadata, which the public client has a type for."""
    async with served() as s:
        plain = await s.encode("org/mini")
        named = await s.http.post("/v1/encode/org/mini", json={**ITEMS, "model": "org/mini", "params": None})
        items = await s.http.post("/v1/encode/org/mini", json={"items": [{"text": "hello", "metadata": {"a": 1}}]})
        odd = await s.http.post("/v1/encode/org/mini", json={"items": [{"text": "hello", "metadata": "x"}]})
    assert plain.json()["items"] == named.json()["items"] == items.json()["items"]
    assert (odd.status_code, odd.json()["detail"]["index"]) == (400, 0)
