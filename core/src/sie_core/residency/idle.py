"""Idle time-outs: only with no ticket and no lease, checked in the step that claims the model.

They begin when the model was last used; it stays as long as ``min_resident_s`` says, and while requests are expected
that were told to come back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sie_core.residency.fence import launch_beside
from sie_core.residency.reasons import IDLE
from sie_core.residency.record import Drain, Record
from sie_core.types import Residency

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["IdleTimers"]

_R = Residency
_TICK_S = 0.001
"""Clocks of event loops are no finer: a timer may fire that much early, and must not be set again for nothing."""


class IdleTimers:
    """One timer a model, never moved, only renewed."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    def arm(self, record: Record) -> None:
        """Look again when the model would have been idle long enough. One timer a model, never moved, only renewed."""
        limit = record.spec.idle_evict_s
        if limit is None or record.idle_timer is not None or record.state is not _R.RESIDENT:
            return
        left = max(0.0, _left(record, limit, self._life.roster.now()))
        record.idle_timer = asyncio.get_running_loop().call_later(left, self._idle_due, record)

    def _idle_due(self, record: Record) -> None:
        record.idle_timer = None
        limit = record.spec.idle_evict_s
        if limit is None or record.state is not _R.RESIDENT or record.leases or record.tickets or record.spec.pinned:
            return
        if _left(record, limit, self._life.roster.now()) > _TICK_S:
            self.arm(record)
        elif launch_beside(self._life.roster, record) is not None:
            self._life.drains.look_again(record)
        else:
            self._life.drains.begin(record, Drain(IDLE, park=True))


def _left(record: Record, limit: float, now: float) -> float:
    return max(record.last_used + limit, record.stays_until) - now
