"""``/openapi.json`` says what the server does: its routes, who may ask, its fields, no more and no less."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from described import BY_ID, DOCUMENT, address, operations, problems, resolved, schema
from openapi_spec_validator import OpenAPIV31SpecValidator
from sie_core.http import cohere_inputs, fields, foreign, generation_inputs, inputs, openai_inputs, task_inputs
from sie_core.http.document import build
from sie_core.http.limits import Limits
from starlette.routing import Route
from website import Start, key_line

LIMITS = Limits(body_bytes=1 << 20, item_bytes=1 << 16, items=1000, body_s=1.0)


# --- the document itself -----------------------------------------------------------------------------


def test_it_is_a_valid_document() -> None:
    plain = json.loads(json.dumps(DOCUMENT))
    assert [error.message for error in OpenAPIV31SpecValidator(plain).iter_errors()] == []
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)


def test_every_part_of_it_is_used() -> None:
    text = json.dumps(DOCUMENT)
    unused = [
        f"{kind}/{name}"
        for kind in ("schemas", "responses", "headers")
        for name in DOCUMENT["components"][kind]
        if f'"#/components/{kind}/{name}"' not in text
    ]
    assert unused == []


async def test_it_is_served_to_whom_may_read(served: Start) -> None:
    async with served(api_keys=(key_line("inference", "reader"),)) as s:
        refused = await s.http.get("/openapi.json")
        found = await s.http.get("/openapi.json", headers={"authorization": "Bearer reader"})
        head = await s.http.head("/openapi.json", headers={"authorization": "Bearer reader"})
        wrong = await s.http.post("/openapi.json", headers={"authorization": "Bearer reader"})
        version = s.service.status().version
    assert refused.status_code == 401
    assert refused.json().keys() == {"error", "detail"}
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.json() == json.loads(json.dumps(build(version)))
    assert found.json()["info"]["version"] == version
    assert (head.status_code, wrong.status_code) == (200, 405)


def test_nothing_of_it_is_read_before_somebody_asks() -> None:
    code = """
import sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
import sie_core.cli, sie_core.http.app
from sie_core.http.document import as_json
parts = lambda: [name for name in opened if name.endswith(".yaml")]
assert parts() == [], parts()
as_json("1")
assert len(parts()) == 5, parts()
as_json("1")
assert len(parts()) == 5, parts()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- routes ------------------------------------------------------------------------------------------


async def test_its_paths_and_methods_are_those_of_the_application(served: Start) -> None:
    async with served() as s:
        routes = [route for route in s.app.starlette.routes if isinstance(route, Route)]
    there = {(method, route.path_format) for route in routes for method in route.methods or () if method != "HEAD"}
    assert {(method.upper(), path) for method, path, _ in operations()} == there


@pytest.mark.parametrize("name", BY_ID)
async def test_who_may_ask_is_what_it_says(served: Start, name: str) -> None:
    method, path, operation = BY_ID[name]
    url = address(operation, path)
    keys = (key_line("inference", "reader"), key_line("admin", "boss"))
    async with served(api_keys=keys) as s:
        answers = [
            await s.http.request(method, url, headers={"authorization": f"Bearer {key}"} if key else {})
            for key in ("", "reader", "boss")
        ]
    nobody, reader, boss = (answer.status_code for answer in answers)
    documented = operation["responses"]
    assert (nobody == 401) == ("401" in documented) == (operation.get("security") != [])
    assert (reader == 403) == ("403" in documented)
    assert not {401, 403} & {boss}
    for answer in answers:
        if answer.status_code in (401, 403):
            said = resolved(documented[str(answer.status_code)])
            assert problems(answer.json(), said["content"]["application/json"]["schema"], exact=False) == []
            assert said["headers"].keys() <= set(answer.headers)


# --- fields ------------------------------------------------------------------------------------------


class Read(dict[str, Any]):
    """An object of a request that notes which of its fields a parser asks for."""

    def __init__(self, value: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(value)
        self._asked = asked

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return super().get(name, default)


def read_by(parse: Any, *bodies: Mapping[str, Any], rest: tuple[Any, ...] = (LIMITS,)) -> set[str]:
    asked: set[str] = set()
    for body in bodies:
        parse(Read(body, asked), *rest)
    return asked


def examples(name: str) -> list[dict[str, Any]]:
    content = BY_ID[name][2]["requestBody"]["content"]["application/json"]
    return [example["value"] for example in content["examples"].values()]


def fields_of(name: str) -> set[str]:
    return set(schema(name)["properties"])


def test_fields_that_parsers_ask_for_are_those_of_the_schemas() -> None:
    chat = read_by(generation_inputs.parse_openai, *examples("chat"), rest=("chat", LIMITS))
    completion = read_by(generation_inputs.parse_openai, *examples("completions"), rest=("completion", LIMITS))
    assert {"model"} | read_by(inputs.parse_encode, *examples("encode")) == fields_of("EncodeRequest")
    embeddings = read_by(openai_inputs.parse_embeddings, *examples("embeddings"))
    assert embeddings | set(foreign.EMBEDDINGS) == fields_of("EmbeddingsRequest")
    rerank = read_by(cohere_inputs.parse_rerank, *examples("rerank_v1"))
    assert rerank | set(foreign.RERANK) == fields_of("RerankRequest")
    assert read_by(cohere_inputs.parse_embed, *examples("embed_v2")) | set(foreign.EMBED) == fields_of("EmbedRequest")
    for name in ("ChatRequest", "CompletionRequest"):  # what is passed on unread, and nothing else
        (pattern,) = schema(name)["patternProperties"]
        assert set(pattern.removeprefix("^(").removesuffix(")$").split("|")) == fields.PASSED
        assert schema(name)["additionalProperties"] is False
    assert chat | set(fields.CHAT) == fields_of("ChatRequest")
    assert completion | set(fields.COMPLETION) == fields_of("CompletionRequest")
    assert set(task_inputs._SCORE) == fields_of("ScoreRequest")
    assert set(task_inputs._EXTRACT) == fields_of("ExtractRequest")


def test_fields_inside_of_them_too() -> None:
    asked: set[str] = set()
    items = [{"text": "a"}, {"text": "a", "images": [{"data": "R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="}]}]
    inputs.parse_encode({"items": [Read(item, asked) for item in items]}, LIMITS)
    assert asked == fields_of("Item")
    params = schema("ExtractRequest")["properties"]["params"]["anyOf"][0]
    assert set(params["properties"]) == set(task_inputs._EXTRACT_PARAMS)
    assert fields_of("EncodeParams") == set(inputs._PARAMS)
    movable = {*inputs._PARAMS} - {"options"}
    assert set(schema("EncodeParams")["properties"]["options"]["properties"]) == movable
    generate = schema("GenerateRequest")["properties"]
    own = {"prompt", "images", "grammar", "lora", "lora_adapter", "options", *generation_inputs._HINTS}
    assert set(generate) == {*fields.NATIVE, *own}
    assert set(generate["options"]["properties"]) == set(fields.SAMPLING)
    grammars = [set(one["properties"]) for one in generate["grammar"]["anyOf"] if one["type"] == "object"]
    assert grammars == [{*generation_inputs._GRAMMARS, "label", "strict"}] * 3


def test_choices_are_those_of_the_parsers() -> None:
    params = schema("EncodeParams")["properties"]
    embed = schema("EmbedRequest")["properties"]
    assert tuple(params["output_types"]["items"]["enum"]) == inputs.OUTPUT_TYPES
    assert tuple(params["output_dtype"]["enum"]) == (*inputs.DTYPES, None)
    embeddings = schema("EmbeddingsRequest")["properties"]
    assert tuple(embeddings["encoding_format"]["enum"]) == (*openai_inputs.ENCODINGS, None)
    assert tuple(embeddings["input_type"]["enum"]) == (*openai_inputs.INPUT_TYPES, None)
    assert tuple(embeddings["task"]["enum"]) == (*openai_inputs.TASKS, None)
    assert tuple(embeddings["modality"]["enum"]) == (*openai_inputs.MODALITIES, None)
    assert tuple(embeddings["output_dtype"]["enum"]) == (*openai_inputs.OUTPUT_DTYPES, None)
    for table, name in ((foreign.EMBEDDINGS, "Embeddings"), (foreign.RERANK, "Rerank"), (foreign.EMBED, "Embed")):
        for field, undone in table.items():
            harmless = schema(f"{name}Request")["properties"][field].get("enum", [None])
            assert harmless == [*undone.harmless, None], field
    assert tuple(schema("SparseVector")["properties"]["dtype"]["enum"]) == inputs.SPARSE_DTYPES
    assert tuple(embed["embedding_types"]["items"]["enum"]) == cohere_inputs.EMBEDDING_TYPES
    assert tuple(embed["input_type"]["enum"]) == (*cohere_inputs.INPUT_TYPES, None)
    assert tuple(schema("Message")["properties"]["role"]["enum"]) == generation_inputs._ROLES
    assert schema("ScoreRequest")["properties"]["items"]["maxItems"] == task_inputs.MAX_SCORED
    assert schema("RerankRequest")["properties"]["documents"]["maxItems"] == task_inputs.MAX_SCORED
