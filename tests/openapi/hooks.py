"""What schemathesis is told beside the document: msgpack, the names of models, and what no schema can say."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import jsonschema
import msgspec
import schemathesis

MSGPACK = "application/msgpack"

ENCODERS = ["minilm", "org/short", "everything", "late"]
RANKERS = ["reranker", "late", "everything"]
TALKERS = ["chat", "talker"]
OTHERS = ["gone", "nobody"]
EVERY = [*ENCODERS, "reranker", "finder", *TALKERS, *OTHERS]

BY_OPERATION = {
    "encode": [*ENCODERS, *OTHERS],
    "score": [*RANKERS, *OTHERS],
    "extract": ["finder", *OTHERS],
    "generate": [*TALKERS, *OTHERS],
}
BY_SCHEMA = {
    "EmbeddingsRequest": ["minilm", "everything", "org/short", *OTHERS],
    "EmbedRequest": ["everything", "minilm", *OTHERS],
    "RerankRequest": [*RANKERS, *OTHERS],
    "ChatRequest": [*TALKERS, *OTHERS],
    "CompletionRequest": [*TALKERS, *OTHERS],
}
"""Which models of `sie.yaml` a request is for."""
LORAS = ["pirate", "parrot"]
PIXEL = "R0lGODlhAQABAIAAAP///wAAACwAAAAAAQABAAACAkQBADs="

BEYOND_SCHEMAS = [
    r"the text is empty",  # for the fake engines that is white space, too
    r"the query is empty",
    r"has \d+ tokens and the model takes",
    r"no .* (output|dimensions)",
    r"gives no \w+ output",
    r"does not (encode|score|extract|generate)",
    r"sparse output comes as",
    r"'ranges' ",
    r"the image|an image must|a data URL must|images are not fetched",
    r"is .* and, in 'options'",
    r"LoRA|lora",
    r"is not a model source|can't be (the name|a revision)|would leave its package|an absolute path",
    r"images",
    r"there is no engine to park|can't be parked",
    r"must be a data URL",
    r"refuses this",
    r"nested too deep",
    r"send one of them",
    r"come with encoding_format: float only",
    r"dimensions, not \d+",
    r"'raw_scores' is not supported",
    r"is the data URL of an image",
]
"""Why what is right by its schema may be refused."""


@schemathesis.serializer(MSGPACK)
def to_msgpack(ctx: Any, value: Any) -> Any:
    return msgspec.msgpack.encode(_packable(value))


def _packable(value: Any) -> Any:
    """msgpack has no whole numbers beyond 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return 1e300 if value > 0 else -1e300
    if isinstance(value, dict):
        return {name: _packable(inner) for name, inner in value.items()}
    return [_packable(inner) for inner in value] if isinstance(value, list) else value


@schemathesis.deserializer(MSGPACK)
def from_msgpack(ctx: Any, response: Any) -> Any:
    return msgspec.msgpack.decode(response.content)


DOCUMENT: dict[str, Any] = {}
"""As it was served."""


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Ask for models that there are, and now and then for one that there isn't: no guess would hit a name."""
    DOCUMENT.update(copy.deepcopy(raw_schema))
    schemas = raw_schema["components"]["schemas"]
    for name, models in BY_SCHEMA.items():
        schemas[name]["properties"]["model"] = {"type": "string", "enum": models}
    for methods in raw_schema["paths"].values():
        shared = methods.get("parameters", [])
        for operation in methods.values():
            if isinstance(operation, dict):
                models = BY_OPERATION.get(operation["operationId"], EVERY)
                for parameter in (*shared, *operation.get("parameters", [])):
                    if parameter["name"] == "model" and parameter["in"] == "path":
                        parameter["schema"] = {"type": "string", "enum": models}
                        parameter.pop("example", None)
    schemas["Lora"] |= {"enum": [*LORAS, None]}
    for texts in (schemas["Image"]["anyOf"][0], schemas["Image"]["anyOf"][1]["properties"]["data"]):
        texts["enum"] = [f"data:image/gif;base64,{PIXEL}", PIXEL]
    for url in (schemas["Image"]["anyOf"][2]["properties"]["url"], schemas["ImageUrl"]["anyOf"][0]):
        url["enum"] = [f"data:image/gif;base64,{PIXEL}", "https://127.0.0.1/cat.gif"]


@schemathesis.check
def refused_for_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """What is right by its schema is refused only for what a schema can't say."""
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    packed = MSGPACK in "".join(response.headers.get("content-type", []))
    body = msgspec.msgpack.decode(response.content) if packed else response.json()
    found = body["detail"] if isinstance(body.get("detail"), dict) else body["error"]
    if re.search("whole number|not a number", found["message"]) and _has_whole_float(case.body):
        return  # 4.0 and 1e300 are integers to JSON Schema, and no whole numbers here
    if not any(re.search(reason, found["message"]) for reason in BEYOND_SCHEMAS):
        raise AssertionError(f"allowed by the schema and refused: {found['message']}")


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return value != _packable(value) or (isinstance(value, float) and value.is_integer())


@schemathesis.check
def events_are_as_described(ctx: Any, response: Any, case: Any) -> None:
    """A stream's events, which the answer's schema has no place for."""
    if not "".join(response.headers.get("content-type", [])).startswith("text/event-stream"):
        return
    operation = case.operation.definition.raw
    schema = operation["responses"]["200"]["content"]["text/event-stream"]["x-event"]
    validator = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})
    events = [event.removeprefix("data: ") for event in response.content.decode().split("\n\n")[:-1]]
    # The last one ends the answer, or is where schemathesis stopped reading a long one.
    for event in events[:-1]:
        validator.validate(json.loads(event))
