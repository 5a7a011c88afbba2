"""Finds plugins among the installed distributions and imports them, one at a time and without trusting any of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen

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
    """Why the distribution's entry points can't be read; empty for all others."""

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip()


def discover() -> list[FoundPlugin]:
    """Every entry point of the group, by name. A distribution found twice on the path counts once: the first copy."""
    found: list[FoundPlugin] = []
    seen: set[str] = set()
    for candidate in metadata.distributions():
        # Reading one file is all that the hundreds of distributions without plugins cost here.
        if not _offers_plugins(candidate):
            continue
        name = _name_of(candidate)
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        seen.add(key)
        found.extend(_entries(name, _first_on_path(name, candidate)))
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


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


def _first_on_path(name: str, candidate: metadata.Distribution) -> metadata.Distribution:
    # An earlier copy without plugins hides a later one with them, as it hides the later one's modules.
    try:
        return metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return candidate


def _entries(name: str, distribution: metadata.Distribution) -> Iterable[FoundPlugin]:
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
