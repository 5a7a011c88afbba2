"""Scores, entities and classes through the server, with models that take turns on a device for one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import serving
from sie_core import ModelSpec, Residency
from sie_core.residency import Registry

CLASSIFIER, TAGGER = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
QUERY = "a quick dog"
DOCUMENTS = ["the red fox", "dog", "the river runs under a blue house"]
Serve = Callable[..., AbstractAsyncContextManager[tuple[httpx.AsyncClient, Registry]]]


@pytest.fixture(scope="module")
def models(make: Any, tmp_path_factory: pytest.TempPathFactory) -> list[ModelSpec]:
    folder: Path = tmp_path_factory.mktemp("models")
    nli = dict(enumerate(("contradiction", "neutral", "entailment")))
    tags = dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "ranker": ("torch-cross-encoder", {"head": CLASSIFIER, "num_labels": 1}),
        "tagger": ("torch-entities", {"head": TAGGER, "num_labels": 5, "id2label": tags}),
        "judge": ("torch-classifier", {"head": CLASSIFIER, "num_labels": 3, "id2label": nli}),
    }
    return [
        make.spec(make.transformer(folder / name, **settings), adapter) for name, (adapter, settings) in kinds.items()
    ]


@pytest.fixture
def serve(models: list[ModelSpec]) -> Serve:
    return partial(serving, models)


async def asked(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body, headers={"accept": "application/json"})
    assert response.status_code == 200, response.text
    return response.json()


async def test_scores(serve: Serve, make: Any, models: list[ModelSpec], load: Any) -> None:
    from sie_core import BatchRequest, Item, RequestParams, Task

    items = [Item(text=document) for document in DOCUMENTS]
    engine = load(models[0])
    outputs = engine.run(engine.prepare(BatchRequest(Task.SCORE, items, RequestParams(), query=Item(text=QUERY))))
    expected = [output.score for output in outputs]
    best = sorted(range(3), key=lambda index: -expected[index])
    async with serve() as (http, _):
        found = await asked(http, "/v1/score/ranker", query={"text": QUERY}, items=[{"text": one} for one in DOCUMENTS])
        ranked = await asked(http, "/v1/rerank", model="ranker", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each["item_id"] for each in found["scores"]] == [f"item-{index}" for index in best]
    assert [each["score"] for each in found["scores"]] == pytest.approx([expected[index] for index in best], abs=1e-5)
    assert [each["index"] for each in ranked["results"]] == best[:2]
    assert found["usage"]["input_tokens"] == sum(output.tokens for output in outputs)


async def test_raw_scores_are_those_before_the_activation(models: list[ModelSpec], make: Any, tmp_path: Path) -> None:
    """C9: Infinity's ``raw_scores`` is done by what has an activation, and refused by what has none."""
    body, texts = (
        {"query": QUERY, "documents": DOCUMENTS},
        make.spec(make.transformer(tmp_path / "words", head="AutoModelForMaskedLM"), "torch-sparse"),
    )
    async with serving([models[0], texts]) as (http, _):
        own = await asked(http, "/v1/rerank", model="ranker", raw_scores=False, **body)
        raw = await asked(http, "/v1/rerank", model="ranker", raw_scores=True, **body)
        refused = await http.post("/v1/rerank", json={**body, "model": texts.name, "raw_scores": True})
    logits = [one["relevance_score"] for one in raw["results"]]
    assert [one["relevance_score"] for one in own["results"]] == pytest.approx(
        [1 / (1 + exp(-x)) for x in logits], abs=1e-5
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "raw_scores")


async def test_entities_and_classes(serve: Serve) -> None:
    items = [{"text": one} for one in DOCUMENTS]
    async with serve() as (http, _):
        tagged = await asked(http, "/v1/extract/tagger", items=items)
        judged = await asked(http, "/v1/extract/judge", items=items)
        labelled = await asked(http, "/v1/extract/judge", items=items, params={"labels": ["fox", "dog", "house"]})
    spans = [entity for item in tagged["items"] for entity in item["entities"]]
    assert spans
    for text, item in zip(DOCUMENTS, tagged["items"], strict=True):
        assert all(text[each["start"] : each["end"]] == each["text"] for each in item["entities"])
    for answer, labels in ((judged, {"contradiction", "neutral", "entailment"}), (labelled, {"fox", "dog", "house"})):
        for item in answer["items"]:
            assert {each["label"] for each in item["classifications"]} == labels
            assert sum(each["score"] for each in item["classifications"]) == pytest.approx(1, abs=1e-5)


async def test_errors_name_the_item_and_what_there_is(serve: Serve) -> None:
    long = "fox " * 60
    async with serve() as (http, _):
        replies = [
            await http.post(
                "/v1/score/ranker", json={"query": {"text": "a"}, "items": [{"text": "b"}, {"text": long}]}
            ),
            await http.post("/v1/extract/tagger", json={"items": [{"text": "fox"}], "params": {"labels": ["ORG"]}}),
            await http.post("/v1/extract/ranker", json={"items": [{"text": "fox"}]}),
            await http.post("/v1/encode/judge", json={"items": [{"text": "fox"}]}),
            await http.post("/v1/score/judge", json={"query": {"text": "a"}, "items": [{"text": "fox"}]}),
        ]
    assert [reply.status_code for reply in replies] == [400] * 5
    said = [reply.text for reply in replies]
    assert '"index":1' in said[0].replace(" ", "")
    assert "PER" in said[1]
    assert "LOC" in said[1]
    assert "score" in said[2]
    assert "extract" in said[3]
    assert "extract" in said[4]


@pytest.mark.parametrize("model", ["tagger", "judge"])
async def test_a_schema_is_not_passed_over(serve: Serve, model: str) -> None:
    body = {"items": [{"text": "fox"}], "params": {"output_schema": {"type": "object"}}}
    async with serve() as (http, _):
        reply = await http.post(f"/v1/extract/{model}", json=body)
        after = await http.post(f"/v1/extract/{model}", json={**body, "params": {"output_schema": None}})
    assert (reply.status_code, reply.json()["detail"]["param"]) == (400, "output_schema")
    assert after.status_code == 200


async def test_labels_and_templates_have_limits(serve: Serve) -> None:
    """They are multiplied: a small request must not become gigabytes."""
    labels = [str(number) for number in range(1000)]
    template = "{} " + "a " * 3000
    async with serve() as (http, _):
        replies = [
            await http.post(
                "/v1/extract/judge",
                json={
                    "items": [{"text": "fox"}],
                    "params": {"labels": labels, "truncate": True, "options": {"hypothesis_template": template}},
                },
            ),
            await http.post("/v1/extract/tagger", json={"items": [{"text": "a"}], "params": {"labels": ["x" * 10**6]}}),
            await http.post(
                "/v1/extract/tagger", json={"items": [{"text": "a"}], "params": {"options": {"x" * 10**6: 1}}}
            ),
        ]
        one = await asked(http, "/v1/extract/judge", items=[{"text": "fox"}], params={"labels": labels})
    assert [reply.status_code for reply in replies] == [400] * 3
    assert max(len(reply.content) for reply in replies) < 1000
    params = [reply.json()["detail"]["param"][:20] for reply in replies]
    assert params == ["options.hypothesis_t", "labels", "options.xxxxxxxxxxxx"]
    assert len(one["items"][0]["classifications"]) == 1000


async def test_they_take_turns_and_answer_as_before(serve: Serve, models: list[ModelSpec]) -> None:
    items = [{"text": one} for one in DOCUMENTS]
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "ranker": ("/v1/score/ranker", {"query": {"text": QUERY}, "items": items}),
        "tagger": ("/v1/extract/tagger", {"items": items}),
        "judge": ("/v1/extract/judge", {"items": items, "params": {"labels": ["fox", "dog"]}}),
    }
    answers: dict[str, set[str]] = {name: set() for name in requests}
    async with serve(256 * 1024) as (http, registry):
        for turn in range(9):
            name = list(requests)[turn % 3]
            path, body = requests[name]
            response = await http.post(path, json=body, headers={"accept": "application/json"})
            assert response.status_code == 200, response.text
            answers[name].add(response.text)
            assert registry.status(name).residency is Residency.RESIDENT
            if turn >= 3:
                others = {registry.status(other).residency for other in requests if other != name}
                assert others == {Residency.PARKED}
    assert {name: len(found) for name, found in answers.items()} == dict.fromkeys(requests, 1)
