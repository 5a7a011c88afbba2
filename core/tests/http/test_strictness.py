"""What is neither used nor right is refused, rather than passed over: the document promises it, and a typo is told."""

from __future__ import annotations

from typing import Any

import pytest
from website import Start

RERANK = {"model": "ranker", "query": "red fox", "documents": ["a red fox"]}
SCORE = {"query": "red fox", "items": [{"text": "a red fox"}]}
EXTRACT = {"items": [{"text": "the fox"}]}


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
