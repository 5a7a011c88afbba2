"""Reasons that are looked for in the decision ring, not only read by people."""

from __future__ import annotations

from typing import Final

__all__ = ["HOST_SHORT", "HOST_WAITS", "IDLE", "TIER_FULL", "UNLOAD_REQUESTED"]

IDLE: Final = "idle time-out"
TIER_FULL: Final = "the host tier is full"
HOST_SHORT: Final = "the host runs short of memory"
HOST_WAITS: Final = "tasks on the host wait for memory"

UNLOAD_REQUESTED = "unload requested"
"""By an operator: it waits for the requests that run, and gives up if they take too long."""
