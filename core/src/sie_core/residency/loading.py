"""From unloaded to resident: ask what is needed, wait for the bytes, make the engine; and how a load ends badly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import attrs

from sie_core._traces import forget_traces
from sie_core.adapter import AdmissionReserve, Engine, MemoryReport
from sie_core.errors import (
    EngineStartError,
    HookTimeout,
    OutOfMemory,
    ReserveOutdated,
    ResourceExhausted,
    TransitionCancelled,
)
from sie_core.residency.events import Events
from sie_core.residency.failures import classify, unexpected
from sie_core.residency.placement import views
from sie_core.residency.plans import Placed
from sie_core.residency.reasons import CONFIG_CHANGED, Why
from sie_core.residency.record import Record, Seat
from sie_core.residency.roster import HOST, log
from sie_core.residency.wake_check import take_baseline
from sie_core.residency.worker import EngineWorker
from sie_core.types import Capabilities, Cause, ModelSpec, Residency

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["Loading"]

_R = Residency


class Loading:
    """Runs cold loads."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life

    async def load(self, record: Record) -> None:
        """The transition. It ends resident, unloaded (called off, no memory), failed, or quarantined."""
        life, roster, epoch = self._life, self._life.roster, record.epoch
        record.worker = worker = life.worker_for(record)
        worker.had_engine = True
        engine: Engine | None = None
        try:
            engine = await self._admit_and_launch(record, worker, epoch)
        except HookTimeout as error:
            self._give_up(record, error)
            life.quarantine(record, worker, Why(Cause.LOAD_FAILED, error.message))
            return
        except TransitionCancelled as error:
            self._back_to_unloaded(record, error.message)
        except ResourceExhausted as error:
            record.fail_tickets(error)
            self._back_to_unloaded(record, "no memory for it")
        except Exception as error:  # whatever an adapter raises is a load failure, classed by type
            if record.epoch == epoch:
                self._give_up(record, error)
                self._drop_claims(record)
                roster.set(record, _R.FAILED, type(error).__name__)
            else:
                self._back_to_unloaded(record, "configuration changed")
        record.task = None
        record.progress = None
        if engine is None:
            worker.close()
            record.worker = record.seat = record.ctx = None
        elif life.unwanted(record, epoch):
            # The engine was made for a configuration that is gone, or nobody wants it any more.
            life.unload(record, record.retire or CONFIG_CHANGED)
            return
        else:
            record.failure, record.attempts = None, 0
            if record.seat is not None and record.seat.dead is None:
                record.last_crash = None
            record.resident_at = record.last_used = roster.now()
            roster.set(record, _R.RESIDENT, "loaded")
        life.settle(record)

    async def _admit_and_launch(self, record: Record, worker: EngineWorker, epoch: int) -> Engine:
        life, retries = self._life, self._life.roster.settings.load_retries
        reserve = await self.reserve(record, worker)
        at_least, cause = 0, None
        for attempt in range(retries + 1):
            if life.unwanted(record, epoch):
                raise TransitionCancelled("no longer wanted")
            if not record.tickets and attempt == 0:
                raise TransitionCancelled("everybody who waited has left")
            placed = await life.admission.admit(record, reserve, at_least=at_least, cause=cause)
            if life.unwanted(record, epoch):
                raise TransitionCancelled("no longer wanted")
            try:
                return await self._launch(record, worker, placed)
            except ReserveOutdated as error:
                life.roster.decide(record.name, "load", f"admitted again: {error.message}")
                if attempt == retries:
                    raise
                self._drop_claims(record)
                life.roster.set(record, _R.QUEUED, "it needs other than it was admitted with")
                record.reserve = None
                reserve = await self.reserve(record, worker)
            except OutOfMemory as error:
                life.roster.decide(record.name, "load", f"out of memory: {error.message}")
                if attempt == retries:
                    raise
                forget_traces(error)  # they hold what was loaded so far
                at_least, cause = 1, error
                self._drop_claims(record)
                life.roster.set(record, _R.QUEUED, "out of memory while loading")
                # One that sizes itself may have shown what it takes.
                reserve = await self.reserve(record, worker)
        raise AssertionError("the loop returns or raises")

    async def reserve(self, record: Record, worker: EngineWorker) -> AdmissionReserve:
        """What the engine will need: asked once an epoch, and again when the room there is matters to it."""
        roster = self._life.roster
        timeout = roster.settings.reserve_timeout_s
        if record.capabilities is None:
            record.capabilities = await self._described(record, worker)
        if record.reserve is None or record.reserve.self_sizing or record.reserve.host_bytes:
            devices = views(roster, record)
            answer = await self._life.ask(
                record, worker, "admission_reserve", timeout, model=self._told(record), devices=devices
            )
            if not isinstance(answer, AdmissionReserve):
                raise EngineStartError(
                    f"no plugin says what a model of adapter {record.spec.adapter!r} needs: its plugin must implement "
                    "the hook admission_reserve"
                )
            record.reserve = answer
        return record.reserve

    def _told(self, record: Record) -> ModelSpec:
        """The model as its adapter sees it: ``host_offload`` is false where there is no host tier either."""
        parks = record.spec.host_offload and self._life.parking.tier.on
        return record.spec if parks == record.spec.host_offload else attrs.evolve(record.spec, host_offload=parks)

    async def describe(self, record: Record) -> None:
        """Learn what an unloaded model can do, if its adapter can tell: some requests need no load to be refused.

        An adapter that fails at this is not reported: the load will tell.
        """
        epoch, worker = record.epoch, self._life.worker_for(record)
        try:
            known = await self._described(record, worker)
        except Exception:
            log.debug("model %r could not be described", record.name, exc_info=True)
            return
        finally:
            worker.close()
        if record.epoch == epoch and record.capabilities is None:
            record.capabilities = known

    async def _described(self, record: Record, worker: EngineWorker) -> Capabilities | None:
        roster, spec = self._life.roster, record.spec
        timeout = roster.settings.reserve_timeout_s
        known: Capabilities | None = await worker.call(
            lambda: roster.adapter(record).describe(spec), hook="describe", timeout=timeout
        )
        return known

    async def _launch(self, record: Record, worker: EngineWorker, placed: Placed) -> Engine:
        life, roster = self._life, self._life.roster
        timeout = roster.settings.load_timeout_s
        roster.set(record, _R.LOADING, f"room on {', '.join(placed.devices)}")
        record.ctx = ctx = life.context(record, timeout)
        ctx.grant = placed.grant
        events = Events(life, record, asyncio.get_running_loop(), worker)
        started = roster.now()
        with roster.moving_bytes(placed.devices) as alone:
            before = roster.used(placed.devices)
            model = self._told(record)
            engine: Engine = await worker.call(
                lambda: roster.adapter(record).load(model, ctx, events), hook="load", timeout=timeout
            )
            pool = record.reserve.headroom_pool if record.reserve is not None else None
            record.seat = seat = Seat(
                engine, worker, record.spec, record.epoch, roster.permits_of(placed.devices, pool)
            )
            try:
                report = await self._examine(record, seat)
                capabilities = engine.capabilities
            except (HookTimeout, asyncio.CancelledError):
                raise  # quarantined with its seat, or unloaded
            except BaseException:
                await life.close_engine(record, seat)
                record.seat = None
                raise
            if events.dead is not None:  # maybe before there was a seat to tell of it
                life.died(record, worker, *events.dead)
            after = roster.used(placed.devices)
        for account in placed.devices:
            realised = report.devices.get(account)
            if realised is None and account in before and account in after and alone(account):
                realised = max(0, after[account] - before[account])
            roster.ledger.realise(record.name, account, realised)
            record.resident_bytes[account] = realised
        if report.host and placed.grant.host_bytes:
            roster.ledger.realise(record.name, HOST, report.host)
            roster.ledger.shrink(record.name, HOST, max(0, placed.grant.host_bytes - report.host))
        roster.ledger.release(record.name, purpose="load_staging")
        roster.ledger.settle(record.name)
        roster.report_overrun(record)
        record.figures = report.figures
        roster.sample(placed.devices)
        seconds = roster.now() - started
        record.load_s = seconds if record.load_s is None else 0.5 * (record.load_s + seconds)
        record.capabilities = capabilities
        self._observe_load(record, seconds, "ok")
        return engine

    async def _examine(self, record: Record, seat: Seat) -> MemoryReport:
        """Ask a new engine what it holds, and what the host tier wants to know."""
        settings, worker = self._life.roster.settings, seat.worker
        report: MemoryReport = await worker.call(seat.engine.memory, hook="memory", timeout=settings.close_timeout_s)
        if settings.host_cache_bytes and record.spec.host_offload:
            seat.offload = await self._life.parking.announced(record, seat)
            await take_baseline(self._life, record, seat)
        return report

    def _observe_load(self, record: Record, seconds: float, outcome: str) -> None:
        self._life.count_lookup(record, hit=False)
        if self._life.roster.observer is not None:
            self._life.roster.observer.model_loaded(record.name, seconds, outcome=outcome)

    # --- how a load ends badly ---------------------------------------------------------------------

    def _give_up(self, record: Record, error: BaseException) -> None:
        roster = self._life.roster
        record.attempts += 1
        record.failure = failure = classify(error, attempts=record.attempts, now=roster.now())
        log.warning(
            "%s: could not be loaded (%s): %s",
            *(record.name, failure.error_class, failure.whole),
            exc_info=unexpected(error),
        )
        roster.decide(record.name, "load failed", f"{failure.error_class}: {failure.message}")
        self._observe_load(record, 0.0, failure.error_class)
        record.fail_tickets(failure.as_error(record.name))

    def give_up_quietly(self, record: Record, reason: str) -> None:
        """Nothing was made yet: as if the load had been called off."""
        if record.worker is not None:
            record.worker.close()
        record.worker = record.ctx = record.progress = None
        self._back_to_unloaded(record, reason)
        self._life.settle(record)

    def _back_to_unloaded(self, record: Record, reason: str) -> None:
        self._drop_claims(record)
        self._life.roster.set(record, _R.UNLOADED, reason)

    def _drop_claims(self, record: Record) -> None:
        self._life.roster.give_back(record, {})
        self._life.admission.gone(record)
