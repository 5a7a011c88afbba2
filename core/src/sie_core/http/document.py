"""The OpenAPI document: data files beside this module, put together when somebody asks for it and not before.

Paths and schemas stand in the files of ``openapi/``. An operation there names its errors by status, and gets a response
for each from the one table of statuses and codes. Tests compare that with :mod:`sie_core.http.errors`, the paths with
the application's routes, and the fields with what the parsers take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

import orjson
import yaml

__all__ = ["as_json", "build"]

_SHARED: Final = "document.yaml"
_METHODS: Final = frozenset({"get", "post", "delete", "put", "patch"})


@cache
def as_json(version: str, root: str = "") -> bytes:
    """The document of a server of this version below ``root``. Slow the first time (tens of milliseconds)."""
    return orjson.dumps(build(version, root))


def build(version: str, root: str = "") -> dict[str, Any]:
    """The document as plain values. They share parts: to be read, not changed."""
    folder = files("sie_core.http") / "openapi"
    document = _read(folder / _SHARED)
    for part in sorted(folder.iterdir(), key=lambda part: part.name):
        if part.name.endswith(".yaml") and part.name != _SHARED:
            found = _read(part)
            document["paths"] |= found["paths"]
            document["components"]["schemas"] |= found["components"]["schemas"]
    document["info"] = {**document["info"], "version": version}
    if root:
        document["servers"] = [{**document["servers"][0], "url": root}]
    _add_errors(document, document.pop("x-errors"))
    return document


def _read(part: Any) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, Any] = yaml.load(part.read_text(encoding="utf-8"), loader)
    return found


# --- errors ----------------------------------------------------------------------------------------


def _add_errors(document: dict[str, Any], table: Mapping[str, Any]) -> None:
    responses: dict[str, Any] = {}
    document["components"]["responses"] = responses
    for path, methods in document["paths"].items():
        document["paths"][path] = {
            name: _with_errors(value, table, responses) if name in _METHODS else value
            for name, value in methods.items()
        }


def _with_errors(operation: Mapping[str, Any], table: Mapping[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
    complete = dict(operation)
    complete["responses"] = dict(operation["responses"])
    for status, dialect in _statuses(complete.pop("x-errors", {})):
        name = f"{dialect}_{status}"
        if name not in responses:
            responses[name] = _response(table["statuses"][status], table["shapes"][dialect], status, dialect)
        complete["responses"][status] = {"$ref": f"#/components/responses/{name}"}
    return complete


def _statuses(named: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for dialect, statuses in named.items():
        for status in statuses:
            yield status, dialect


def _response(status: Mapping[str, Any], shape: Mapping[str, Any], number: str, dialect: str) -> dict[str, Any]:
    codes = [*status["codes"], *(status.get("native_codes", []) if dialect in ("native", "both") else [])]
    inner = {"type": "object", "properties": {"code": {"enum": codes}}}
    schema = {
        "allOf": [
            {"$ref": f"#/components/schemas/{shape['schema']}"},
            {"type": "object", "properties": dict.fromkeys(shape["at"], inner)},
        ]
    }
    return {
        "description": status["description"],
        "headers": {name: {"$ref": f"#/components/headers/{header}"} for name, header in status["headers"].items()},
        "content": {"application/json": {"schema": schema}},
    }
