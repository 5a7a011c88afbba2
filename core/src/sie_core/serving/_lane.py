"""What the service keeps of a model: its places, its batcher or turns, its meter, and what it may be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from sie_core.errors import QueueFull, Unsupported
from sie_core.serving._turns import Turns
from sie_core.types import BatchRequest, Capabilities, GenerateRequest, ModelSpec, Task

if TYPE_CHECKING:
    from sie_core.adapter import StreamEngine
    from sie_core.serving.batcher import Batcher
    from sie_core.telemetry import ModelMeter

__all__ = ["Lane", "Place"]

_UNMEASURED_LOAD_S = 10.0
_NEWEST = 0.2
"""What the newest answer counts for in the time that an answer takes."""
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_IMAGE_INPUTS = frozenset({"image", "images"})


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
    turns: Turns | None = None
    load_s: float | None = None
    answer_s: float | None = None
    """What an answer of an engine with turns takes, lately."""
    _plain: Capabilities | None = None
    """Capabilities that were found to allow a plain request: dense output of text."""

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
        if self.turns is not None and self.turns.limit and self.answer_s is not None:
            return max(1.0, self.waiting / self.turns.limit * self.answer_s / 2)
        return self.load_s or _UNMEASURED_LOAD_S

    def turns_of(self, engine: StreamEngine) -> Turns:
        """The places inside this engine."""
        if self.turns is None or self.turns.engine is not engine:
            self.turns = Turns(engine)
        return self.turns

    def ran(self, seconds: float) -> None:
        """An engine with turns took so long for an answer."""
        before = self.answer_s
        self.answer_s = seconds if before is None else before + _NEWEST * (seconds - before)

    def forget_engine(self) -> None:
        """Keep nothing of it alive."""
        self.batcher = self.turns = None

    def check(self, known: Capabilities, request: BatchRequest) -> None:
        """Refuse what the model can't do, before it costs anything. Raises Unsupported."""
        items, params = request.items, request.params
        encodes = request.task is Task.ENCODE
        plain = (
            encodes
            and params.output_types == ("dense",)
            and params.dimensions is None
            and not any(item.images for item in items)
        )
        if plain and known is self._plain:
            return
        self._check_task(request.task, known)
        missing = [name for name in params.output_types if name not in known.outputs] if encodes else []
        if missing:
            raise Unsupported(
                f"model {self.name!r} gives no {', '.join(missing)} output; it gives {', '.join(known.outputs)}",
                supported=known.outputs,
                param="output_types",
            )
        if plain:
            self._plain = known
            return
        if encodes and params.dimensions is not None and "dense" in params.output_types:
            self._check_size(known, params.dimensions)
        if not _IMAGE_INPUTS.isdisjoint(known.inputs):
            return
        if request.query is not None and request.query.images:
            raise self._no_images(known, "query")
        for index, item in enumerate(items):
            if item.images:
                error = self._no_images(known, "items")
                error.index = index
                raise error

    def _check_size(self, known: Capabilities, wanted: int) -> None:
        """Refuse a size that dense vectors can't be shortened to; one that is not known is the engine's to judge."""
        full, sizes = known.dims.get("dense"), known.matryoshka
        if full is None or wanted == full or (wanted < full if sizes is None else wanted in sizes):
            return
        offered = [*map(str, sizes or ()), *(() if full in (sizes or ()) else (str(full),))]
        said = f"any size up to {full}" if sizes is None else " or ".join(offered)
        raise Unsupported(
            f"model {self.name!r} gives {said} dimensions, not {wanted}", supported=offered, param="dimensions"
        )

    def check_generate(self, known: Capabilities, request: GenerateRequest) -> None:
        """The same for a request that generates: an engine that only embeds may die of a chat. Raises Unsupported."""
        self._check_task(Task.GENERATE, known)
        if _IMAGE_INPUTS.isdisjoint(known.inputs) and _has_images(request):
            raise self._no_images(known, "messages")

    def _no_images(self, known: Capabilities, param: str) -> Unsupported:
        return Unsupported(
            f"model {self.name!r} takes no images; it takes {', '.join(known.inputs)}",
            supported=known.inputs,
            param=param,
        )

    def _check_task(self, task: Task, known: Capabilities) -> None:
        if task not in known.tasks:
            tasks = sorted(one.value for one in known.tasks)
            raise Unsupported(
                f"model {self.name!r} does not {task.value}; it can {', '.join(tasks)}", supported=tasks, param="model"
            )


def _has_images(request: GenerateRequest) -> bool:
    if request.kind != "chat":
        return False
    contents = [message.get("content") for message in request.body["messages"]]
    return any(
        part.get("type") in _IMAGE_PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    )
