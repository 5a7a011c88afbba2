"""What the service keeps of a model: its queue places, its batcher, its meter, and what it may be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from sie_core.errors import QueueFull, Unsupported
from sie_core.types import Capabilities, EncodeParams, Item, ModelSpec, Task

if TYPE_CHECKING:
    from sie_core.serving.batcher import Batcher
    from sie_core.telemetry import ModelMeter

__all__ = ["Lane", "Place"]

_UNMEASURED_LOAD_S = 10.0


class Place:
    """A request's place in its model's queue, from its arrival until the engine has it or it leaves."""

    __slots__ = ("_lane", "_waits")

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._waits = True
        lane.waiting += 1

    def free(self) -> None:
        """Give the place to somebody else. Idempotent."""
        if self._waits:
            self._waits = False
            self._lane.waiting -= 1


@define(eq=False)
class Lane:
    """One model's way through the service."""

    name: str
    spec: ModelSpec
    """As last seen: its queue and its deadline may change while the engine stays."""
    meter: ModelMeter
    waiting: int = 0
    batcher: Batcher | None = None
    load_s: float | None = None
    _plain: Capabilities | None = None
    """Capabilities that were found to allow a plain request: dense output of text."""
    _image_inputs: frozenset[str] = field(factory=lambda: frozenset({"image", "images"}))

    def enter(self) -> Place:
        """Take a place. Raises QueueFull."""
        limit = self.spec.queue
        if self.waiting >= limit:
            raise QueueFull(
                f"{self.waiting} requests wait for model {self.name!r}, which is as many as may (queue: {limit})",
                retry_after_s=self._until_a_place_is_free(),
            )
        return Place(self)

    def _until_a_place_is_free(self) -> float:
        """Half of what waits should be done by then; measured, where anything was measured."""
        if self.batcher is not None and self.batcher.cost.runs:
            return max(1.0, self.batcher.waiting_items * self.batcher.cost.item_seconds / 2)
        return self.load_s or _UNMEASURED_LOAD_S

    def check(self, known: Capabilities, items: Sequence[Item], params: EncodeParams) -> None:
        """Refuse what the model can't do, before it costs anything. Raises Unsupported."""
        plain = params.output_types == ("dense",) and not any(item.images for item in items)
        if plain and known is self._plain:
            return
        if Task.ENCODE not in known.tasks:
            tasks = sorted(task.value for task in known.tasks)
            raise Unsupported(
                f"model {self.name!r} does not encode; it can {', '.join(tasks)}", supported=tasks, param="model"
            )
        missing = [name for name in params.output_types if name not in known.outputs]
        if missing:
            raise Unsupported(
                f"model {self.name!r} gives no {', '.join(missing)} output; it gives {', '.join(known.outputs)}",
                supported=known.outputs,
                param="output_types",
            )
        if plain:
            self._plain = known
            return
        for index, item in enumerate(items):
            if item.images and self._image_inputs.isdisjoint(known.inputs):
                error = Unsupported(
                    f"model {self.name!r} takes no images; it takes {', '.join(known.inputs)}",
                    supported=known.inputs,
                    param="items",
                )
                error.index = index
                raise error
