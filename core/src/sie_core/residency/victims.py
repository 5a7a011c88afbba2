"""Which models may be evicted for a load or wake, and in what order to take them.

A resident model is guarded against thrashing: it stays for five times what a park and a wake of it take. The guard
protects models that are at work; one that has been idle for a twentieth of such a cycle goes at once, since a request
waits for its place and none for it. It also yields once the longest waiter elsewhere has waited for its quantum, so
that nobody starves. What the operator has configured does not yield (``min_resident_s``), nor does a model that was
loaded for requests which were told to come back: both end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from sie_core.hookspecs import VictimCandidate
from sie_core.residency.fence import launch_beside
from sie_core.residency.record import Record
from sie_core.residency.roster import Roster
from sie_core.types import Residency

__all__ = ["Victims"]

_CYCLES_GUARDED = 5.0
_CYCLES_IDLE = 0.05


class Victims:
    """Chooses among the resident models. ``parkable`` is the lifecycle's."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.parkable: Callable[[Record], bool] = lambda record: False
        self.next_look = float("inf")
        """When, on the loop's clock, the first guard or exemption that was in the way runs out."""

    def of(self, needer: Record, since: float, refused: set[str], needed: Mapping[str, int]) -> Iterator[str]:
        """Idle before busy, then least recently used; parked engines that hold on to device memory last."""
        if not self._roster.plugins.implements("choose_victims"):
            return self._in_order(needer, since, refused)
        return iter(self._ask(list(self._in_order(needer, since, refused)), needed))

    def _in_order(self, needer: Record, since: float, refused: set[str]) -> Iterator[str]:
        # Lazy: the planner seldom needs more than the first few of what may be a thousand.
        roster = self._roster
        turn_at = since + roster.settings.turn_s
        busy: list[str] = []
        for name in roster.recent:
            record = roster.records[name]
            if record is needer or name in refused or launch_beside(roster, record, but=needer) is not None:
                continue
            if self._may_go(record, turn_at):
                if record.leases:
                    busy.append(name)
                else:
                    yield name
        yield from busy
        for name, record in roster.records.items():
            if record.state is not Residency.PARKED or not record.retained or record.spec.pinned:
                continue
            if not (
                record.tickets or record.drain is not None or launch_beside(roster, record, but=needer) is not None
            ):
                yield name

    def _may_go(self, record: Record, turn_at: float) -> bool:
        seat = record.seat
        if record.state is not Residency.RESIDENT or record.spec.pinned or record.tickets or seat is None:
            return False
        now = self._roster.now()
        stays = max(record.exempt_until, record.stays_until)
        if now < stays:
            return self._not_before(stays)
        if now > turn_at:
            return True
        if seat.first_turn:
            return self._not_before(turn_at)
        until = record.resident_at + _CYCLES_GUARDED * record.cycle_s
        if not record.leases:
            until = min(until, record.last_used + _CYCLES_IDLE * record.cycle_s)
        return now >= until or self._not_before(min(until, turn_at))

    def _not_before(self, when: float) -> bool:
        self.next_look = min(self.next_look, when)
        return False

    def _ask(self, able: list[str], needed: Mapping[str, int]) -> list[str]:
        """Let a plugin put them in order. Names that are no candidates are ignored, the rest keep their order."""
        roster, now = self._roster, self._roster.now()
        asked = [
            VictimCandidate(
                model=name,
                frees=dict(roster.ledger.freed_by(name)),
                leases=record.leases,
                idle_s=0.0 if record.leases else now - record.last_used,
                load_s=record.load_s,
                can_park=self.parkable(record),
            )
            for name, record in ((name, roster.records[name]) for name in able)
        ]
        known = set(able)
        first = roster.plugins.rank(asked, needed) or ()
        return list(dict.fromkeys([*(name for name in first if name in known), *able]))
