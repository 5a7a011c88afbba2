"""What ends a stream whose engine has begun to answer and says nothing any more."""

from __future__ import annotations

import asyncio

__all__ = ["Silence"]


class Silence:
    """Lets a request's ``limit`` run out once its engine has been asked for a piece for ``most_s`` seconds.

    The time in which a client takes a piece does not count. One timer a stream, moved on when it is due: to move it at
    every piece would cost as much as all else that happens to one.
    """

    __slots__ = ("_asked_at", "_limit", "_loop", "_most_s", "_timer", "broke")

    def __init__(self, limit: asyncio.Timeout, most_s: float) -> None:
        self._limit = limit
        self._most_s = most_s
        self._loop = asyncio.get_running_loop()
        self._asked_at: float | None = None
        self._timer = self._loop.call_later(most_s, self._look)
        self.broke = False
        """Whether it has ended the request."""

    def ask(self) -> None:
        """The engine has the word."""
        self._asked_at = self._loop.time()

    def heard(self) -> None:
        """It has said something."""
        self._asked_at = None

    def over(self) -> None:
        """Nobody listens any more. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._asked_at is None else self._asked_at) + self._most_s
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        elif not self._limit.expired():
            self.broke = True
            self._limit.reschedule(now)
