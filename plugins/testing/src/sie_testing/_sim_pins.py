"""What the configuration says in a simulated run, what operators pinned by hand, and what must come of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attrs import define, field
from sie_core import ModelSpec, Residency, ResidencyChanged

if TYPE_CHECKING:
    from sie_testing._sim_world import World

__all__ = ["Pinned"]


@define(eq=False)
class Pinned:
    """The file and the pins of one world."""

    world: World
    file: dict[str, ModelSpec] = field(factory=dict)
    """By name, the models as they are configured."""
    by_hand: dict[str, bool] = field(factory=dict)
    """What an operator said last; until the file says something else."""
    _owed: dict[str, float] = field(factory=dict)
    """Pinned models that nobody asked to leave, and when they left."""

    def apply(self, specs: Iterable[ModelSpec]) -> None:
        """The file is changed, or only read again."""
        wanted = {spec.name: spec for spec in specs}
        for name in [*self.by_hand]:
            before, after = self.file.get(name), wanted.get(name)
            if before is None or after is None or before.pinned != after.pinned:
                del self.by_hand[name]
        self.file = wanted
        self.world.registry.apply(wanted.values())
        for name, pinned in self.by_hand.items():
            if self.world.records[name].spec.pinned is not pinned:
                said = "pinned" if pinned else "unpinned"
                self.world.problems.append(f"{name} was {said} by hand, and a file in which that is as before undid it")

    def pin(self, name: str, pinned: bool) -> None:
        """By hand."""
        self.world.registry.pin(name, pinned)
        self.by_hand[name] = pinned

    def heard(self, event: ResidencyChanged) -> None:
        """A pinned model is gone: who asked for that?"""
        record = self.world.records.get(event.model)
        if record is None or (event.before, event.after) != (Residency.UNLOADING, Residency.UNLOADED):
            return
        registry = self.world.registry
        asked = record.unload_waiters or record.park_waiters or record.removed or registry._roster.closing
        if record.spec.pinned and registry._pins._started and not asked:
            self._owed[event.model] = self.world.loop.time()

    def look(self) -> str | None:
        """The rule that does not hold, if one does not."""
        for name, left_at in [*self._owed.items()]:
            record = self.world.records.get(name)
            over = self.world.registry._roster.closing or record is None or record.removed or not record.spec.pinned
            if over or (record is not None and record.state is not Residency.UNLOADED):
                del self._owed[name]
            elif self.world.loop.time() > left_at:
                return f"{name} is pinned and was unloaded, though nobody asked for that, and is not loaded again"
        return None
