"""Park and wake: an engine's state to host memory and back. What fails falls back to unload, or to a cold load.

The host copy is let go only after the wake was verified, so a wake that ran out of memory can plan again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from sie_core.adapter import Declined, HostOffload, HostResidue
from sie_core.errors import (
    HookTimeout,
    HostOutOfMemory,
    OutOfMemory,
    ResourceExhausted,
    SieError,
    TransitionCancelled,
    TransitionError,
)
from sie_core.memory._pages import round_up
from sie_core.residency.failures import unexpected
from sie_core.residency.fence import launch_beside
from sie_core.residency.reasons import HOST_SHORT, TIER_FULL, Why
from sie_core.residency.record import Record, Seat
from sie_core.residency.roster import log
from sie_core.residency.tier import PARK_WAITS_S, RELIEF_WAITS_S, HostCopy, HostTier
from sie_core.residency.wake_check import take_baseline, verify_wake
from sie_core.types import Cause, Residency
from sie_core.units import format_apart, format_bytes

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["Parking"]

_R = Residency
_DISPLACED = Why(Cause.DISPLACED, "its device is held by pinned models: loading it elsewhere")
_FREED_ENOUGH = 0.9
"""An engine that gave back less than this of what it held is not parked again."""


class Parking:
    """Runs parks and wakes."""

    def __init__(self, life: Lifecycle, tier: HostTier) -> None:
        self._life = life
        self.tier = tier

    # --- deciding ----------------------------------------------------------------------------------

    async def announced(self, record: Record, seat: Seat) -> int | Declined | None:
        """What the engine's plugin says a park would take on the host."""
        timeout = self._life.roster.settings.reserve_timeout_s
        answer = await self._life.ask(record, seat.worker, "host_offload_bytes", timeout, engine=seat.engine)
        return answer if answer is None or isinstance(answer, Declined) else round_up(int(answer))

    def why_not(self, record: Record) -> str | None:
        """Why the model can't be parked; ``None``: it can, if the host has room."""
        seat = record.seat
        if not self.tier.on:
            return "there is no host tier (memory.host_cache_bytes)"
        if not record.spec.host_offload:
            return "its configuration says host_offload: false"
        if seat is None or seat.offload is None:
            return "no plugin offers to park its engine"
        if isinstance(seat.offload, Declined):
            return seat.offload.reason
        if seat.offload > self.tier.budget:
            copy, budget = format_apart(seat.offload, self.tier.budget)
            return f"its {copy} are over the budget of {budget}"
        return None

    # --- park --------------------------------------------------------------------------------------

    async def park(self, record: Record, why: Why) -> None:
        """The transition of a drained model. It ends parked, or unloaded."""
        life, roster, seat, epoch = self._life, self._life.roster, record.seat, record.epoch
        assert seat is not None
        started = roster.now()
        kept = record.name in self.tier.copies
        try:
            await take_baseline(life, record, seat)  # a change of the configuration may have asked for checks since
            await self._make_room(record, seat)
            await self._fold_growth(record, seat)
            with roster.moving_bytes(record.devices) as alone:
                before = roster.used(record.devices)
                offload, report = await self._offload(record, seat, kept)
                if not self.tier.realise(record.name, offload.host_bytes):
                    raise ResourceExhausted(f"it takes {format_bytes(offload.host_bytes)} on the host, unannounced")
                after = roster.used(record.devices)
                came_free = {
                    name: max(0, before[name] - after[name])
                    for name in record.devices
                    if name in before and name in after and alone(name)
                }
        except HookTimeout as error:
            log.error("%s: %s", record.name, error.message)
            self._observe_park(record, started, "timeout")
            seat.dead = error.message
            life.quarantine(record, seat.worker, why)
            return
        except Exception as error:  # whatever a plugin raises: fall back to what happens without the tier
            problem = error.message if isinstance(error, SieError) else f"{type(error).__name__}: {error}"
            log.warning("%s: can't be parked, is unloaded: %s", record.name, problem, exc_info=unexpected(error))
            roster.decide(record.name, "park failed", problem)
            self._observe_park(record, started, type(error).__name__)
            life.unload(record, Why(why.cause, f"{why.words}; could not be parked"))
            return
        self.tier.keep_parked(record.name)
        self._credit(record, offload, came_free, report, why)
        record.park_s = roster.now() - started
        self._observe_park(record, started, "ok")
        record.task = None
        roster.set(record, _R.PARKED, why.words, why.cause)
        life.admission.gone(record)
        life.settle(record, epoch)

    async def _fold_growth(self, record: Record, seat: Seat) -> None:
        """What the engine came to need since its load is part of what its wake has to book."""
        grown = self._life.roster.growths(record.name)
        if not grown:
            return
        record.booked = tuple(
            attrs.evolve(need, static=need.static + grown.get(need.account, 0)) for need in record.booked
        )
        record.resident_bytes.update(await self._life.report(seat))

    async def _make_room(self, record: Record, seat: Seat) -> None:
        """See to it that the host bytes are booked. Raises ResourceExhausted: then the model unloads."""
        tier = self.tier
        own = tier.going.get(record.name)
        if own is not None:
            await asyncio.wait({own})  # its backup is being dropped: it must not be parked into that
        if record.name in tier.copies:
            return  # the backup that survived the last wake
        announced = await self.announced(record, seat)
        if not isinstance(announced, int):
            raise ResourceExhausted(announced.reason if isinstance(announced, Declined) else "nobody parks it any more")
        seat.offload = announced
        go = tier.room_for(announced, keep={record.name})
        if go is None:
            raise ResourceExhausted(
                f"{format_bytes(announced)} do not fit into the host tier "
                f"({format_bytes(tier.used)} of {format_bytes(tier.budget)} are taken)"
            )
        for name in go:
            self._dropping(name, TIER_FULL)
        until = self._life.roster.now() + PARK_WAITS_S
        tier.awaited[record.name] = announced
        try:
            while tier.set_aside(record.name, announced) is None:
                leaving, left = tier.leaving(PARK_WAITS_S), until - self._life.roster.now()
                if not leaving or left <= 0:
                    raise ResourceExhausted("the host has no room for the copy")
                await asyncio.wait(leaving.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del tier.awaited[record.name]

    async def _offload(self, record: Record, seat: Seat, kept: bool) -> tuple[HostOffload, Mapping[str, int | None]]:
        """Offload; an engine that outgrew its ``kept`` backup (a LoRA was loaded) gets a copy of its new size."""
        try:
            return await self._offload_once(record, seat)
        except HostOutOfMemory:
            if not kept:
                raise
        freed = await seat.worker.call(
            seat.engine.drop_backup, hook="drop_backup", timeout=self._life.roster.settings.close_timeout_s
        )
        if not freed:
            raise ResourceExhausted("it has outgrown its host copy, and can't let go of that")
        self.tier.forget(record.name)
        await self._make_room(record, seat)
        return await self._offload_once(record, seat)

    async def _offload_once(self, record: Record, seat: Seat) -> tuple[HostOffload, Mapping[str, int | None]]:
        """The hook's answer, and what the engine itself reports afterwards."""
        timeout = self._life.roster.settings.offload_timeout_s
        record.ctx = ctx = self._life.context(record, timeout)
        answer, report = await self._life.move(record, seat, "offload_to_host", timeout, ctx)
        if not isinstance(answer, HostOffload):
            raise TransitionError("no plugin parks it: offload_to_host returned None")
        if seat.dead is not None:
            raise TransitionError(f"the engine died while it was parked: {seat.dead}")
        return answer, report

    def _credit(
        self,
        record: Record,
        offload: HostOffload,
        measured: Mapping[str, int],
        report: Mapping[str, int | None],
        why: Why,
    ) -> None:
        """Book what is left on the devices, as measured: an engine that freed less than it said is charged for it.

        The device's figure counts only where nobody else moved bytes; its own report counts everywhere.
        """
        roster, seat = self._life.roster, record.seat
        assert seat is not None
        retained: dict[str, int] = {}
        freed = 0
        for account in record.devices:
            told = offload.retained.get(account, 0)
            holding = record.resident_bytes.get(account)
            left = max(told, report.get(account) or 0)
            if holding is None:
                retained[account] = left
                continue
            if account in measured:
                left = max(left, holding - measured[account])
            came_free = max(0, holding - left)
            freed += came_free
            retained[account] = left
            if came_free < _FREED_ENOUGH * (holding - told):
                held, gave = format_apart(holding, came_free)
                too_few = f"it held {held} on {account} and gave back {gave}"
                seat.offload = Declined(too_few)
                log.warning("%s: parked; parking is now disabled for this model: %s", record.name, too_few)
                roster.decide(record.name, "not parkable", too_few)
        record.retained = retained
        promised = sum(need.static + need.context + need.headroom for need in record.booked)
        for account, nbytes in retained.items():
            roster.ledger.realise(record.name, account, nbytes)
        roster.ledger.retain(record.name, retained)
        roster.release_growths(record.name)
        roster.sample(record.devices)
        roster.departed(record.name, "park", why, promised=promised, freed=freed)

    # --- dropping ----------------------------------------------------------------------------------

    def _dropping(self, name: str, why: Why) -> None:
        task = asyncio.get_running_loop().create_task(self.drop(self._life.roster.records[name], why))
        self.tier.going[name] = task
        task.add_done_callback(lambda _: self.tier.going.pop(name, None))
        self._life.keep(task)

    async def drop(self, record: Record, why: Why) -> None:
        """Give up a parked engine, or the backup of a resident one."""
        copy, seat = self.tier.copies.get(record.name), record.seat
        if copy is None or seat is None:
            return
        if record.state is _R.PARKED:
            self._life.unload(record, why)
            if record.task is not None:
                await asyncio.wait({record.task})
        elif copy.droppable and record.state in (_R.RESIDENT, _R.DRAINING):
            await self._drop_backup(record, seat, copy, why)

    async def _drop_backup(self, record: Record, seat: Seat, copy: HostCopy, why: Why) -> None:
        timeout = self._life.roster.settings.close_timeout_s
        try:
            freed = await seat.worker.call(seat.engine.drop_backup, hook="drop_backup", timeout=timeout)
        except HookTimeout as error:
            self._life.overran(record, seat, error)
            return
        except Exception:  # it keeps its backup, and stays charged for it
            log.exception("%s: dropping its backup failed", record.name)
            freed = 0
        if not freed:
            copy.droppable = False  # the next in line has to go instead
        elif self.tier.copies.get(record.name) is copy:
            self.tier.forget(record.name)
            self._life.roster.decide(record.name, "drop backup", why.words, why.cause, freed=copy.nbytes)

    def relieve_host(self, short: int, why: Why = HOST_SHORT) -> None:
        """The host itself runs short: give idle memory back, then backups, then the copies parked longest ago."""
        tier = self.tier
        short -= tier.give_back_idle(short)
        short -= tier.leaving_bytes(RELIEF_WAITS_S)
        for name in tier.in_order_of_going():
            if short <= 0:
                return
            short -= tier.held(name)
            self._dropping(name, why)

    # --- wake --------------------------------------------------------------------------------------

    async def wake(self, record: Record) -> None:
        """The transition of a parked model that is wanted. It ends resident, parked again, or unloaded."""
        life, roster, seat, epoch = self._life, self._life.roster, record.seat, record.epoch
        assert seat is not None
        started = roster.now()
        try:
            residue = await self._admit_and_restore(record, seat, epoch)
            await verify_wake(life, record, seat)
        except HookTimeout as error:
            log.error("%s: %s", record.name, error.message)
            self._observe_wake(record, started, "timeout")
            seat.dead = error.message
            life.quarantine(record, seat.worker, Why(Cause.OVERRAN, error.message))
            return
        except TransitionCancelled as error:
            self._back_to_parked(record, error.message)
            life.settle(record, epoch)
            return
        except ResourceExhausted as error:
            self._no_room(record, error)
            life.settle(record, epoch)
            return
        except Exception as error:  # any other failure: drop the copy and load cold, as if there were no tier
            problem = error.message if isinstance(error, SieError) else f"{type(error).__name__}: {error}"
            log.warning("%s: can't be woken, is loaded again: %s", record.name, problem, exc_info=unexpected(error))
            roster.decide(record.name, "wake failed", problem)
            self._observe_wake(record, started, type(error).__name__)
            life.unload(record, Why(Cause.WAKE_FAILED, "could not be woken"))
            return
        self._after_wake(record, seat, residue)
        # Without the wait for room: what counts is what a wake costs, and the guard against thrashing is made from it.
        record.wake_s = roster.now() - record.admitted_at
        self._observe_wake(record, record.admitted_at, "ok")
        life.count_lookup(record, hit=True)
        record.task = None
        record.resident_at = record.last_used = roster.now()
        roster.set(record, _R.RESIDENT, "woken")
        life.loras.sweep(record)
        life.settle(record, epoch)

    async def _admit_and_restore(self, record: Record, seat: Seat, epoch: int) -> HostResidue:
        life, roster = self._life, self._life.roster
        timeout = roster.settings.offload_timeout_s
        at_least, cause = 0, None
        reserve = record.reserve  # a change of the configuration clears it
        for attempt in range(roster.settings.load_retries + 1):
            if life.unwanted(record, epoch) or reserve is None:
                raise TransitionCancelled("no longer wanted")
            placed = await life.admission.admit(record, reserve, wake=True, at_least=at_least, cause=cause)
            record.admitted_at = roster.now()
            if life.unwanted(record, epoch) or seat.dead is not None:
                raise TransitionCancelled(seat.dead or "no longer wanted")
            record.ctx = ctx = life.context(record, timeout)
            ctx.grant = placed.grant
            try:
                with roster.moving_bytes(record.devices):
                    answer, report = await life.move(record, seat, "restore_from_host", timeout, ctx)
            except OutOfMemory as error:
                roster.ledger.retain(record.name, record.retained)
                roster.decide(record.name, "wake", f"out of memory: {error.message}")
                life.admission.gone(record)
                if attempt == roster.settings.load_retries:
                    raise
                at_least, cause = 1, error
                continue
            if not isinstance(answer, HostResidue):
                raise TransitionError("no plugin wakes it: restore_from_host returned None")
            if seat.dead is not None:
                raise TransitionError(f"the engine died: {seat.dead}")
            record.resident_bytes.update({account: held for account, held in report.items() if held is not None})
            return answer
        raise AssertionError("the loop returns or raises")

    def _after_wake(self, record: Record, seat: Seat, residue: HostResidue) -> None:
        roster = self._life.roster
        for need in record.booked:
            roster.ledger.realise(record.name, need.account, record.resident_bytes.get(need.account))
        record.retained = {}
        roster.ledger.settle(record.name)
        roster.report_overrun(record)
        roster.sample(record.devices)
        if residue.host_bytes:
            self.tier.keep_backup(record.name, droppable=residue.droppable)
        else:
            self.tier.forget(record.name)

    def _back_to_parked(self, record: Record, reason: str) -> None:
        record.task = None
        self._life.roster.ledger.retain(record.name, record.retained)
        self._life.roster.set(record, _R.PARKED, reason)

    def _no_room(self, record: Record, error: ResourceExhausted) -> None:
        """Pins hold its device: load it elsewhere if it may go there, else it stays parked and its waiters hear so."""
        elsewhere = record.spec.device is None and len(self._life.roster.devices) > len(record.devices)
        self._back_to_parked(record, "no memory for it")
        fenced = launch_beside(self._life.roster, record) is not None
        if elsewhere and not fenced and self._life.admission.fits_elsewhere(record):
            self._life.unload(record, _DISPLACED)
        else:
            record.fail_tickets(error)

    # --- counting ----------------------------------------------------------------------------------

    def _observe_park(self, record: Record, started: float, outcome: str) -> None:
        observer = self._life.roster.observer
        if observer is not None:
            observer.parked(record.name, self._life.roster.now() - started, outcome=outcome)

    def _observe_wake(self, record: Record, started: float, outcome: str) -> None:
        observer = self._life.roster.observer
        if observer is not None:
            observer.woken(record.name, self._life.roster.now() - started, outcome=outcome)
