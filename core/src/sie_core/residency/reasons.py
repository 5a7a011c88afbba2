"""Why models leave: the cause, which code compares and counts, beside the words, which only people read."""

from __future__ import annotations

from typing import Final

from attrs import frozen

from sie_core.types import Cause

__all__ = [
    "CONFIG_CHANGED",
    "HOST_SHORT",
    "IDLE",
    "PARK_REQUESTED",
    "SHUTDOWN",
    "TIER_FULL",
    "UNLOAD_REQUESTED",
    "Why",
    "died",
]


@frozen
class Why:
    """A cause, and its words."""

    cause: Cause
    words: str


IDLE: Final = Why(Cause.IDLE, "idle time-out")
TIER_FULL: Final = Why(Cause.TIER_FULL, "the host tier is full")
HOST_SHORT: Final = Why(Cause.HOST_SHORT, "the host runs short of memory")
PARK_REQUESTED: Final = Why(Cause.REQUESTED, "park requested")
CONFIG_CHANGED: Final = Why(Cause.CONFIG_CHANGED, "configuration changed")
SHUTDOWN: Final = Why(Cause.SHUTDOWN, "shutdown")

UNLOAD_REQUESTED: Final = Why(Cause.REQUESTED, "unload requested")
"""By an operator: it waits for the requests that run, and gives up if they take too long."""


def died(reason: str) -> Why:
    """The engine is gone on its own."""
    return Why(Cause.ENGINE_DIED, f"the engine died: {reason}")
