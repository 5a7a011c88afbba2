"""Where a load or wake goes and whom it evicts: the way that costs others least. Reads the books, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sie_core.residency.eviction import Cost, choose, least
from sie_core.residency.fence import is_closed
from sie_core.residency.placement import Placement, places
from sie_core.residency.plans import Needer
from sie_core.residency.roster import Roster
from sie_core.residency.victims import Victims

__all__ = ["Choosing", "all_ways"]


def all_ways(roster: Roster, needer: Needer) -> list[Placement]:
    """Where the engine could go; a parked one goes back to where it was."""
    if needer.wake:
        return [Placement(needer.record.devices, needer.record.booked)]
    return places(roster, needer.record, needer.reserve, configured=needer.purpose == "engine")


class Choosing:
    """Chooses for one needer at a time."""

    def __init__(self, roster: Roster, victims: Victims) -> None:
        self._roster = roster
        self._of = victims.of

    def best(
        self, needer: Needer, ways: Sequence[Placement], held_back: set[str]
    ) -> tuple[Placement, tuple[str, ...]] | None:
        """The place and its victims; ``None``: it has to wait. ``held_back``: devices that older loads wait for."""
        options: list[tuple[Cost, tuple[Placement, tuple[str, ...]]]] = []
        for place in ways:
            if is_closed(self._roster, needer, place) or self._waits_its_turn(needer, place, held_back):
                continue
            victims = self._choose(needer, place)
            if victims is not None:
                options.append((self._cost(place, victims), (place, victims)))
        return least(options) if options else None

    def _waits_its_turn(self, needer: Needer, place: Placement, held_back: set[str]) -> bool:
        """An older load waits for room there. A wake that fits as it is never queues behind another's cold load.

        Nor does a growth: its engine is at work, and the older load may well wait for just that to end.
        """
        if needer.purpose != "engine" or not held_back.intersection(place.devices):
            return False
        return not needer.wake or bool(self._roster.ledger.shortfall(place.all_needs, owner=needer.owner))

    def _choose(self, needer: Needer, place: Placement) -> tuple[str, ...] | None:
        """Whom to evict for it there: models at work only where the idle ones don't suffice."""
        ledger, needs = self._roster.ledger, place.all_needs
        idle = choose(ledger, needs, self._idle_victims(needer), at_least=needer.at_least, owner=needer.owner)
        if idle is not None:
            return idle
        return choose(ledger, needs, self._victims(needer), at_least=needer.at_least, owner=needer.owner)

    def _cost(self, place: Placement, victims: tuple[str, ...]) -> Cost:
        roster = self._roster
        records = [roster.records[name] for name in victims]
        return Cost(
            busy=sum(record.leases > 0 for record in records),
            evicted=sum(sum(roster.ledger.freed_by(name).values()) for name in victims),
            # The last use of a model at work is now: the record's figure moves when a lease is returned.
            last_used=max((roster.now() if record.leases else record.last_used for record in records), default=0.0),
            room=sum(roster.ledger.available(account) for account in place.devices),
        )

    def idle_can_pay(self, needer: Needer, held_back: set[str], *, but: str = "") -> bool:
        """Whether the needer, whose plan has victims at work, would get its bytes without waiting for any of them."""
        ledger, name = self._roster.ledger, needer.record.name
        idle = [other for other in self._idle_victims(needer) if other != but]
        if needer.purpose != "engine":  # its engine stays: what the plan still waits for is all that is missing
            freed = [ledger.freed_by(other) for other in idle]
            missing = ledger.lien(name).items()
            return all(sum(of.get(account, 0) for of in freed) >= nbytes for account, nbytes in missing)
        return any(
            not ledger.shortfall(place.all_needs, without={name, *idle})
            and not is_closed(self._roster, needer, place)
            and not self._waits_its_turn(needer, place, held_back)
            for place in all_ways(self._roster, needer)
        )

    def _victims(self, needer: Needer) -> Iterator[str]:
        """Models that may go for this needer, in the order to take them."""
        ways = all_ways(self._roster, needer)
        needed = {need.account: need.static + need.context + need.headroom for need in ways[0].needs} if ways else {}
        return self._of(needer.record, needer.since, needer.refused, needed)

    def _idle_victims(self, needer: Needer) -> Iterator[str]:
        records = self._roster.records
        return (name for name in self._victims(needer) if not records[name].leases)
