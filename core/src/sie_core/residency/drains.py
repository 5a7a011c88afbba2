"""Drains: no new leases, wait for those that exist, then go on; or give up in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sie_core.errors import DeadlineExceeded, ResourceExhausted, ShuttingDown
from sie_core.residency.record import Drain, Record, Seat
from sie_core.types import Residency

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["Drains"]

_R = Residency


class Drains:
    """Begins, ends and gives up drains."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def begin(self, record: Record, drain: Drain, *, within: float | None = None) -> None:
        """Give no new leases; go on when those that exist are back, or give up after ``within`` seconds."""
        roster = self._life.roster
        if record.state is not _R.PARKED:  # a parked engine that is to go has nobody to drain
            roster.set(record, _R.DRAINING, drain.reason)
        record.drain = drain
        if record.leases == 0:
            self._drained(record)
            return
        limit = roster.settings.drain_s if within is None else within
        if drain.plan is not None:
            limit = min(limit, self._patience(drain))
        drain.timer = asyncio.get_running_loop().call_later(limit, self._drain_overdue, record, drain)

    def _patience(self, drain: Drain) -> float:
        """Half of what the longest waiter for the room has left."""
        roster, admission = self._life.roster, self._life.admission
        needers = [record for record in roster.records.values() if admission.holds(record, drain.plan)]
        now = roster.now()
        left = [next(iter(record.tickets)).deadline - now for record in needers if record.tickets]
        return max(0.0, min(left) / 2) if left else roster.settings.drain_s

    def _drained(self, record: Record) -> None:
        drain = record.drain
        if drain is None:
            return
        if drain.timer is not None:
            drain.timer.cancel()
        if drain.plan is not None:
            self._life.admission.drained(record, drain.plan)
        elif drain.park:
            self._life.evict(record, drain.reason)
        else:
            self._life.unload(record, drain.reason)

    def _drain_overdue(self, record: Record, drain: Drain) -> None:
        if record.drain is not drain or record.leases == 0:
            return
        reason = f"{record.name} did not drain in time"
        if drain.plan is not None:
            record.exempt_until = self._life.roster.now() + self._life.roster.settings.drain_exempt_s
            self._life.admission.refused(record, drain.plan, reason)
        elif drain.force and record.seat is not None:
            unloaded = f"model {record.name!r} was unloaded: {drain.reason}"
            closing = self._life.roster.closing
            record.seat.lose(ShuttingDown(unloaded) if closing else ResourceExhausted(unloaded))
            self._life.unload(record, drain.reason)
        else:
            self.call_off(record, reason)
            error = DeadlineExceeded(f"{reason}: unload it with force, or try again later")
            self._life.answer_unload(record, error)
            self._life.answer_park(record, error)

    def call_off(self, record: Record, reason: str) -> None:
        """Call a drain off: the model serves on."""
        if record.state is _R.DRAINING:
            self.end(record)
            self._life.roster.set(record, _R.RESIDENT, reason)
            self._life.settle(record)
        elif record.state is _R.PARKED:
            self.end(record)
            self._life.settle(record)

    def end(self, record: Record) -> None:
        """Forget the drain: it is over, one way or the other."""
        drain, record.drain = record.drain, None
        if drain is not None and drain.timer is not None:
            drain.timer.cancel()

    def released(self, record: Record, seat: Seat) -> None:
        """A lease is back."""
        if record.seat is not seat:
            return
        self._life.roster.touch(record)
        if seat.leases == 0:
            if record.state is _R.DRAINING:
                self._drained(record)
            else:
                self._life.idle.arm(record)
                if self._life.admission.busy:
                    self._life.admission.request_pump()
