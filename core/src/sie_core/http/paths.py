"""Which paths there are: what each takes, and what a request for one that does not exist may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Final

from starlette.routing import BaseRoute, Match, Route

from sie_core.http.errors import HttpError

__all__ = ["methods_of", "not_found"]

_LONGEST: Final = 1024
"""Characters of a path for which others are looked up; more than any useful one has."""
_DEEPEST: Final = 12
_VERSIONS: Final = ("", "/v1", "/v2")


def methods_of(path: str, routes: Sequence[BaseRoute]) -> frozenset[str]:
    """The methods that a path takes, empty for one that does not exist."""
    scope = {"type": "http", "path": path, "root_path": "", "method": ""}
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            found |= route.methods or {"GET"}
    return frozenset(found)


def not_found(method: str, path: str, routes: Sequence[BaseRoute]) -> HttpError:
    """The refusal of a path that does not exist, with the one that may have been meant."""
    shown = path if len(path) <= _LONGEST else path[:_LONGEST] + "…"
    message = f"unknown path: {method} {shown}"
    meant = _meant(path, routes) if len(path) <= _LONGEST else None
    if meant is None:
        return HttpError(404, "NOT_FOUND", f"{message}; /openapi.json lists all of them")
    message += f"; did you mean {meant}?"
    prefix = path.removesuffix(meant)
    if prefix and prefix != path and prefix.strip("/") not in ("v1", "v2"):
        message += f" For requests that come with {prefix} in front, set server.root_path"
    return HttpError(404, "NOT_FOUND", message)


def _meant(path: str, routes: Sequence[BaseRoute]) -> str | None:
    for candidate in _candidates(path):
        if candidate != path and methods_of(candidate, routes):
            return candidate
    fixed = [route.path for route in routes if isinstance(route, Route) and not route.param_convertors]
    near = difflib.get_close_matches(path.rstrip("/"), fixed, 1, 0.8)
    return near[0] if near else None


def _candidates(path: str) -> Iterator[str]:
    """The path without needless slashes, then without what stands in front, each with and without a version."""
    parts = [part for part in path.split("/") if part][:_DEEPEST]
    for start in range(len(parts)):
        rest = "/" + "/".join(parts[start:])
        yield from (version + rest for version in _VERSIONS)
