"""Reading the configuration again while the server runs. A file that is broken changes nothing, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sie_core.config import Config, compare
from sie_core.errors import ConfigError
from sie_core.residency import Registry

__all__ = ["Reloader"]

_POLL_S = 1.0
_log = logging.getLogger("sie.cli")


class Reloader:
    """Holds the configuration in force and puts another one in its place."""

    def __init__(self, config: Config, read: Callable[[], Config], registry: Registry) -> None:
        """``read`` makes the whole configuration anew, bound to its adapters. Raises ConfigError."""
        self._config = config
        self._read = read
        self._registry = registry
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> None:
        """Read the configuration again and put what changed among the models into effect."""
        async with self._one_at_a_time:
            try:
                new = await asyncio.to_thread(self._read)
            except ConfigError as error:
                for problem in error.problems:
                    _log.error("%s", problem)
                _log.error("the configuration has %d problem(s): nothing was changed", len(error.problems))
                return
            except Exception:
                _log.exception("the configuration could not be read again: nothing was changed")
                return
            await self._apply(new)

    async def _apply(self, new: Config) -> None:
        change = compare(self._config, new)
        try:
            self._registry.apply(new.models)
        except ConfigError as error:
            _log.error("the new configuration can't be used, nothing was changed: %s", error)
            return
        old, self._config = self._config, new
        for title, names in (
            ("added", change.added),
            ("removed", change.removed),
            ("changed", change.changed),
            ("changed without a new engine", change.policy_only),
        ):
            if names:
                _log.info("configuration: models %s: %s", title, ", ".join(sorted(names)))
        if not (change.added or change.removed or change.changed or change.policy_only):
            _log.info("configuration: no model changed")
        later = [
            room
            for room in ("server", "memory", "requests", "compute", "telemetry", "plugins")
            if getattr(old, room, None) != getattr(new, room, None)
        ]
        if later:
            _log.warning("configuration: what changed under %s takes effect at the next start", ", ".join(later))

    async def watch(self, file: Path) -> None:
        """Reload whenever the file changes: looked at once a second, until cancelled."""
        seen = _stamp(file)
        while True:
            await asyncio.sleep(_POLL_S)
            now = _stamp(file)
            if now != seen:
                seen = now
                _log.info("%s changed: reading it again", file)
                await self.reload()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What differs after any edit, replacing the file included (editors write a new one and rename it)."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
