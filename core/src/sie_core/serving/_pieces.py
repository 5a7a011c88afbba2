"""What takes long to prepare, images and texts by the megabyte, piece by piece beside everything else.

Not on the engine's thread and not with its right to run, or one request would hold up all others, other models' too. A
piece ends with the first item after ``PIECE_S`` seconds, or when its request is gone; then it is the next request's
turn. Only so much is prepared ahead: pixels take memory.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from sie_core.errors import EngineDied
from sie_core.serving._hop import PreparedChunk, prepare
from sie_core.serving._job import Chunk, Job

if TYPE_CHECKING:
    from sie_core.adapter import BatchEngine
    from sie_core.residency.worker import EngineWorker
    from sie_core.types import BatchRequest, Item

__all__ = ["Pieces", "is_slow"]

PIECE_S: Final = 0.01
_ITEMS: Final = 64
"""Items of a piece, at most."""
_LETTERS: Final = 64 * 1024
"""Letters of texts that are prepared at once."""
_SLOW_LETTERS: Final = 4 * _LETTERS


def is_slow(request: BatchRequest) -> bool:
    """Whether preparing the request may take long."""
    if request.query is not None and request.query.images:
        return True
    letters = 0
    for item in request.items:
        if item.images:
            return True
        if item.text is not None:
            letters += len(item.text)
    return letters > _SLOW_LETTERS


def prepare_piece(engine: BatchEngine, chunk: Chunk, owner: str) -> PreparedChunk:
    """Prepare as much of a chunk as a piece may hold: the result may have fewer items than the chunk."""
    result, began = PreparedChunk(chunk), time.perf_counter()
    items: list[Any] = []
    for group in _groups(chunk.request.items):
        if chunk.job.dead:
            break
        part = Chunk(chunk.job, chunk.first + len(items), evolve(chunk.request, items=group))
        (done,) = prepare(engine, [part], owner)
        result.error = done.error
        items += done.items
        if done.error is not None or time.perf_counter() - began >= PIECE_S:
            break
    result.items, result.seconds = items, time.perf_counter() - began
    return result


def _groups(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Images one by one, and texts as far as they are short."""
    start = letters = 0
    for place, item in enumerate(items):
        size = _LETTERS if item.images else len(item.text or "")
        if letters + size > _LETTERS and place > start:
            yield items[start:place]
            start, letters = place, 0
        letters += size
    yield items[start:]


class Pieces:
    """The slow requests of one batcher, in turns."""

    def __init__(self, engine: BatchEngine, worker: EngineWorker, owner: str) -> None:
        self._engine = engine
        self._owner = owner
        self._worker = worker
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        self._ready: dict[Job, None] = {}
        self._at_work = False

    def add(self, job: Job) -> None:
        """A request came."""
        self._jobs[job] = self._ready[job] = None

    def drop(self, job: Job) -> None:
        """A request is answered, or left."""
        self._jobs.pop(job, None)
        self._ready.pop(job, None)

    def go_on(self, ahead: int, then: Callable[[BaseException | None], None]) -> None:
        """Have the next piece prepared, unless one is, or ``ahead`` items are ready already.

        ``then(error)`` is called when it is. It is not kept beyond that: a batcher must go with its engine.
        """
        if self._at_work or not self._jobs or sum(len(job.ready) for job in self._ready) >= ahead:
            return
        job, _ = self._jobs.popitem(last=False)
        self._at_work = True
        chunk = job.take_chunk(_ITEMS)
        preparing = self._worker.submit(prepare_piece, self._engine, chunk, self._owner)
        preparing.add_done_callback(partial(self._prepared, then))

    def _prepared(self, then: Callable[[BaseException | None], None], future: asyncio.Future[PreparedChunk]) -> None:
        self._at_work = False
        error = EngineDied("preparing was called off") if future.cancelled() else future.exception()
        if error is None:
            self._accept(future.result())
        then(error)

    def _accept(self, done: PreparedChunk) -> None:
        job = done.chunk.job
        job.tokenise_s += done.seconds
        if done.error is not None:
            job.fail(done.error)
        job.accept(done.chunk.first, done.items)
        if job.dead:
            return
        job.next_chunk = done.chunk.first + len(done.items)
        if job.unprepared:
            self._jobs[job] = None
