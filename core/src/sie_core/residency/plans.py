"""Who waits for memory, and the plans that evict for it."""

from __future__ import annotations

import asyncio

from attrs import define, field

from sie_core.adapter import AdmissionReserve, Grant
from sie_core.errors import SieError
from sie_core.memory.ledger import Need
from sie_core.residency.reasons import Why
from sie_core.residency.record import Record
from sie_core.types import Cause

__all__ = ["Needer", "Placed", "Plan"]


@define(eq=False)
class Placed:
    """A booked admission: where the engine goes and what it may take."""

    devices: tuple[str, ...]
    grant: Grant


@define(eq=False)
class Plan:
    """Victims that were named for one needer: ``draining`` have leases left, ``owing`` have not given their bytes."""

    placed: Placed
    why: Why
    victims: tuple[str, ...]
    draining: set[str]
    owing: set[str]
    needs: tuple[Need, ...] = ()
    staging: tuple[Need, ...] = ()
    committed: bool = False


@define(eq=False)
class Needer:
    """A model that waits for memory. ``at_least``: evict so many models even if the ledger says that it fits."""

    record: Record
    reserve: AdmissionReserve
    future: asyncio.Future[Placed]
    at: float
    purpose: str = "engine"
    at_least: int = 0
    cause: SieError | None = None
    wake: bool = False
    plan: Plan | None = None
    refused: set[str] = field(factory=set)
    stays_until: float = 0.0

    @property
    def since(self) -> float:
        oldest = self.record.oldest_ticket
        return self.at if oldest is None else min(self.at, oldest)

    @property
    def why(self) -> Why:
        """Why its victims go."""
        cause = Cause.ROOM_FOR_ANOTHER
        if self.at_least:  # the device gave out before the book did
            cause = Cause.RUN_OOM if self.cause is None else Cause.LOAD_OOM
        return Why(cause, f"room for {self.record.name}")

    @property
    def owner(self) -> str | None:
        """For the ledger: a parked engine's needs replace what it still holds."""
        return self.record.name if self.wake else None
