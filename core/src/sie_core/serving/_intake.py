"""What is still to be prepared: newcomers first, and large requests piece by piece."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sie_core.serving._job import TURN, Chunk, Job

if TYPE_CHECKING:
    from sie_core.serving._hop import PreparedChunk

__all__ = ["Intake"]

_CHUNK_S = 0.01  # work for one hop of preparing: a large request is cut up, so that others get on in between
_CHUNK_MIN, _CHUNK_MAX = 64, 512


class Intake:
    """Jobs of which something is not prepared yet. ``chunk``: items prepared in one hop, as measured."""

    def __init__(self) -> None:
        self.chunk = _CHUNK_MIN
        self._newcomers: OrderedDict[Job, None] = OrderedDict()
        self._unfinished: OrderedDict[Job, None] = OrderedDict()

    def add(self, job: Job) -> None:
        """A request came."""
        self._newcomers[job] = None

    def drop(self, job: Job) -> None:
        """A request is answered, or left."""
        self._newcomers.pop(job, None)
        self._unfinished.pop(job, None)

    def take(self, run_items: int) -> list[Chunk]:
        """What to prepare next: newcomers in order of arrival, and one more piece of one large job that runs short.

        ``run_items``: items in a run, lately; a large job keeps two runs' worth ready.
        """
        chunks: list[Chunk] = []
        items = 0
        while items < self.chunk and self._newcomers:
            job, _ = self._newcomers.popitem(last=False)
            if job.dead:
                continue
            chunks.append(job.take_chunk(self.chunk))
            items += len(chunks[-1].request.items)
            if job.unprepared:
                self._unfinished[job] = None
        ahead = max(TURN, 2 * run_items)
        short = next((job for job in self._unfinished if len(job.ready) < ahead and not job.dead), None)
        if short is not None and all(chunk.job is not short for chunk in chunks):
            chunks.append(short.take_chunk(self.chunk))
            if short.unprepared:
                self._unfinished.move_to_end(short)
            else:
                del self._unfinished[short]
        return chunks

    def accept(self, prepared: Sequence[PreparedChunk]) -> None:
        """Hand what was prepared to its jobs; an error fails its own job."""
        for part in prepared:
            job, count = part.chunk.job, len(part.items)
            job.tokenise_s += part.seconds
            if count >= TURN:
                paced = int(_CHUNK_S / max(part.seconds, 1e-6) * count)
                self.chunk = min(max((3 * self.chunk + paced) // 4, _CHUNK_MIN), _CHUNK_MAX)
            if part.error is not None:
                job.fail(part.error)
            else:
                job.accept(part.chunk.first, part.items)
