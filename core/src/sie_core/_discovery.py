"""Finds plugins among the installed distributions and imports them, one at a time and without trusting any of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

__all__ = ["GROUP", "FoundPlugin", "declared_api", "discover", "import_plugin"]

GROUP = "sie"
_SECTION = re.compile(rf"^\s*\[\s*{GROUP}\s*\]", re.MULTILINE)
_log = logging.getLogger("sie_core.plugins")


@frozen
class FoundPlugin:
    """An entry point of a distribution. ``value`` is ``module`` or ``module:object``."""

    name: str
    value: str
    distribution: str
    version: str
    error: str = ""
    """Why it can't be used, whatever its code says; empty for all others."""

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip()


def discover() -> list[FoundPlugin]:
    """Every entry point of the group, by name. Of a distribution that is found twice on the path one copy counts.

    That is the first copy that has plugins: an older copy in front may have none, such as the metadata that a build
    left beside an editable install. Plugins that only another copy offers are found with the reason why they are not
    used.
    """
    found: list[FoundPlugin] = []
    chosen: dict[str, list[FoundPlugin]] = {}
    for candidate in metadata.distributions():
        # Reading one file is all that the hundreds of distributions without plugins cost here.
        if not _offers_plugins(candidate):
            continue
        name = _name_of(candidate)
        entries = _entries(name, candidate)
        if not entries:
            continue
        used = chosen.setdefault(re.sub(r"[-_.]+", "-", name).lower(), entries)
        found += entries if used is entries else _hidden(entries, used)
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def _hidden(entries: Sequence[FoundPlugin], used: Sequence[FoundPlugin]) -> list[FoundPlugin]:
    """Those of a later copy that the one in use does not have."""
    names = {plugin.name for plugin in used}
    why = f"another copy of {used[0].origin} comes first on the path, and has no such plugin: remove one of the two"
    return [evolve(plugin, error=why) for plugin in entries if plugin.name not in names]


def _offers_plugins(distribution: metadata.Distribution) -> bool:
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, ValueError):
        _log.debug("the entry points of a distribution can't be read", exc_info=True)
        return False
    return text is not None and _SECTION.search(text) is not None


def _name_of(distribution: metadata.Distribution) -> str:
    name: str | None = None
    try:
        name = distribution.metadata["Name"]
    except Exception:  # a metadata file may be missing or damaged in any way
        _log.debug("the metadata of a distribution can't be read", exc_info=True)
    return name or str(distribution.locate_file(""))


def _entries(name: str, distribution: metadata.Distribution) -> list[FoundPlugin]:
    try:
        version = distribution.version or ""
    except Exception:
        version = ""
    try:
        points = {(point.name, point.value) for point in distribution.entry_points if point.group == GROUP}
    except Exception as error:
        return [FoundPlugin(name, "", name, version, error=f"its entry points can't be read: {error!r}")]
    return [FoundPlugin(entry, value, name, version) for entry, value in sorted(points)]


def import_plugin(plugin: FoundPlugin) -> Any:
    """The module or object that the entry point names. Raises whatever its code raises."""
    target: Any = importlib.import_module(plugin.module)
    for attribute in filter(None, plugin.value.partition(":")[2].partition("[")[0].strip().split(".")):
        target = getattr(target, attribute)
    return target


def declared_api(plugin: FoundPlugin) -> object:
    """``sie_api`` as the module's source states it, for a module that can't be imported; ``None`` if it does not."""
    try:
        spec = importlib.util.find_spec(plugin.module)
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (Exception, SystemExit):  # its parent package is foreign code, too
        return None
    return next((value for value in map(_api_assigned, tree.body) if value is not None), None)


def _api_assigned(statement: ast.stmt) -> object:
    targets: list[ast.expr] = []
    value: ast.expr | None = None
    if isinstance(statement, ast.Assign):
        targets, value = statement.targets, statement.value
    elif isinstance(statement, ast.AnnAssign):
        targets, value = [statement.target], statement.value
    if isinstance(value, ast.Constant) and any(isinstance(t, ast.Name) and t.id == "sie_api" for t in targets):
        return value.value
    return None
