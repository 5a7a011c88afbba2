"""Who may ask the engine something: nobody while it is parked, or on its way there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sie_core import EngineDied, ModelLoading

__all__ = ["Gate", "Place"]


class Place:
    """What a request holds while it runs. ``keep``: hand it on; the function that it gives ends it."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self.kept = False

    def keep(self) -> Callable[[], None]:
        self.kept = True
        return self._leave


class Gate:
    """Counts what runs in the engine. Thread-safe: requests come on the event loop, transitions on a worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._open = True
        self._dead: str | None = None

    @contextmanager
    def enter(self) -> Iterator[Place]:
        """Hold a place.

        Raises:
            ModelLoading: the engine is parked, or on its way there.
            EngineDied
        """
        with self._changed:
            if self._dead is not None:
                raise EngineDied(self._dead)
            if not self._open:
                raise ModelLoading("the engine is being parked or woken")
            self._running += 1
        place = Place(self._leave)
        try:
            yield place
        finally:
            if not place.kept:
                self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    @property
    def running(self) -> int:
        return self._running

    def close(self) -> None:
        with self._changed:
            self._open = False

    def open(self) -> None:
        with self._changed:
            self._open = True

    def die(self, reason: str) -> None:
        """For good."""
        with self._changed:
            self._dead = self._dead or reason

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing runs, at the latest after so long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout=max(0.0, timeout_s))
