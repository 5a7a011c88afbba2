"""Reasons that are looked for in the decision ring, not only read by people."""

from __future__ import annotations

from typing import Final

__all__ = ["HOST_SHORT", "HOST_WAITS", "IDLE", "TIER_FULL"]

IDLE: Final = "idle time-out"
TIER_FULL: Final = "the host tier is full"
HOST_SHORT: Final = "the host runs short of memory"
HOST_WAITS: Final = "tasks on the host wait for memory"
