"""Answers and errors are what ``/openapi.json`` says, field by field, to its own examples and to what is refused."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from described import BY_ID, DOCUMENT, address, operations, problems, resolved, schema, strangers
from sie_core import EngineStartError, ModelLoadFailed, ModelSpec, SieError, http
from sie_core.config import TelemetryConfig
from sie_core.http.errors import _DETAILS, _HTTP_CODES, RULES, Dialect, render
from sie_core.telemetry import Telemetry
from sie_testing import FakeOptions, FaultPoints
from website import Served, Start, key_line, until

SPECS = [
    ModelSpec("minilm", "fake", options=FakeOptions(matryoshka=(4,))),
    ModelSpec(
        "everything",
        "fake",
        options=FakeOptions(outputs=("dense", "sparse", "multivector"), inputs=("text", "image"), matryoshka=(4,)),
    ),
    ModelSpec("reranker", "fake", options=FakeOptions(tasks=("score",))),
    ModelSpec("finder", "fake", options=FakeOptions(tasks=("extract",))),
    ModelSpec("chat", "fake-stream", options=FakeOptions(max_loras=1)),
    ModelSpec("broken", "fake", options=FakeOptions(fail_load="ModelSourceNotFound")),
]
"""The models that the examples name."""
KEYS = (key_line("inference", "reader"), key_line("admin", "boss"))
LOG = "the end of its log:\n  File /srv/models/loader.py, line 7"


def content_of(operation: Mapping[str, Any], response: Any) -> Mapping[str, Any]:
    kind = response.headers["content-type"].partition(";")[0]
    documented = resolved(operation["responses"][str(response.status_code)])
    return documented["content"][kind]


def cases() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, (_, _, operation) in BY_ID.items():
        body = operation.get("requestBody")
        found += [(name, one) for one in body["content"]["application/json"]["examples"]] if body else [(name, "")]
    return found


async def ready(s: Served) -> None:
    s.registry.apply(SPECS)
    await s.service.load("minilm")
    await s.service.load_lora("chat", "pirate", "path:/models/pirate")


@pytest.mark.parametrize("packed", [False, True], ids=["json", "msgpack"])
@pytest.mark.parametrize(("name", "example"), cases())
async def test_its_examples_are_answered_as_it_says(served: Start, name: str, example: str, packed: bool) -> None:
    method, path, operation = BY_ID[name]
    kind = "application/msgpack" if packed else "application/json"
    asked: dict[str, Any] = {"headers": {"accept": kind}}
    asked["params"] = {one["name"]: one["example"] for one in operation["parameters"] if one["in"] == "query"}
    if example:
        value = operation["requestBody"]["content"][kind]["examples"][example]["value"]
        asked["content"] = (msgspec.msgpack if packed else msgspec.json).encode(value)
        asked["headers"]["content-type"] = kind
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(tier={"host_cache_bytes": 1 << 26}, telemetry=telemetry) as s:
        await ready(s)
        response = await s.http.request(method, address(operation, path), **asked)
    assert response.status_code == 200, response.text
    content = content_of(operation, response)
    if "x-event" in content:
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
        assert events[-2:] == ["[DONE]", ""]
        assert len(events) > 3
        for event in events[:-2]:
            assert problems(json.loads(event), content["x-event"]) == []
    elif response.headers["content-type"].startswith("application/"):
        packs = response.headers["content-type"] == "application/msgpack"
        answer = msgspec.msgpack.decode(response.content) if packs else response.json()
        if name != "openapi":
            assert problems(answer, content["schema"]) == []
        offered = operation["responses"]["200"]["content"]
        assert packs == (packed and "application/msgpack" in offered)


async def test_models_that_failed_or_were_parked_are_shown_as_it_says(served: Start) -> None:
    reads = ("list_models", "status", "decisions", "explain")
    async with served(tier={"host_cache_bytes": 1 << 26}) as s:
        s.registry.apply(SPECS)
        for model in ("broken", "minilm"):
            await s.http.post(f"/v1/encode/{model}", json={"items": [{"text": "hello"}]})
        parked = await s.http.post("/v1/admin/models/minilm/park")
        answers = {name: await s.http.get(address(BY_ID[name][2], BY_ID[name][1])) for name in reads}
        broken = await s.http.get("/v1/models/broken")
    assert (parked.status_code, parked.json()["residency"]) == (200, "parked")
    assert broken.json()["last_error"]["error_class"] == "ModelSourceNotFound"
    assert problems(broken.json(), schema("Model")) == []
    for name, answer in answers.items():
        assert problems(answer.json(), content_of(BY_ID[name][2], answer)["schema"]) == []


# --- errors ------------------------------------------------------------------------------------------

OF_DIALECT = {"native": "encode", "openai": "chat", "cohere": "rerank_v2"}


def documented(operation: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for status, response in operation["responses"].items():
        content = resolved(response).get("content", {})
        for kind in content:
            for shape in content[kind]["schema"].get("allOf", [])[1:]:
                for inner in shape["properties"].values():
                    yield from ((int(status), code) for code in inner["properties"]["code"]["enum"])


def raised_by_hand() -> set[tuple[int, str]]:
    """Status and code of every HttpError in the sources."""
    found: set[tuple[int, str]] = set()
    for file in Path(http.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "HttpError":
                status, code = node.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    found.add((status.value, code.value))
    return found


@pytest.mark.parametrize("dialect", OF_DIALECT)
def test_every_error_of_the_table_is_there_and_no_other(dialect: str) -> None:
    foreign = Dialect(dialect) is not Dialect.NATIVE
    table = {
        ((rule.openai_status or rule.status) if foreign else rule.status, rule.code or cls.code)
        for cls, rule in RULES.items()
        if issubclass(cls, SieError)
    }
    by_hand = raised_by_hand() - {(431, "HEADERS_TOO_LARGE")}  # before there is a path: in the description
    assert {(415, "UNSUPPORTED_MEDIA_TYPE"), (408, "REQUEST_TIMEOUT"), (501, "UNSUPPORTED")} <= by_hand
    admin = {(403, "FORBIDDEN"), (501, "UNSUPPORTED")}  # on paths of one dialect only
    said = set(documented(BY_ID[OF_DIALECT[dialect]][2]))
    if not foreign:
        said |= set(documented(BY_ID["park"][2]))
    assert said | admin == table | by_hand | admin


def test_refusals_of_the_router_are_in_the_description() -> None:
    text = DOCUMENT["info"]["description"]
    said = {code for _, _, operation in operations() for _, code in documented(operation)}
    assert set(_HTTP_CODES.values()) - said == {"METHOD_NOT_ALLOWED"}
    assert "METHOD_NOT_ALLOWED" in text
    assert "NOT_FOUND" in text


def test_fields_of_errors_are_those_that_are_sent() -> None:
    error = ModelLoadFailed("m", error_class="EngineStartError", reason="no", permanent=True, attempts=1)
    for field in _DETAILS:
        setattr(error, field, "something")
    error.explained(LOG)
    shown = [msgspec.json.decode(render(error, Dialect.NATIVE, operator=one).body)["detail"] for one in (True, False)]
    assert shown[0].keys() == set(schema("Detail")["properties"])
    assert shown[0].keys() - shown[1].keys() == {"details"}


@pytest.mark.parametrize("packed", [False, True], ids=["json", "msgpack"])
@pytest.mark.parametrize("key", ["reader", "boss"])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("encode", "everything"),
        ("embeddings", "minilm"),
        ("rerank_v2", "reranker"),
        ("chat", "chat"),
        ("generate", "chat"),
    ],
)
async def test_errors_with_details_are_what_it_says(
    served: Start, name: str, model: str, key: str, packed: bool
) -> None:
    method, path, operation = BY_ID[name]
    headers = {"authorization": f"Bearer {key}", "accept": "application/msgpack" if packed else "application/json"}
    body = next(iter(operation["requestBody"]["content"]["application/json"]["examples"].values()))["value"]
    async with served(api_keys=KEYS) as s:
        s.registry.apply(SPECS)
        FaultPoints.of(model).fail("load", EngineStartError("no engine came").explained(LOG), times=1)
        answers = [
            await s.http.request(method, address(operation, path), json=body, headers=headers)
            for _ in ("fails", "cools")
        ]
        shown = [await s.http.get(url, headers=headers) for url in (f"/v1/models/{model}", "/v1/models", "/v1/status")]
    assert [answer.status_code for answer in (*answers, *shown)] == [502, 503, 200, 200, 200]
    for answer in (*answers, *shown):
        packs = answer.headers["content-type"] == "application/msgpack"
        assert packs == (packed and answer in shown)  # C13: errors are JSON
        told = msgspec.msgpack.decode(answer.content) if packs else answer.json()
        assert ("loader.py" in str(told)) is (key == "boss")
        if answer in answers:
            wanted = content_of(operation, answer)["schema"]
            assert problems(told, wanted, exact=False) == []
            assert strangers(told, wanted) == []
    for answer, known in zip(shown, ("Model", "Models", "Status"), strict=True):
        packs = answer.headers["content-type"] == "application/msgpack"
        assert problems(msgspec.msgpack.decode(answer.content) if packs else answer.json(), schema(known)) == []


@pytest.mark.parametrize("key", ["reader", "boss"])
@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("completions", {"model": "slow", "prompt": "a " * 100}),
        ("chat", {"model": "slow", "messages": [{"role": "user", "content": "a " * 100}]}),
        ("generate", {"prompt": "a " * 100}),
    ],
)
async def test_an_answer_that_breaks_off_ends_as_it_says(
    served: Start, name: str, body: dict[str, Any], key: str
) -> None:
    _, path, operation = BY_ID[name]
    async with served(api_keys=KEYS) as s:
        await s.service.load("slow")
        engine = s.engine("slow")
        asked = {"json": {**body, "stream": True}, "headers": {"authorization": f"Bearer {key}"}}
        asking = asyncio.create_task(s.http.post(path.replace("{model}", "slow"), **asked))
        await until(lambda: engine.emitted)
        engine.die("it fell over", LOG)
        broken = await asking
    content = content_of(operation, broken)
    *pieces, last = [json.loads(one.removeprefix("data: ")) for one in broken.text.split("\n\n")[:-1]]
    assert pieces
    assert [problems(piece, content["x-event"]) for piece in pieces] == [[]] * len(pieces)
    assert problems(last, content["x-error"], exact=False) == strangers(last, content["x-error"]) == []
    assert (last["error"].get("details") == LOG) is (key == "boss")


@pytest.mark.parametrize("name", [name for name, (_, _, o) in BY_ID.items() if "requestBody" in o])
async def test_what_is_refused_has_the_shape_and_the_headers_that_it_says(served: Start, name: str) -> None:
    method, path, operation = BY_ID[name]
    url = address(operation, path)
    asked: list[dict[str, Any]] = [
        {"content": b"{", "headers": {"content-type": "application/json"}},
        {"content": b"x", "headers": {"content-type": "text/plain"}},
        {"content": b"x" * 3000, "headers": {"content-type": "application/json"}},
        {"content": b"\xc1", "headers": {"content-type": "application/msgpack"}},
    ]
    async with served(max_body_bytes=2048) as s:
        s.registry.apply(SPECS)
        answers = [await s.http.request(method, url, **one) for one in asked]
    assert [answer.status_code for answer in answers] == [400, 415, 413, 400]
    for answer in answers:
        documented = resolved(operation["responses"][str(answer.status_code)])
        body = answer.json()
        assert problems(body, content_of(operation, answer)["schema"], exact=False) == []
        assert strangers(body, content_of(operation, answer)["schema"]) == []
        for header, said in documented["headers"].items():
            if resolved(said).get("required"):
                assert answer.headers[header] in resolved(said)["schema"]["enum"]
