"""A new configuration: what is added, removed and changed, and nothing else, takes effect."""

from __future__ import annotations

from collections.abc import Iterable

from sie_core.errors import MissingAdapter
from sie_core.residency.failures import classify
from sie_core.residency.lifecycle import Lifecycle
from sie_core.residency.reasons import CONFIG_CHANGED, Why
from sie_core.residency.record import Drain, Record
from sie_core.residency.roster import Roster
from sie_core.types import Cause, ModelSpec, Residency

__all__ = ["Changes"]

_R = Residency
_REMOVED = Why(Cause.CONFIG_CHANGED, "removed from the configuration")


class Changes:
    """Takes over configurations."""

    def __init__(self, roster: Roster, life: Lifecycle) -> None:
        self._roster = roster
        self._life = life

    def apply(self, specs: Iterable[ModelSpec]) -> None:
        """As ``Registry.apply`` says."""
        wanted = {spec.name: spec for spec in specs}
        for name, known in list(self._roster.records.items()):
            if name not in wanted:
                self._retire(known, _REMOVED, removed=True)
        for name, spec in wanted.items():
            record = self._roster.records.get(name)
            if record is None:
                self._roster.records[name] = record = Record(spec=spec, epoch=self._roster.next_epoch())
                record.pinned_in_file = spec.pinned
                self._check_adapter(record)
            elif record.removed or record.spec.engine_key() != spec.engine_key():
                if record.removed:
                    record.pinned_by_hand = None
                record.removed = False
                record.epoch = self._roster.next_epoch()
                record.configure(spec)
                record.failure, record.attempts, record.deaths = None, 0, 0
                record.last_crash = None
                record.reserve = record.capabilities = None
                self._retire(record, CONFIG_CHANGED)
                self._check_adapter(record)
            else:
                record.configure(spec)
                self._life.idle.arm(record)
            self._life.loras.configure(record)

    def _check_adapter(self, record: Record) -> None:
        """A model whose adapter is missing fails at once: no request has to find out."""
        adapters = self._roster.plugins.adapters
        if record.spec.adapter not in adapters and record.state is _R.UNLOADED:
            error = MissingAdapter(record.spec.adapter, found=sorted(adapters))
            record.failure = classify(error, attempts=1, now=0.0)
            self._roster.set(record, _R.QUEUED, "configured")
            self._roster.set(record, _R.FAILED, "its adapter is missing")

    def _retire(self, record: Record, why: Why, *, removed: bool = False) -> None:
        record.removed = removed
        if record.state in (_R.UNLOADED, _R.FAILED):
            if record.state is _R.FAILED:
                self._roster.set(record, _R.UNLOADED, why.words, why.cause)
            self._life.settle(record)
            return
        record.retire = why
        if record.state is _R.PARKED:
            self._life.drains.unload_parked(record, why)
        elif record.state is _R.RESIDENT:
            self._life.drains.begin(record, Drain(why, force=True))
        elif record.state in (_R.QUEUED, _R.LOADING, _R.WAKING):
            self._life.cancel(record, why.words)
