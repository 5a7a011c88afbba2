"""One request inside the batcher, and the chunks in which it is prepared."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve, field, frozen

from sie_core.errors import HostOutOfMemory, InferenceError, SieError
from sie_core.types import BatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sie_core.adapter import Prepared
    from sie_core.types import Output

__all__ = ["FAULTS", "TURN", "Chunk", "Job", "translate"]

FAULTS: Final = (Exception, SystemExit)
"""What an engine may raise on the event loop. An exit out of a task would end the loop, and the server with it."""

TURN = 32  # items that a request may have run before it goes behind the others


def translate(error: BaseException, what: str) -> SieError:
    """SIE's own errors as they are; whatever else an engine raises becomes an InferenceError."""
    if isinstance(error, SieError):
        return error
    if isinstance(error, MemoryError):
        return HostOutOfMemory(f"{what} ran out of memory: {error}")
    failed = f"{what} failed: {type(error).__name__}"
    wrapped = InferenceError(f"{failed}: {error}").guarded(failed)
    wrapped.__cause__ = error
    return wrapped


def _nothing() -> None:
    return None


@define(eq=False)
class Job:
    """A request from its arrival to its answer. Lives on the event loop; other threads only carry it about."""

    request: BatchRequest
    future: asyncio.Future[None]
    deadline: float
    lease: Any = None
    on_start: Callable[[], None] = _nothing
    on_prepared: Callable[[Sequence[Prepared]], None] | None = None
    on_output: Callable[[Output], None] | None = None
    """Both raise when the answer would take more than it may."""
    left: int = 0
    outputs: list[Output | None] = field(factory=list)
    ready: dict[int, Prepared] = field(factory=dict)
    next_chunk: int = 0
    turn: int = TURN
    passed: int = 0
    started: bool = False
    bad: list[int] = field(factory=list)
    tokenise_s: float = 0.0
    inference_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.left = len(self.request.items)
        self.outputs = [None] * self.left

    @property
    def dead(self) -> bool:
        """Answered, failed, cancelled or past its deadline: nothing more is done for it."""
        return self.future.done()

    def take_chunk(self, size: int) -> Chunk:
        """The next items to prepare, ``size`` at most."""
        items, first = self.request.items, self.next_chunk
        self.next_chunk = first + size
        if first == 0 and len(items) <= size:
            return Chunk(self, 0, self.request)
        part = items[first : first + size]
        return Chunk(self, first, evolve(self.request, items=part))

    @property
    def unprepared(self) -> bool:
        """Whether chunks are left to prepare."""
        return self.next_chunk < len(self.request.items)

    def fail(self, error: BaseException) -> None:
        """End it with an error, if it has not ended yet."""
        if not self.future.done():
            self.future.set_exception(translate(error, "the engine"))

    def accept(self, first: int, items: Sequence[Prepared]) -> None:
        """Items that are ready to run, from ``first`` on."""
        if self.on_prepared is not None and not self.dead:
            try:
                self.on_prepared(items)
            except SieError as error:
                self.fail(error)
        if not self.dead:
            self.ready.update(enumerate(items, first))

    def take(self, index: int, output: Output) -> None:
        """The answer to one item; kept for as long as there is somebody to give it to."""
        if self.on_output is not None and not self.dead:
            try:
                self.on_output(output)
            except SieError as error:
                self.fail(error)
        if not self.dead:
            self.outputs[index] = output

    def start(self) -> None:
        """It left the queue: the engine has it now."""
        if not self.started:
            self.started = True
            self.on_start()


@frozen(eq=False)
class Chunk:
    """Some items of a job, from ``first`` on, as a request of their own."""

    job: Job
    first: int
    request: BatchRequest
