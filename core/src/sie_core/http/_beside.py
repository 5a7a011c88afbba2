"""Routes of plugins, beside those of the server: a path that the server answers is its own, whatever the method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.routing import BaseRoute, Route, WebSocketRoute

if TYPE_CHECKING:
    from sie_core.plugins import Plugins

__all__ = ["is_taken", "path_of", "routes_beside"]


def routes_beside(plugins: Plugins, ours: Sequence[BaseRoute]) -> list[BaseRoute]:
    """The plugins' routes, without those whose paths are ours. Raises PluginConflict in strict mode."""
    free: list[BaseRoute] = []
    for plugin, routes in plugins.routes_by_plugin():
        taken = [route for route in routes if is_taken(route, ours)]
        free += [route for route in routes if route not in taken]
        if taken:
            paths = ", ".join(map(path_of, taken))
            plugins.refuse(plugin, f"its routes for {paths} are not used: the server answers there itself")
    return free


def is_taken(route: BaseRoute, ours: Sequence[BaseRoute]) -> bool:
    """Whether its path, with names filled in, is one of ours."""
    path = re.sub(r"\{[^}]*\}", "x", path_of(route)).rstrip("/") or "/"
    return any(own.path_regex.fullmatch(path) for own in ours if isinstance(own, Route | WebSocketRoute))


def path_of(route: BaseRoute) -> str:
    return str(getattr(route, "path", ""))
