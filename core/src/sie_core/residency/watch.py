"""Looks at every device and at the host once a second, and makes room when others took what was promised to us."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from sie_core.errors import SieError
from sie_core.residency.fence import launch_beside
from sie_core.residency.reasons import Why
from sie_core.residency.record import Drain, Record
from sie_core.residency.roster import HOST, Roster, log
from sie_core.residency.tier import RELIEF_WAITS_S
from sie_core.types import Cause, Residency

if TYPE_CHECKING:
    from sie_core.residency.admission import Admission
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["Watch"]

_PRESSURE = Why(Cause.MEMORY_PRESSURE, "memory pressure from other processes")


class Watch:
    """A rise of what others use binds admission at once; it evicts only when a second sample confirms it."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        lifecycle: Lifecycle,
        host_available: Callable[[], int] | None,
        host_pressure: Callable[[], float | None] | None = None,
    ) -> None:
        self._roster = roster
        self._admission = admission
        self._lifecycle = lifecycle
        self._host_available = host_available
        self._host_pressure = host_pressure
        self._relieved_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._deficits: dict[str, int] = {}
        self._leaving_since: dict[str, float] = {}
        roster.look_at_host = self._look_before_booking

    def start(self) -> None:
        """Look now, and from now on."""
        self._look()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        # First of all: whatever a device's driver raises, the next look may find it well again.
        self._timer = asyncio.get_running_loop().call_later(self._roster.settings.sample_s, self._look)
        roster, ledger = self._roster, self._roster.ledger
        roster.sample(roster.devices)
        roster.leftovers.look()
        self._look_at_host()
        self._feel_pressure()
        for account in roster.devices:
            short = ledger.deficit(account)
            if short > 0 and self._deficits.get(account, 0) > 0:
                self._relieve(account, short)
            self._deficits[account] = short
        self._admission.request_pump()

    def _look_at_host(self) -> None:
        try:
            self._observe_host()
        except SieError as error:
            log.warning("host memory can't be read: %s", error.message)
            return
        short = self._roster.ledger.deficit(HOST) if self._host_available is not None else 0
        if short > 0:
            # No second sample here: before the next one the kernel may have to kill somebody.
            self._lifecycle.parking.relieve_host(short)

    def _look_before_booking(self) -> None:
        with contextlib.suppress(SieError):  # the next look says so; until then the last figure has to do
            self._observe_host()

    def _observe_host(self) -> None:
        if self._host_available is not None:
            self._roster.ledger.observe_available(HOST, self._host_available())

    def _feel_pressure(self) -> None:
        """The kernel says that tasks wait for memory, though there may still be some: one copy at a time goes."""
        try:
            pressure = self._host_pressure() if self._host_pressure is not None else None
        except SieError as error:
            log.warning("whether the host is short of memory can't be read: %s", error.message)
            return
        settings, now = self._roster.settings, self._roster.now()
        if pressure is None or pressure <= settings.host_pressure_limit:
            return
        if now - self._relieved_at >= settings.host_pressure_pause_s:
            self._relieved_at = now
            parking = self._lifecycle.parking
            why = Why(Cause.HOST_WAITS, f"tasks on the host wait for memory ({pressure:.0f}% of the time)")
            parking.relieve_host(parking.tier.arena.idle + 1, why)

    def _relieve(self, account: str, short: int) -> None:
        """Let idle models go until the book is right again; then parked engines that have kept something there."""
        roster = self._roster
        short -= sum(self._freed(record, account) for record in self._leaving())
        idle = [roster.records[name] for name in roster.recent]
        kept = [record for record in roster.records.values() if record.state is Residency.PARKED]
        for record in (*idle, *kept):
            freed = self._freed(record, account)
            if short <= 0:
                return
            if freed <= 0 or not _may_go(record) or launch_beside(roster, record) is not None:
                continue
            took = Why(Cause.MEMORY_PRESSURE, f"{roster.leftovers.holders(account)} took {account}")
            roster.decide(record.name, "evict", took.words, took.cause, needed=short, promised=freed)
            if record.state is Residency.RESIDENT:
                self._lifecycle.drains.begin(record, Drain(_PRESSURE, park=True))
            else:
                self._lifecycle.unload(record, _PRESSURE)
            short -= freed

    def _leaving(self) -> list[Record]:
        """Whose bytes are about to come free, but those that have been about to for too long."""
        now, known = self._roster.now(), self._leaving_since
        leaving = [record for record in self._roster.records.values() if _leaves(record)]
        self._leaving_since = {record.name: known.get(record.name, now) for record in leaving}
        return [record for record in leaving if now - self._leaving_since[record.name] < RELIEF_WAITS_S]

    def _freed(self, record: Record, account: str) -> int:
        return self._roster.ledger.freed_by(record.name).get(account, 0)


def _leaves(record: Record) -> bool:
    """On its way out, with nobody left who could keep it."""
    if record.state is Residency.DRAINING:
        return not record.leases
    return record.state in (Residency.PARKING, Residency.UNLOADING)


def _may_go(record: Record) -> bool:
    idle = not (record.leases or record.tickets or record.spec.pinned)
    return idle and record.drain is None and record.state in (Residency.RESIDENT, Residency.PARKED)
