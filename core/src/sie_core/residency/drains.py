"""Drains: no new leases, wait for those that exist, then go on; or give up in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sie_core.errors import DeadlineExceeded, ResourceExhausted, ShuttingDown
from sie_core.residency.fence import launch_beside
from sie_core.residency.reasons import Why
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
        self._waiting: dict[str, Record] = {}
        """Who has to do with a launch beside it, and is looked at again when one is over."""

    def begin(self, record: Record, drain: Drain, *, within: float | None = None) -> None:
        """Give no new leases; go on when those that exist are back, or give up after ``within`` seconds."""
        roster = self._life.roster
        if drain.plan is None and not drain.force and launch_beside(roster, record) is not None:
            self._hold(record, drain)
            return
        self._take_over(record, drain)
        if record.state is not _R.PARKED:  # a parked engine that is to go has nobody to drain
            roster.set(record, _R.DRAINING, drain.why.words, drain.why.cause)
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
        elif launch_beside(self._life.roster, record) is not None:
            self.look_again(record)
        elif drain.park:
            self._life.evict(record, drain.why)
        else:
            self._life.unload(record, drain.why)

    # --- beside a launch ---------------------------------------------------------------------------

    def _hold(self, record: Record, drain: Drain) -> None:
        """The model serves on until the launch is over. An unload that was asked for is not made a park again."""
        if record.held is None or record.held.park:
            record.held = drain
        self.look_again(record)

    def _take_over(self, record: Record, drain: Drain) -> None:
        """A drain begins: what was held is done with it, or comes after it."""
        held = record.held
        if drain.plan is None or held is None:
            record.held = None
        elif not held.park:  # a plan would only park it
            record.held, record.retire = None, held.why

    def unload_parked(self, record: Record, why: Why) -> None:
        """Unload a parked engine; what it has kept of a device on which another one is launched stays until then."""
        if launch_beside(self._life.roster, record) is None:
            self._life.unload(record, why)
        else:
            record.retire = why
            self.look_again(record)

    def look_again(self, record: Record) -> None:
        """Look at the model again when a launch is over."""
        self._waiting[record.name] = record

    def waits(self, record: Record) -> bool:
        """Whether it waits for a launch to end before it goes."""
        return self._waiting.get(record.name) is record

    def recheck(self) -> None:
        """A launch may be over: whoever waited for that goes on, or waits for the next."""
        waiting, self._waiting = self._waiting, {}
        for record in waiting.values():
            held = record.held
            if record.state is _R.RESIDENT and held is not None:
                self.begin(record, held)
            elif record.state is _R.RESIDENT:
                self._life.idle.arm(record)
            elif record.state is _R.DRAINING and (record.leases == 0 or _told(record.seat)):
                self._drained(record)
            elif record.state is _R.PARKED and record.drain is None:
                self._life.settle(record)

    def _drain_overdue(self, record: Record, drain: Drain) -> None:
        if record.drain is not drain or record.leases == 0:
            return
        reason = f"{record.name} did not drain in time"
        if drain.plan is not None:
            record.exempt_until = self._life.roster.now() + self._life.roster.settings.drain_exempt_s
            self._life.admission.refused(record, drain.plan, reason)
        elif drain.force and record.seat is not None:
            unloaded = f"model {record.name!r} was unloaded: {drain.why.words}"
            closing = self._life.roster.closing
            record.seat.lose(ShuttingDown(unloaded) if closing else ResourceExhausted(unloaded))
            self._drained(record)
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


def _told(seat: Seat | None) -> bool:
    """Whether those who still use it know that it is gone."""
    return seat is not None and seat.lost is not None and seat.lost.done()
