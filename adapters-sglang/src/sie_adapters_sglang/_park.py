"""Park and wake, in the order that SGLang survives.

Releasing the memory of a busy engine kills it; so do a second release, a resume that no release came before, and a
request or a health probe while it has no memory. So: close the gate, wait for what runs, flush, abort what is left, see
that nothing runs, and only then release. While it is parked nobody asks it anything: it lives as long as its process.
Whatever fails on the way, the engine's state is not known any more: the error makes the core unload it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import frozen
from sie_core import TransitionCancelled, TransitionContext, TransitionError

from sie_adapters_sglang._control import Control
from sie_adapters_sglang._gate import Gate

__all__ = ["Pace", "Parking"]

_AGAIN_S = 0.5


@frozen
class Pace:
    """How long each step may take, in seconds."""

    drain_s: float = 10.0
    flush_s: float = 10.0
    abort_s: float = 30.0
    move_s: float = 120.0


class Parking:
    """The state of one engine between its parks. ``parked``: ``None`` after a failure, when nobody knows."""

    def __init__(self, control: Control, gate: Gate, alive: Callable[[], bool], pace: Pace | None = None) -> None:
        self.control, self._gate, self._alive = control, gate, alive
        self.pace = pace or Pace()
        self.parked: bool | None = False

    def park(self, ctx: TransitionContext) -> None:
        """Raises TransitionError; only what was called off before the release leaves the engine as it was."""
        if self.parked is not False:
            raise TransitionError("the engine is parked already, or in a state that is not known")
        self._gate.close()
        try:
            self._quieten(ctx)
            if ctx.cancelled.is_set():
                raise TransitionCancelled("the park was called off")
        except TransitionCancelled:
            self._gate.open()  # nothing was given up yet
            raise
        self.parked = None
        self._must_live()
        self.control.release(self._within(ctx, self.pace.move_s))
        self._must_live()
        self.parked = True

    def wake(self, ctx: TransitionContext) -> None:
        """Raises TransitionError."""
        if self.parked is not True:
            raise TransitionError("the engine is not parked, or in a state that is not known")
        self._must_live()
        self.parked = None
        self.control.resume(self._within(ctx, self.pace.move_s))
        self._must_live()
        self.parked = False
        self._gate.open()

    def _quieten(self, ctx: TransitionContext) -> None:
        """Until nothing runs, by the engine's own word.

        That word counts only once every request of ours has ended: one that is still on its way there is not seen.
        """
        idle = self._gate.wait_idle(self._within(ctx, self.pace.drain_s))
        flushed = self.control.flush(self._within(ctx, self.pace.flush_s))
        if not (idle and flushed):
            self._abort(ctx)
            if not self.control.flush(self._within(ctx, self.pace.flush_s)):
                raise TransitionError("the engine does not come to rest: it can't be parked")
        busy = self.control.busy()
        if busy:
            raise TransitionError(f"the engine still runs {busy} request(s) that are not ours")

    def _abort(self, ctx: TransitionContext) -> None:
        """Again and again: a request that was on its way when all were aborted was not among them."""
        until = time.monotonic() + self.pace.abort_s
        while True:
            self.control.abort_all()
            left = until - time.monotonic()
            if self._gate.wait_idle(self._within(ctx, min(_AGAIN_S, left))):
                return
            if left <= 0:
                raise TransitionError(f"{self._gate.running} request(s) don't come to rest: it can't be parked")

    def _must_live(self) -> None:
        if not self._alive():
            raise TransitionError("the engine died")

    def _within(self, ctx: TransitionContext, seconds: float) -> float:
        left = ctx.deadline - time.monotonic()
        if left <= 0:
            raise TransitionError("no time is left to park or wake the engine")
        return min(seconds, left)
