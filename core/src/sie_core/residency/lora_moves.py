"""What loading and unloading a LoRA adapter does to the engine and to the book.

An adapter's bytes are a growth of its model, booked before it is loaded. A park makes them part of what the next wake
books, as it does with every growth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import attrs

from sie_core.adapter import AdmissionReserve, DeviceNeed, LoraEngine
from sie_core.errors import EngineDied, HookTimeout, OutOfMemory, TransitionCancelled, Unsupported
from sie_core.residency.record import Lora, Record, Seat, run_permit
from sie_core.residency.roster import log
from sie_core.sources import appearance
from sie_core.types import Residency

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

_SERVING = frozenset({Residency.RESIDENT, Residency.DRAINING})

__all__ = ["LoraMoves", "check_there", "is_there", "strike_out", "takes_loras"]


class LoraMoves:
    """Calls into engines, one at a time for each (the caller holds its ``lora_turn`` and a lease)."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    async def reserve(self, record: Record, seat: Seat, name: str, source: str) -> DeviceNeed:
        """What the adapter will take on each of the engine's devices. Raises LoadError."""
        timeout, reserve = self._life.roster.settings.reserve_timeout_s, takes_loras(record, seat).lora_reserve
        need: DeviceNeed = await self._call(record, seat, reserve, name, source, hook="lora_reserve", timeout=timeout)
        return need

    async def version(self, record: Record, seat: Seat, source: str) -> object:
        """What the source's files look like now."""
        timeout = self._life.roster.settings.reserve_timeout_s
        return await self._call(record, seat, appearance, source, hook="lora_reserve", timeout=timeout)

    async def book(self, record: Record, need: DeviceNeed, purpose: str, cause: OutOfMemory | None) -> None:
        ranks = tuple(attrs.evolve(need, device=account) for account in record.devices)
        at_least = 0 if cause is None else 1
        await self._life.admission.admit(
            record, AdmissionReserve(ranks), purpose=purpose, at_least=at_least, cause=cause
        )

    def unbook(self, record: Record, seat: Seat, purpose: str) -> None:
        """Take a booking back. Where the engine is going a call may still run in it, and what that takes stays booked:
        all of its claims go with the engine."""
        if not is_there(record, seat):
            return
        self._life.roster.ledger.release(record.name, purpose=purpose)
        self._life.admission.request_pump()

    async def load(self, record: Record, seat: Seat, lora: Lora, source: str, need: DeviceNeed, purpose: str) -> None:
        """Load it from ``source``, for which ``need`` is booked: the configuration may name another one by now."""
        life, roster = self._life, self._life.roster
        timeout = roster.settings.load_timeout_s
        engine, ctx = takes_loras(record, seat), life.context(record, timeout)
        before = await self._report(record, seat)
        # With a run permit, since the engine tries it out, beside which no other model of its pool may run.
        async with run_permit(seat.permits), AsyncExitStack() as moving:
            moving.enter_context(roster.moving_bytes(record.devices))
            load = engine.lora_load
            await self._call(record, seat, load, lora.name, source, ctx, hook="lora_load", timeout=timeout)
            after = await self._report(record, seat)
        check_there(record, seat)
        grown = {account: max(0, held - before[account]) for account, held in after.items() if account in before}
        for account in record.devices:
            roster.ledger.realise(record.name, account, grown.get(account), purpose=purpose)
        roster.ledger.settle(record.name)
        roster.sample(record.devices)
        record.resident_bytes.update(after)
        lora.seat, lora.loaded_from, lora.purpose = seat, source, purpose
        lora.booked = roster.growths(record.name, purpose)
        lora.nbytes = sum(grown.get(account, need.min_bytes) for account in record.devices)
        record.loras[lora.name] = record.loras.pop(lora.name, lora)
        roster.decide(record.name, "LoRA load", lora.name, promised=lora.nbytes)

    async def _report(self, record: Record, seat: Seat) -> Mapping[str, int]:
        """What the engine says that it holds; nothing, where it fails to say: the adapter is loaded nevertheless."""
        try:
            return await self._life.report(seat)
        except HookTimeout as error:
            self._life.overran(record, seat, error)
            raise EngineDied(error.message) from error
        except Exception:
            log.exception("%s: its engine can't say what it holds", record.name)
            return {}

    async def _call(
        self, record: Record, seat: Seat, fn: Callable[..., Any], *args: Any, hook: str, timeout: float
    ) -> Any:
        """A call into the engine. Raises EngineDied where it does not return: its thread is lost."""
        try:
            return await seat.worker.call(fn, *args, hook=hook, timeout=timeout)
        except HookTimeout as error:
            self._life.overran(record, seat, error)
            raise EngineDied(error.message) from error

    async def put_out(self, record: Record, seat: Seat, lora: Lora, reason: str) -> None:
        """Have the engine forget an adapter, and its bytes struck from the book as far as they came free."""
        life, roster = self._life, self._life.roster
        timeout = roster.settings.close_timeout_s
        engine, ctx = takes_loras(record, seat), life.context(record, timeout)
        lora.seat = None  # first of all: nobody may take it up meanwhile
        before = await self._report(record, seat)
        try:
            with roster.moving_bytes(record.devices):
                unload = engine.lora_unload
                await self._call(record, seat, unload, lora.name, ctx, hook="lora_unload", timeout=timeout)
        except BaseException:
            lora.seat = seat  # for all that is known it is still there
            raise
        after = await self._report(record, seat)
        if record.seat is not seat:
            return
        self._strike(record, lora, after)
        roster.sample(record.devices)
        freed = sum(before.values()) - sum(after.values())
        roster.decide(record.name, "LoRA unload", f"{lora.name}: {reason}", promised=lora.nbytes, freed=freed)
        if lora.source is None:
            strike_out(record, lora)
        life.admission.request_pump()

    def _strike(self, record: Record, lora: Lora, after: Mapping[str, int]) -> None:
        """Its growth is a claim of its own, until a park has made it part of what the next wake books."""
        ledger = self._life.roster.ledger
        growths = [claim for claim in ledger.claims(record.name) if claim.purpose != "engine"]
        if any(claim.purpose == lora.purpose for claim in growths):
            ledger.release(record.name, purpose=lora.purpose)
        else:
            for account, nbytes in lora.booked.items():
                ledger.shrink(record.name, account, nbytes)
            record.booked = tuple(
                attrs.evolve(need, static=max(0, need.static - lora.booked.get(need.account, 0)))
                for need in record.booked
            )
        for account, held in after.items():
            elsewhere = sum(
                claim.realised or 0 for claim in growths if claim.account == account and claim.purpose != lora.purpose
            )
            if account in record.devices:
                ledger.realise(record.name, account, max(0, held - elsewhere))
        record.resident_bytes.update(after)
        lora.purpose = None


def strike_out(record: Record, lora: Lora) -> None:
    """Forget an adapter that is not loaded; one that the configuration names stays known."""
    if not lora.configured and record.loras.get(lora.name) is lora:  # there may be a new one of its name
        del record.loras[lora.name]


def takes_loras(record: Record, seat: Seat) -> LoraEngine:
    """The engine as one that takes adapters. Raises Unsupported."""
    engine = seat.engine
    if isinstance(engine, LoraEngine) and engine.max_loras > 0:
        return engine
    raise Unsupported(f"model {record.name!r} takes no LoRA adapters", supported=(), param="lora")


def is_there(record: Record, seat: Seat) -> bool:
    """Whether the engine still serves."""
    return record.seat is seat and seat.dead is None and record.state in _SERVING


def check_there(record: Record, seat: Seat) -> None:
    """Raises TransitionCancelled where the engine is gone."""
    if not is_there(record, seat):
        raise TransitionCancelled(seat.dead or "its engine is gone")
