"""Looking after what takes too long, with one timer for all requests: a timer each would cost more than the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["Patrol"]

ROUNDS: Final = 4
"""Rounds in the time after which a guest is overdue: it is found within 5/4 of that time."""


class Patrol:
    """Calls each guest that has stayed for ``after_s`` seconds, once."""

    __slots__ = ("_after_s", "_loop", "_since", "_timer")

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[Callable[[], None], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, guest: Callable[[], None]) -> None:
        """Begin to count for this guest."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # An application may outlive a loop (tests); its guests and its timer do not.
            self._loop, self._timer = loop, None
            self._since.clear()
        self._since[guest] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._after_s / ROUNDS, self._round)

    def leave(self, guest: Callable[[], None]) -> None:
        """Stop counting. No harm for one that was called already."""
        self._since.pop(guest, None)

    def hurry(self) -> None:
        """Call the guest that has stayed longest now, if there is one."""
        guest = next(iter(self._since), None)
        if guest is not None:
            del self._since[guest]
            guest()

    def _round(self) -> None:
        loop = self._loop
        assert loop is not None
        latest = loop.time() - self._after_s
        overdue = []
        for guest, since in self._since.items():  # The longest stay comes first.
            if since > latest:
                break
            overdue.append(guest)
        for guest in overdue:
            del self._since[guest]
            guest()
        self._timer = loop.call_later(self._after_s / ROUNDS, self._round) if self._since else None
