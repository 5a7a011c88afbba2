"""Launches of engines that size themselves: nobody else's bytes may move on their devices meanwhile.

Such an engine measures what is free and takes it. What a neighbour gives back while it measures, nobody has promised
to it. So it waits until nobody is on the way out there, and then parks, unloads and removals of its neighbours wait for
the end of its launch: for ``load_timeout_s`` at most. Engines that die, a host that runs short of memory, and the end
of the server do not wait.

Pure: reads the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sie_core.residency.placement import Placement
from sie_core.residency.plans import Needer
from sie_core.residency.record import Record
from sie_core.residency.roster import Roster
from sie_core.types import Residency

__all__ = ["is_closed", "launch_beside", "leaving"]

_BEFORE_LAUNCHED = (Residency.QUEUED, Residency.LOADING)
_LEAVING = (Residency.DRAINING, Residency.PARKING, Residency.UNLOADING)


def launch_beside(roster: Roster, record: Record, *, but: Record | None = None) -> Record | None:
    """The engine that sizes itself, or is about to, where this model would give bytes back; ``None``: it may go."""
    if roster.closing:
        return None
    devices = _gives(record)
    for other in _sizing(roster):
        if other is not record and other is not but and devices.intersection(other.devices):
            return other
    return None


def is_closed(roster: Roster, needer: Needer, place: Placement) -> bool:
    """Whether a needer has to stay away: it sizes itself and would not be alone there, or somebody else does."""
    sizing = needer.reserve.self_sizing and not needer.wake
    for name in roster.moving:
        other = roster.records[name]
        if other is needer.record or not set(other.devices).intersection(place.devices):
            continue
        # A wake brings back what was there: only a launch sizes itself.
        if sizing or _sizes_itself(other):
            return True
    return sizing and next(leaving(roster, needer, place.devices), None) is not None


def leaving(roster: Roster, needer: Needer, devices: Collection[str]) -> Iterator[Record]:
    """Who is on the way out on these devices, without the victims of the needer's own plan that still drain."""
    for other in roster.records.values():
        if other is needer.record or not _gives(other).intersection(devices):
            continue
        own = other.drain is not None and other.drain.plan is not None and other.drain.plan is needer.plan
        if not own and (other.state in _LEAVING or other.drain is not None):
            yield other


def _sizing(roster: Roster) -> Iterator[Record]:
    return (roster.records[name] for name in roster.moving if _sizes_itself(roster.records[name]))


def _sizes_itself(record: Record) -> bool:
    return record.reserve is not None and record.reserve.self_sizing and record.state in _BEFORE_LAUNCHED


def _gives(record: Record) -> set[str]:
    """The devices on which bytes come free when it goes. A parked engine has no more than it kept."""
    if record.retained:
        return {account for account, nbytes in record.retained.items() if nbytes}
    return set() if record.state is Residency.PARKED else set(record.devices)
