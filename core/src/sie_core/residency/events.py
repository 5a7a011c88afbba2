"""What engines tell the core, from any thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from attrs import define

from sie_core.residency.record import Record
from sie_core.residency.worker import EngineWorker

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["Events"]

_ANSWER_S = 5.0


@define(eq=False)
class Events:
    """The line from one engine to the lifecycle."""

    lifecycle: Lifecycle
    record: Record
    loop: asyncio.AbstractEventLoop
    worker: EngineWorker
    dead: tuple[str, str] | None = None
    """Why, and in detail."""

    def died(self, reason: str, details: str = "") -> None:
        """The engine is gone; its claims are released and the next request loads cold."""
        self.dead = reason, details
        self.loop.call_soon_threadsafe(self.lifecycle.died, self.record, self.worker, reason, details)

    def request_growth(self, account: str, nbytes: int) -> bool:
        """More bytes than were promised, if they are there for the taking. Not from the event loop's own thread."""
        answer: list[bool] = []
        asked, given_up = threading.Event(), threading.Event()

        def ask() -> None:
            if not given_up.is_set():  # nobody would own what were booked now
                answer.append(self.lifecycle.grow(self.record, self.worker, account, nbytes))
            asked.set()

        self.loop.call_soon_threadsafe(ask)
        if not asked.wait(timeout=_ANSWER_S):
            given_up.set()
        return bool(answer) and answer[0]
