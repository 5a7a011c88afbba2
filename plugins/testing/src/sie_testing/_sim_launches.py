"""What must hold while an engine that sizes itself is launched: nobody gives bytes of its devices back meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sie_core import Cause, Residency, ResidencyChanged

if TYPE_CHECKING:
    from sie_core.residency.record import Record

    from sie_testing._sim_world import World

__all__ = ["launch_disturbed"]

_NO_WAITING = (Cause.HOST_SHORT, Cause.HOST_WAITS)
_LEAVING = (Residency.PARKING, Residency.UNLOADING)


def launch_disturbed(world: World, event: ResidencyChanged) -> str | None:
    """The rule that does not hold, if one does not: it would take bytes that nobody has promised to it."""
    record = world.records.get(event.model)
    if record is None or world.registry._roster.closing or event.cause in _NO_WAITING:
        return None
    if event.after is Residency.LOADING and record.reserve is not None and record.reserve.self_sizing:
        for other in _beside(world, record):
            dead = other.seat is not None and other.seat.dead is not None
            if other.state in _LEAVING and not dead and _gives(other, record):
                return f"{record.name} sizes itself on {_common(other, record)} while {other.name} is {other.state}"
    if event.after in _LEAVING and (record.seat is None or record.seat.dead is None):
        for other in _beside(world, record):
            launches = other.state is Residency.LOADING and other.reserve is not None and other.reserve.self_sizing
            if launches and _gives(record, other):
                return f"{record.name} leaves {_common(record, other)} ({event.reason}) while {other.name} sizes itself"
    return None


def _beside(world: World, record: Record) -> Iterator[Record]:
    return (other for other in world.records.values() if other is not record and _common(other, record))


def _common(one: Record, other: Record) -> str:
    return ", ".join(sorted(set(one.devices) & set(other.devices)))


def _gives(leaving: Record, launching: Record) -> bool:
    """A parked engine gives only what it has kept."""
    kept = leaving.retained
    return not kept or any(kept.get(account) for account in launching.devices)
