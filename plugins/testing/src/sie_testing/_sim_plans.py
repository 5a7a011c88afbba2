"""What must hold of plans: who is named a victim, and who is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sie_core import Residency
from sie_core.residency.placement import Placement, places

from sie_testing._sim_world import World

if TYPE_CHECKING:
    from sie_core.residency.plans import Needer
    from sie_core.residency.record import Record

__all__ = ["PlanRules"]

_SOON_S = 0.2
"""A plan is looked at again ten times a second."""


class PlanRules:
    """Looks at the plans of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._since: dict[int, float] = {}
        """By plan that waits for busy victims, since when idle ones could pay."""

    def look(self) -> str | None:
        """The rule that does not hold, if one does not."""
        now, since = self._world.loop.time(), {}
        for needer in self._world.registry._admission._waiting:
            better = self._idle_instead(needer)
            if better is None:
                continue
            since[id(needer.plan)] = first = self._since.get(id(needer.plan), now)
            if now - first > _SOON_S and needer.plan is not None:
                busy = ", ".join(sorted(needer.plan.draining))
                return f"{needer.record.name} waits for {busy} to end its requests, and idle models could pay: {better}"
        self._since = since
        return None

    def _idle_instead(self, needer: Needer) -> str | None:
        """Whose going would do, for a plan whose victims are at work; ``None``: nobody's."""
        plan, world, record = needer.plan, self._world, needer.record
        if plan is None or plan.committed or not plan.draining or needer.purpose != "engine" or needer.at_least:
            return None
        if self._held_up(needer):
            return None
        idle = {other.name for other in world.records.values() if other is not record and self._is_idle(other)}
        idle -= needer.refused
        for place in self._ways(needer):
            if not world.ledger.shortfall(place.all_needs, without={record.name, *idle}):
                return ", ".join(sorted(idle)) or "not even they have to"
        return None

    def _ways(self, needer: Needer) -> Iterator[Placement]:
        if needer.wake:
            yield Placement(needer.record.devices, needer.record.booked)
            return
        yield from places(
            self._world.registry._roster, needer.record, needer.reserve, configured=needer.purpose == "engine"
        )

    def _held_up(self, needer: Needer) -> bool:
        """Others go first, or launch alone: there may be a reason why the idle are not taken."""
        others = [one for one in self._world.registry._admission._waiting if one is not needer]
        if needer.reserve.self_sizing or any(one.plan is None for one in others):
            return True
        moving = [self._world.records[name] for name in self._world.registry._roster.moving]
        return any(record.reserve is None or record.reserve.self_sizing for record in moving)

    def _is_idle(self, record: Record) -> bool:
        """Beyond doubt: nobody uses it, and no guard protects it any more."""
        now, seat = self._world.loop.time(), record.seat
        if record.state is not Residency.RESIDENT or seat is None or record.leases or record.tickets:
            return False
        guarded = record.resident_at + max(record.spec.min_resident_s, 5 * record.cycle_s)
        guarded = max(guarded, record.stays_until, record.exempt_until)
        return not (record.spec.pinned or now < guarded or record.drain is not None)
