"""Pinned models: loaded at the start, with every configuration, and when one has left though nobody asked for that.

They are refused where they can't all be resident.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from sie_core.adapter import AdmissionReserve
from sie_core.errors import ConfigError, ConfigProblem
from sie_core.residency.lifecycle import Lifecycle
from sie_core.residency.placement import places
from sie_core.residency.record import Record
from sie_core.residency.roster import Roster
from sie_core.residency.worker import EngineWorker
from sie_core.types import Residency

__all__ = ["Pins"]

_R = Residency


class Pins:
    """Loads the pinned models, once the server has started."""

    def __init__(
        self,
        roster: Roster,
        life: Lifecycle,
        load_model: Callable[[str], Coroutine[Any, Any, None]],
        make_worker: Callable[[str], EngineWorker],
    ) -> None:
        self._roster = roster
        self._life = life
        self._load_model = load_model
        self._make_worker = make_worker
        self._started = False
        life.left_pinned = self._load

    async def start(self) -> None:
        """Check that they fit together, and load them in the background. Raises ConfigError."""
        self._started = True
        pinned = [record for record in self._roster.records.values() if record.spec.pinned]
        await self._check([record for record in pinned if record.state is _R.UNLOADED])
        self.load()

    def load(self) -> None:
        """Load those that are unloaded; nothing before the server has started."""
        for record in self._roster.records.values():
            if record.spec.pinned and record.state is _R.UNLOADED:
                self._load(record)

    def _load(self, record: Record) -> None:
        if self._started:
            task = asyncio.get_running_loop().create_task(self._load_model(record.name))
            task.add_done_callback(_note_failure)
            self._life.keep(task)

    async def _check(self, pinned: Sequence[Record]) -> None:
        """Book them one after the other, as they would be loaded, and take it all back."""
        ledger = self._roster.ledger
        booked: list[str] = []
        reserves = [(record, await self._reserve(record)) for record in pinned]
        try:  # from here on without an await: nobody sees these claims
            for record, reserve in reserves:
                if reserve is None or record.state is not _R.UNLOADED:
                    continue
                ways = places(self._roster, record, reserve)
                fitting = next((way for way in ways if not ledger.shortfall(way.all_needs)), None)
                if fitting is None:
                    if not ways or any(ledger.impossible(way.all_needs) for way in ways):
                        continue
                    names = ", ".join([*booked, record.name])
                    problem = ConfigProblem(f"the pinned models do not fit together: {names}", path="models")
                    raise ConfigError([problem])
                ledger.book(record.name, fitting.needs)
                booked.append(record.name)
        finally:
            for name in booked:
                ledger.release(name)

    async def _reserve(self, record: Record) -> AdmissionReserve | None:
        """What a model will need; ``None``: it can't be told, and the load will fail with the reason."""
        worker = self._make_worker(record.name)
        try:
            return await self._life.loading.reserve(record, worker)
        except Exception:  # whatever a plugin raises
            return None
        finally:
            worker.close()


def _note_failure(task: asyncio.Task[Any]) -> None:
    """A pinned model that can't be loaded is ``failed`` and logged; the server serves the others."""
    if not task.cancelled():
        task.exception()
