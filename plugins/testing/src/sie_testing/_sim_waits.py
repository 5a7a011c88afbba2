"""How long the requests of a simulated run may wait: the limit of a wake while a wake will do, else that of a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field
from sie_core import ModelLoading, Residency, ResidencyChanged

if TYPE_CHECKING:
    from sie_testing._sim_world import World

__all__ = ["Wait", "Waits"]

_R = Residency
_COLD = frozenset({_R.UNLOADED, _R.QUEUED, _R.LOADING, _R.UNLOADING, _R.FAILED, _R.QUARANTINED})
_LATE_S = 0.001


@define(eq=False)
class Wait:
    """One request: since when it waits, and whether its model had to be loaded from its files meanwhile."""

    model: str
    asked_s: float | None
    began: float
    began_cold: bool
    cold: bool


@define(eq=False)
class Waits:
    """All requests that wait for a model in one world."""

    world: World
    _open: dict[int, Wait] = field(factory=dict)

    def begin(self, model: str, asked_s: float | None) -> Wait:
        """A request arrives."""
        cold = self._is_cold(model)
        one = Wait(model, asked_s, self.world.loop.time(), cold, cold)
        self._open[id(one)] = one
        return one

    def end(self, one: Wait, error: BaseException | None) -> None:
        """It has its answer."""
        del self._open[id(one)]
        settings, world = self.world.settings.registry, self.world
        one.cold = one.cold or self._is_cold(one.model)  # somebody may have asked for an unload meanwhile
        waited = world.loop.time() - one.began
        limit = settings.load_wait_s if one.cold else settings.wake_wait_s
        if one.cold and not one.began_cold:
            limit = max(limit, settings.wake_wait_s)
        most = limit if one.asked_s is None else min(one.asked_s, limit)
        if waited > most + _LATE_S:
            what = "a load" if one.cold else "a wake"
            world.problems.append(f"a request waited {waited:.3f} s for {what} of {one.model}: {most} s at most")
        record = world.records.get(one.model)
        loads = record is not None and record.state is _R.LOADING
        if loads and isinstance(error, ModelLoading) and 0 < waited < most - _LATE_S:
            world.problems.append(f"a request gave up a load of {one.model} after {waited:.3f} s: it may wait {most} s")

    def heard(self, event: ResidencyChanged) -> None:
        """What a wake was expected to do may take a load."""
        if event.after in _COLD:
            for one in self._open.values():
                if one.model == event.model:
                    one.cold = True

    def _is_cold(self, model: str) -> bool:
        record = self.world.records.get(model)
        if record is None or record.state in _COLD or record.retire is not None:
            return True
        if record.state is not _R.DRAINING or record.drain is None:
            return False
        parks = record.drain.park or record.drain.plan is not None
        return not parks or record.removed or self.world.registry.why_not_parked(model) is not None
