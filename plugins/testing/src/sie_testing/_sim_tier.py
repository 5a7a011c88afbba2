"""What must hold of the host tier, and who makes trouble for it: later parks, a host that runs short, look-ups."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import define, field
from sie_core import Cause, Residency, ResidencyChanged, SieError
from sie_core.memory.ledger import Need
from sie_core.residency.fence import launch_beside
from sie_core.residency.record import Record
from sie_core.residency.tier import PARK_WAITS_S

if TYPE_CHECKING:
    from sie_testing._sim_world import World

__all__ = ["Lookups", "TierRules", "park_again", "snatch_host", "starve"]

_R = Residency
_PATIENCE_S = 20.0
"""A host that is short looks once a second, and waits 10 s for each copy that is on its way out."""


# --- who acts ------------------------------------------------------------------------------------------


async def park_again(world: World, order: random.Random, name: str) -> None:
    """An operator who parks, wakes and parks a model: later parks are not like the first."""
    await world.registry.load(name, wait_s=40.0)
    for _ in range(order.choice([1, 2, 3])):
        await world.registry.park(name, wait_s=40.0)
        world.counts["parked again"] += 1
        if order.random() < 0.7:
            await world.registry.wake(name, wait_s=40.0)


async def starve(world: World, order: random.Random) -> None:
    """Models that keep their copies lie parked, for the first time or not, and the host runs short for long."""
    for name in world.registry.names():
        with contextlib.suppress(SieError):
            await park_again(world, order, name)
    world.counts["starved"] += 1
    world.host_foreign = world.settings.host
    await asyncio.sleep(2 * _PATIENCE_S)
    world.host_foreign = 0


def snatch_host(world: World, order: random.Random) -> None:
    """Another process takes host memory between two looks, and gives it back after a while."""
    left = order.choice([0.0, 0.1, 0.3])
    world.host_foreign = max(world.host_foreign, int((1.0 - left) * world.settings.host))
    world.loop.call_later(order.choice([0.05, 0.4, 5.0, 60.0]), setattr, world, "host_foreign", 0)


# --- what must hold ------------------------------------------------------------------------------------


@define(eq=False)
class TierRules:
    """Copies that could go do go when there is need of their bytes; nothing is booked that the host has not."""

    world: World
    _short_since: dict[str, float] = field(factory=dict)
    """By parked model whose copy could go, since when the host has been short all the while."""
    _could_go: dict[str, tuple[float, dict[str, int]]] = field(factory=dict)
    """By model that parks, when it began, and whose copies could have gone then."""

    def look(self) -> str | None:
        """The rule that does not hold, if one does not."""
        world, now = self.world, self.world.loop.time()
        short = world.settings.watch_host and not world.registry._roster.closing and world.ledger.deficit("host") > 0
        idle = self._idle_copies() if short else {}
        self._short_since = {name: self._short_since.get(name, now) for name in idle}
        for name, since in self._short_since.items():
            if now - since > _PATIENCE_S:
                return f"the host has been short for {now - since:.0f} s, and {name}'s copy, which nobody needs, stays"
        return None

    def heard(self, event: ResidencyChanged) -> None:
        """A park begins, or has come to nothing."""
        record = self.world.records.get(event.model)
        if event.after is _R.PARKING:
            self._could_go[event.model] = self.world.loop.time(), self._beside_no_launch()
        elif event.before is _R.PARKING:
            began, could_go = self._could_go.pop(event.model, (0.0, {}))
            # Whoever waits for the device does not wait longer than this for copies that are slow to go.
            waited = self.world.loop.time() - began >= PARK_WAITS_S
            if record is not None and event.after is _R.UNLOADING and not waited:
                self._unloaded(record, could_go)

    def _unloaded(self, record: Record, could_go: dict[str, int]) -> None:
        seat, tier, world = record.seat, self.world.tier, self.world
        if seat is None or not isinstance(seat.offload, int) or seat.dead is not None or record.name in tier.copies:
            return
        if record.task is None:
            return  # torn from outside
        now = self._beside_no_launch()
        spare = {name: nbytes for name, nbytes in could_go.items() if now.get(name) == nbytes}
        room = min(tier.budget - tier.used, world.ledger.available("host") + tier.arena.idle)
        room -= sum(tier.awaited.values())
        if seat.offload > room and seat.offload <= room + sum(spare.values()):
            world.problems.append(
                f"{record.name} was unloaded for want of {seat.offload} bytes in the host tier, and the copies of "
                f"{', '.join(spare)}, which nobody needs, stay"
            )

    def _beside_no_launch(self) -> dict[str, int]:
        """Those of engines that give device memory back beside a launch stay, unless the host runs short."""
        roster = self.world.registry._roster
        return {
            name: nbytes
            for name, nbytes in self._idle_copies().items()
            if launch_beside(roster, self.world.records[name]) is None
        }

    def _idle_copies(self) -> dict[str, int]:
        """By parked model that nobody waits for and nothing keeps, the bytes of its copy."""
        return {
            name: copy.nbytes
            for name, copy in self.world.tier.copies.items()
            if _idle(self.world.records.get(name)) and name not in self.world.tier.going
        }

    def booked(self, owner: str, needs: Iterable[Need]) -> None:
        """Bytes of the host were promised: they have to be there now, not only when somebody looked last."""
        world, copy = self.world, self.world.tier.copies.get(owner)
        nbytes = sum(need.promised for need in needs if need.account == "host")
        if not nbytes or not world.settings.watch_host or (copy is not None and copy.block is not None):
            return
        nbytes -= world.ledger.lien(owner).get("host", 0)
        if nbytes > max(0, world.host_available()):
            world.problems.append(
                f"{nbytes} bytes of the host were booked for {owner}, and {world.host_available()} are free"
            )


@define(eq=False)
class Lookups:
    """Counts as telemetry does: a model that is wanted and not there is looked up once, with one result."""

    world: World
    _open: dict[str, list[str]] = field(factory=dict)
    """By model that is on its way to being resident, the results that were counted."""

    def host_cache_lookup(self, model: str, *, hit: bool) -> None:
        """One result."""
        self._open.setdefault(model, []).append("hit" if hit else "miss")
        self.world.counts["hit" if hit else "miss"] += 1

    def model_loaded(self, model: str, seconds: float, *, outcome: str) -> None:
        """Not looked at."""

    def evicted(self, model: str, cause: Cause) -> None:
        """Not looked at."""

    def parked(self, model: str, seconds: float, *, outcome: str) -> None:
        """Not looked at."""

    def woken(self, model: str, seconds: float, *, outcome: str) -> None:
        """Not looked at."""

    def heard(self, event: ResidencyChanged) -> None:
        """It is there, or it will not be."""
        record = self.world.records.get(event.model)
        wanted = record is not None and bool(record.tickets)
        if event.after is _R.RESIDENT and event.before in (_R.LOADING, _R.WAKING):
            found = self._open.pop(event.model, [])
            if self.world.tier.on and len(found) != 1:
                self.world.problems.append(
                    f"{event.model} came to be {event.after} in one look-up that counted {found}"
                )
        elif event.after in (_R.PARKED, _R.FAILED) or (event.after is _R.UNLOADED and not wanted):
            self._open.pop(event.model, None)


def _idle(record: Record | None) -> bool:
    return (
        record is not None
        and record.state is _R.PARKED
        and not (record.spec.pinned or record.tickets or record.task or record.drain)
    )
