"""After a run that failed: who is to blame, and the others get their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sie_core.errors import OutOfMemory
from sie_core.serving._choose import Slot
from sie_core.serving._hop import Hop
from sie_core.serving._job import Job

__all__ = ["MakeRoom", "Recovery"]

MakeRoom = Callable[[Any, int], Awaitable[bool]]


class Recovery:
    """Tries again what one failed run held: in halves when memory ran out, else one request at a time.

    ``run`` runs slots and returns the hop, its answers already handed out unless it failed.
    """

    def __init__(self, run: Callable[[Sequence[Slot]], Awaitable[Hop]], make_room: MakeRoom | None) -> None:
        self._run = run
        self._make_room = make_room

    async def recover(self, slots: Sequence[Slot], error: BaseException) -> None:
        """Answer or fail all the requests that ``slots``, which failed with ``error``, belong to."""
        slots = _living(slots)
        if not slots:
            return
        if isinstance(error, OutOfMemory):
            await self._with_less(slots, error)
            return
        jobs: dict[Job, list[Slot]] = {}
        for slot in slots:
            jobs.setdefault(slot.job, []).append(slot)
        if len(jobs) == 1:
            slots[0].job.fail(error)
            return
        for part in jobs.values():
            await self._again(part)

    async def _again(self, slots: Sequence[Slot]) -> None:
        living = _living(slots)
        if living and (error := (await self._run(living)).error) is not None:
            await self.recover(living, error)

    async def _with_less(self, slots: Sequence[Slot], error: OutOfMemory) -> None:
        if len(slots) > 1:
            middle = len(slots) // 2
            await self._again(slots[:middle])
            await self._again(slots[middle:])
            return
        make_room, self._make_room = self._make_room, None  # asked once for a failed run
        if make_room is not None:
            wanted = (error.needed or 0) - (error.free or 0)
            # Not while holding a run permit: those who have to leave may need it to finish what they are doing.
            if await make_room(slots[0].job.lease, max(wanted, 1)):
                await self._again(slots)
                return
        slots[0].job.fail(error)


def _living(slots: Sequence[Slot]) -> list[Slot]:
    return [slot for slot in slots if not slot.job.dead]
