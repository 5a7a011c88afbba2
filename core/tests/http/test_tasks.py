"""``/v1/score`` and ``/v1/extract``: the native dialect, as sie-sdk reads it, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from sie_core import Classification, ExtractOutput, Item
from sie_core.http.routes import tasks
from sie_core.http.wire import pack
from sie_testing import expected_score
from website import Start

MSGPACK = {"content-type": "application/msgpack", "accept": "application/msgpack"}
DOCUMENTS = ["a blue whale", "a red fox", "red"]


def items(*texts: str) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def best_first(query: str, texts: list[str]) -> list[tuple[str, float]]:
    scored = [(f"item-{index}", expected_score(query, text)) for index, text in enumerate(texts)]
    return sorted(scored, key=lambda pair: -pair[1])


# --- score -------------------------------------------------------------------------------------------


async def test_scores_come_best_first_with_ids_that_are_strings(served: Start) -> None:
    """C12: an item without an id is known by its place, as sie-server writes it."""
    documents = [{"id": "whale", "text": DOCUMENTS[0]}, {"text": DOCUMENTS[1]}, {"id": "short", "text": DOCUMENTS[2]}]
    async with served() as s:
        response = await s.http.post("/v1/score/ranker", json={"query": {"text": "red fox"}, "items": documents})
    body = response.json()
    assert response.status_code == 200
    assert body["model"] == "ranker"
    assert body["usage"] == {"input_tokens": 7}
    assert [one["rank"] for one in body["scores"]] == [0, 1, 2]
    names = {"item-0": "whale", "item-1": "item-1", "item-2": "short"}
    expected = [(names[place], score) for place, score in best_first("red fox", DOCUMENTS)]
    assert [(one["item_id"], one["score"]) for one in body["scores"]] == expected


async def test_scores_in_msgpack(served: Start) -> None:
    asked = {"query": {"id": "q", "text": "red fox"}, "items": items(*DOCUMENTS)}
    async with served() as s:
        response = await s.http.post("/v1/score/ranker", content=msgspec.msgpack.encode(asked), headers=MSGPACK)
    assert response.headers["content-type"] == "application/msgpack"
    answer = msgspec.msgpack.decode(response.content)
    assert answer["query_id"] == "q"
    assert [(one["item_id"], one["score"]) for one in answer["scores"]] == best_first("red fox", DOCUMENTS)


async def test_a_query_may_be_a_bare_string_and_models_that_encode_are_compared(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/score/late", json={"query": "a red fox", "items": items(*DOCUMENTS)})
        encoded = await s.http.post(
            "/v1/encode/late", json={"items": items(*DOCUMENTS), "params": {"output_types": ["multivector"]}}
        )
        asked = await s.http.post(
            "/v1/encode/late",
            json={"items": items("a red fox"), "params": {"output_types": ["multivector"], "is_query": True}},
        )
    query = asked.json()["items"][0]["multivector"]["values"]

    def maxsim(document: list[list[float]]) -> float:
        return sum(max(sum(x * y for x, y in zip(one, other, strict=True)) for other in document) for one in query)

    expected = {f"item-{i}": maxsim(item["multivector"]["values"]) for i, item in enumerate(encoded.json()["items"])}
    scores = response.json()["scores"]
    assert {one["item_id"]: one["score"] for one in scores} == pytest.approx(expected, abs=1e-5)
    assert scores[0]["item_id"] == "item-1"


async def test_options_reach_the_engine(served: Start) -> None:
    long = " ".join(["word"] * 20)
    async with served() as s:
        refused = await s.http.post("/v1/score/ranker", json={"query": "word", "items": items("fine", long)})
        cut = await s.http.post(
            "/v1/score/ranker", json={"query": "word", "items": items("fine", long), "options": {"truncate": True}}
        )
    assert refused.json()["detail"]["code"] == "INPUT_TOO_LONG"
    assert refused.json()["detail"]["index"] == 1
    assert cut.status_code == 200


BAD_SCORES: list[tuple[dict[str, Any], str, int | None]] = [
    ({"items": []}, "items", None),
    ({"items": None}, "items", None),
    ({"items": "a text"}, "items", None),
    ({"items": ["a text"]}, "items", 0),
    ({"items": items(*["a"] * 1001)}, "items", 1000),
    ({"items": [{"text": "fine"}, {"text": ""}]}, "items", 1),
    ({"items": [{"text": "fine"}, {}, {"text": "fine"}]}, "items", 1),
    ({"items": [{"text": "fine"}, {"audio": {}}]}, "items", 1),
    ({"query": None}, "query", None),
    ({"query": ""}, "query", None),
    ({"query": 7}, "query", None),
    ({"query": {}}, "query", None),
    ({"query": {"text": ["a"]}}, "query", None),
    ({"instruction": 7}, "instruction", None),
    ({"options": []}, "options", None),
    ({"options": {"truncate": "yes"}}, "truncate", None),
    ({"lora": ""}, "lora", None),
    ({"querry": "x"}, "querry", None),
    ({"items": [{"text": "fine"}, {"images": [{"data": "iVBORw0KGgo"}]}]}, "items", 1),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD_SCORES)
async def test_bad_requests_to_score(served: Start, change: dict[str, Any], param: str, index: int | None) -> None:
    body = {"query": "red", "items": items("fine"), **change}
    async with served() as s:
        response = await s.http.post("/v1/score/ranker", json=body)
        after = await s.http.post("/v1/score/ranker", json={"query": "red", "items": items("fine")})
    detail = response.json()["detail"]
    assert response.status_code == 400, detail
    assert (detail["code"], detail["param"], detail.get("index")) == ("INVALID_INPUT", param, index)
    assert response.headers["x-should-retry"] == "false"
    assert after.status_code == 200


async def test_a_thousand_items_are_not_too_many(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/score/ranker", json={"query": "red", "items": items(*["a"] * 1000)})
    assert len(response.json()["scores"]) == 1000


@pytest.mark.parametrize(
    ("path", "body", "supported"),
    [
        ("/v1/score/mini", {"query": "q", "items": items("a")}, ["encode"]),
        ("/v1/score/finder", {"query": "q", "items": items("a")}, ["extract"]),
        ("/v1/extract/ranker", {"items": items("a"), "params": {"labels": ["x"]}}, ["score"]),
        ("/v1/extract/chat", {"items": items("a")}, ["encode", "generate"]),
        ("/v1/encode/ranker", {"items": items("a")}, ["score"]),
        ("/v1/score/talks-only", {"query": "q", "items": items("a")}, ["generate"]),
    ],
)
async def test_what_a_model_cannot_do_is_refused_with_what_it_can(
    served: Start, path: str, body: dict[str, Any], supported: list[str]
) -> None:
    async with served() as s:
        response = await s.http.post(path, json=body)
        state = (await s.http.get(f"/v1/models/{path.split('/')[-1]}")).json()["state"]
    detail = response.json()["detail"]
    assert response.status_code == 400
    assert detail["supported"] == supported
    assert state == "available"  # nothing was loaded for it


async def test_scores_that_are_no_numbers_name_the_items(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/score/ranker", json={"query": "q", "items": items("fine", "bad")})
        after = await s.http.post("/v1/score/ranker", json={"query": "q", "items": items("fine")})
    detail = response.json()["detail"]
    assert (response.status_code, detail["code"], detail["items"]) == (500, "INFERENCE_ERROR", [1])
    assert after.status_code == 200


async def test_a_bad_item_fails_its_own_request_only(served: Start) -> None:
    long = " ".join(["word"] * 20)
    bodies = [{"query": "q", "items": items("fine", "x" if number % 3 else long)} for number in range(12)]
    async with served() as s:
        answers = await asyncio.gather(*(s.http.post("/v1/score/ranker", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200 if number % 3 else 400 for number in range(12)]


async def test_an_unknown_model_and_a_wrong_method(served: Start) -> None:
    async with served() as s:
        unknown = await s.http.post("/v1/score/rankr", json={"query": "q", "items": items("a")})
        method = await s.http.get("/v1/score/ranker")
    assert (unknown.status_code, unknown.json()["detail"]["suggestions"]) == (404, ["ranker"])
    assert method.status_code == 405


# --- extract -----------------------------------------------------------------------------------------


async def test_extractions_of_every_kind(served: Start) -> None:
    """C12: an item always has an ``id`` and ``data``, as sie-server's have."""
    asked = {"items": [{"id": "one", "text": "the Fox met a fox"}, {"text": "nobody"}], "params": {"labels": ["fox"]}}
    async with served() as s:
        response = await s.http.post("/v1/extract/finder", json=asked)
        packed = await s.http.post("/v1/extract/finder", content=msgspec.msgpack.encode(asked), headers=MSGPACK)
    body = response.json()
    assert body["model"] == "finder"
    assert body["usage"] == {"input_tokens": 6}
    first, second = body["items"]
    assert first["id"] == "one"
    assert second["id"] == "item-1"
    assert first["data"] == second["data"] == {}
    assert first["entities"] == [
        {"text": "Fox", "label": "fox", "score": 1.0, "start": 4, "end": 7},
        {"text": "fox", "label": "fox", "score": 1.0, "start": 14, "end": 17},
    ]
    assert first["relations"] == [{"head": "Fox", "tail": "fox", "relation": "next to", "score": 0.5}]
    assert first["classifications"] == [{"label": "fox", "score": 0.4}]
    assert first["objects"] == second["entities"] == []
    assert msgspec.msgpack.decode(packed.content) == body


async def test_models_with_labels_of_their_own_need_none_and_see_images(served: Start) -> None:
    pixel = {"data": GIF}
    async with served() as s:
        response = await s.http.post("/v1/extract/tagger", json={"items": [{"text": "an owl", "images": [pixel]}]})
        needed = await s.http.post("/v1/extract/finder", json={"items": items("an owl")})
    found = response.json()["items"][0]
    assert found["entities"][0]["label"] == "owl"
    assert found["objects"] == [{"label": "fox", "score": 0.75, "bbox": [0.0, 0.0, 10.0, 20.0]}]
    assert (needed.status_code, needed.json()["detail"]["param"]) == (400, "labels")


GIF = "R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="

BAD_EXTRACTIONS: list[tuple[dict[str, Any], str, int | None]] = [
    ({"items": []}, "items", None),
    ({"items": {}}, "items", None),
    ({"items": items("fine", "")}, "items", 1),
    ({"items": items(*["a"] * 2049)}, "items", 2048),
    ({"params": []}, "params", None),
    ({"params": {"labels": []}}, "labels", None),
    ({"params": {"labels": "fox"}}, "labels", None),
    ({"params": {"labels": ["fox", 7]}}, "labels", 1),
    ({"params": {"labels": ["fox", ""]}}, "labels", 1),
    ({"params": {"labels": [str(number) for number in range(10_000)]}}, "labels", 1000),
    ({"params": {"output_schema": "x"}}, "output_schema", None),
    ({"params": {"lables": ["fox"]}}, "params", None),
    ({"labels": ["fox"]}, "labels", None),
]


@pytest.mark.parametrize(("change", "param", "index"), BAD_EXTRACTIONS)
async def test_bad_requests_to_extract(served: Start, change: dict[str, Any], param: str, index: int | None) -> None:
    body = {"items": items("fine"), "params": {"labels": ["fox"]}, **change}
    async with served() as s:
        response = await s.http.post("/v1/extract/finder", json=body)
    detail = response.json()["detail"]
    assert response.status_code == 400, detail
    assert (detail["param"], detail.get("index")) == (param, index)


async def test_an_extraction_that_is_no_number_names_its_item(served: Start) -> None:
    async with served() as s:
        response = await s.http.post(
            "/v1/extract/finder", json={"items": items("fine", "bad"), "params": {"labels": ["bad"]}}
        )
    assert (response.status_code, response.json()["detail"]["items"]) == (500, [1])


async def test_models_say_what_may_be_asked_of_them(served: Start) -> None:
    async with served() as s:
        listed = {card["name"]: card for card in (await s.http.get("/v1/models")).json()["models"]}
        await s.http.post("/v1/admin/models/late/load")
        late = (await s.http.get("/v1/models/late")).json()
    assert listed["ranker"]["tasks"] in ([], ["score"])
    assert late["tasks"] == ["encode", "score"]


@pytest.mark.parametrize("msgpack", [False, True])
async def test_the_event_loop_turns_while_a_large_answer_is_written(msgpack: bool) -> None:
    found = ExtractOutput(1, classifications=tuple(Classification(f"label {n}", 0.5) for n in range(1000)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    entries = await tasks._entries([Item(text="a", id=str(n)) for n in range(20)], [found] * 20, msgpack=msgpack)
    counting.cancel()
    assert turns >= 8  # after two thousand classes at the latest
    body = pack(entries, msgpack=msgpack).body
    whole = msgspec.msgpack.decode(body) if msgpack else msgspec.json.decode(body)
    assert [one["id"] for one in whole] == [str(n) for n in range(20)]
    assert whole[3]["classifications"][999] == {"label": "label 999", "score": 0.5}


async def test_labels_that_are_no_unicode_are_written_all_the_same() -> None:
    """They come from a model's files, which may hold anything."""
    found = ExtractOutput(1, classifications=(Classification("a\ud800b", 0.5),))
    for msgpack in (False, True):
        body = pack(await tasks._entries([Item(text="a")], [found], msgpack=msgpack), msgpack=msgpack).body
        (entry,) = msgspec.msgpack.decode(body) if msgpack else msgspec.json.decode(body)
        assert entry["classifications"] == [{"label": "a?b", "score": 0.5}]
