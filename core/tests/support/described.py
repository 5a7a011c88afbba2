"""The OpenAPI document as tests read it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from sie_core.http.document import build

__all__ = ["BY_ID", "DOCUMENT", "address", "operations", "problems", "resolved", "schema", "strangers"]

DOCUMENT = build("0")
_METHODS = {"get", "post", "delete", "put", "patch", "head", "options"}


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and what is said of them."""
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            if method in _METHODS:
                yield method, path, {"parameters": [], **operation, "shared": methods.get("parameters", [])}


BY_ID = {operation["operationId"]: (method, path, operation) for method, path, operation in operations()}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["components"]["schemas"][name]
    return found


def resolved(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a reference stands for."""
    while "$ref" in value:
        found: Any = DOCUMENT
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        value = found
    return value


def address(operation: Mapping[str, Any], path: str) -> str:
    """The path of the operation's own example."""
    for parameter in (*operation["shared"], *operation["parameters"]):
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", parameter["example"])
    return path


def problems(answer: Any, wanted: Mapping[str, Any], *, exact: bool = True) -> list[str]:
    """In what the answer does not conform to the schema. ``exact``: fields that it does not name are a problem too."""
    whole = {**copy.deepcopy(dict(wanted)), "components": {"schemas": DOCUMENT["components"]["schemas"]}}
    validator = Draft202012Validator(_closed(whole) if exact else whole)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(answer)]


def strangers(answer: Any, *wanted: Mapping[str, Any], at: str = "$") -> list[str]:
    """Fields of the answer that the schemas name nowhere, whichever of their branches are looked at."""
    if not isinstance(answer, dict):
        return []
    named: dict[str, list[Mapping[str, Any]]] = {}
    for one in wanted:
        for properties in _properties(one):
            for field, value in properties.items():
                named.setdefault(field, []).append(value)
    found = [f"{at}.{field}" for field in answer if field not in named]
    for field, value in answer.items():
        found += strangers(value, *named.get(field, ()), at=f"{at}.{field}")
    return found


def _properties(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    value = resolved(value)
    yield value.get("properties", {})
    for branch in (*value.get("allOf", ()), *value.get("anyOf", ()), *value.get("oneOf", ())):
        yield from _properties(branch)


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, dict):
        return value
    inner = {name: _closed(one) for name, one in value.items()}
    return {"additionalProperties": False, **inner} if "properties" in value else inner
