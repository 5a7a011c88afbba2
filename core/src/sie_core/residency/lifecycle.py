"""Transitions: load and unload, and the drain before an unload. Each is a task that the registry owns.

Requests never run a transition, so cancelling one can't tear a transition in half. A transition that ends looks at what
became of its model meanwhile (another configuration, an unload, a shutdown) and acts on it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from attrs import define

from sie_core.adapter import AdmissionReserve, Engine, MemoryReport, TransitionContext
from sie_core.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineStartError,
    HookTimeout,
    ModelNotFound,
    OutOfMemory,
    ResourceExhausted,
    ShuttingDown,
    SieError,
    TransitionCancelled,
)
from sie_core.memory.ledger import Need
from sie_core.residency.admission import Admission, Placed
from sie_core.residency.failures import classify
from sie_core.residency.placement import views
from sie_core.residency.record import Drain, Lease, Record, Seat
from sie_core.residency.roster import HOST, Roster, consume, log
from sie_core.residency.worker import EngineWorker
from sie_core.types import Residency

__all__ = ["Lifecycle"]

_R = Residency
_TICK_S = 0.001
"""Clocks of event loops are no finer: a timer may fire that much early, and must not be set again for nothing."""


@define(eq=False)
class _Events:
    """What one engine may tell the core, from any thread."""

    lifecycle: Lifecycle
    record: Record
    loop: asyncio.AbstractEventLoop
    worker: EngineWorker

    def died(self, reason: str) -> None:
        self.loop.call_soon_threadsafe(self.lifecycle.died, self.record, self.worker, reason)

    def request_growth(self, account: str, nbytes: int) -> bool:
        answer: list[bool] = []
        asked = threading.Event()

        def ask() -> None:
            answer.append(self.lifecycle.grow(self.record, account, nbytes))
            asked.set()

        self.loop.call_soon_threadsafe(ask)
        return asked.wait(timeout=5.0) and answer[0]


class Lifecycle:
    """Runs the transitions of all models, side by side; one at a time for each model."""

    def __init__(self, roster: Roster, admission: Admission, make_worker: Callable[[str], EngineWorker]) -> None:
        self._roster = roster
        self._admission = admission
        self._make_worker = make_worker
        self._tasks: set[asyncio.Task[None]] = set()
        self._growths = 0
        admission.drain = self.begin_drain
        admission.undrain = self.undrain
        admission.evict = self.unload

    # --- starting transitions ----------------------------------------------------------------------

    def want(self, record: Record) -> None:
        """Somebody has a ticket: start what brings the model to them, unless it is under way."""
        if record.state is _R.UNLOADED and record.task is None and not self._roster.closing:
            self._roster.set(record, _R.QUEUED, "a request is waiting")
            record.started_at = self._roster.now()
            self._start(record, self._load(record))
        elif record.state is _R.DRAINING and record.drain is not None and record.drain.plan is not None:
            self._admission.speak_up(record, record.drain.plan)

    def unload(self, record: Record, reason: str) -> None:
        """Destroy the engine of a drained, or dead, model."""
        self._end_drain(record)
        self._roster.set(record, _R.UNLOADING, reason)
        self._start(record, self._unload(record, reason))

    def cancel_load(self, record: Record, reason: str) -> None:
        """Call off a load: at once while it waits for memory, at its next look at ``cancelled`` while it runs."""
        if record.ctx is not None:
            record.ctx.cancelled.set()
        self._admission.withdraw(record, TransitionCancelled(reason))

    def _start(self, record: Record, transition: Coroutine[Any, Any, None]) -> None:
        record.task = asyncio.get_running_loop().create_task(transition, name=f"sie:{record.name}")
        self.keep(record.task)

    # --- draining ----------------------------------------------------------------------------------

    def begin_drain(self, record: Record, drain: Drain, *, within: float | None = None) -> None:
        """Give no new leases; go on when those that exist are back, or give up after ``within`` seconds."""
        roster = self._roster
        roster.set(record, _R.DRAINING, drain.reason)
        record.drain = drain
        if record.leases == 0:
            self._drained(record)
            return
        limit = roster.settings.drain_s if within is None else within
        if drain.plan is not None:
            limit = min(limit, self._patience(drain))
        drain.timer = asyncio.get_running_loop().call_later(limit, self._drain_overdue, record, drain)

    def _patience(self, drain: Drain) -> float:
        """Half of what the longest waiter for the room has left."""
        needers = [record for record in self._roster.records.values() if self._admission.holds(record, drain.plan)]
        now = self._roster.now()
        left = [next(iter(record.tickets)).deadline - now for record in needers if record.tickets]
        return max(0.0, min(left) / 2) if left else self._roster.settings.drain_s

    def _drained(self, record: Record) -> None:
        drain = record.drain
        if drain is None:
            return
        if drain.timer is not None:
            drain.timer.cancel()
        if drain.plan is not None:
            self._admission.drained(record, drain.plan)
        else:
            self.unload(record, drain.reason)

    def _drain_overdue(self, record: Record, drain: Drain) -> None:
        if record.drain is not drain or record.leases == 0:
            return
        reason = f"{record.name} did not drain in time"
        if drain.plan is not None:
            record.exempt_until = self._roster.now() + self._roster.settings.drain_exempt_s
            self._admission.refused(record, drain.plan, reason)
        elif drain.force and record.seat is not None:
            record.seat.lose(ResourceExhausted(f"model {record.name!r} was unloaded: {drain.reason}"))
            self.unload(record, drain.reason)
        else:
            self.undrain(record, reason)
            self._answer_unload(record, DeadlineExceeded(f"{reason}: unload it with force, or try again later"))

    def undrain(self, record: Record, reason: str) -> None:
        """Call a drain off: the model serves on."""
        if record.state is _R.DRAINING:
            self._end_drain(record)
            self._roster.set(record, _R.RESIDENT, reason)
            self.settle(record)

    def _end_drain(self, record: Record) -> None:
        drain, record.drain = record.drain, None
        if drain is not None and drain.timer is not None:
            drain.timer.cancel()

    def released(self, record: Record, seat: Seat) -> None:
        """A lease is back."""
        if record.seat is not seat:
            return
        self._roster.touch(record)
        if seat.leases == 0:
            if record.state is _R.DRAINING:
                self._drained(record)
            else:
                self.arm_idle(record)
                if self._admission.busy:
                    self._admission.request_pump()

    # --- load --------------------------------------------------------------------------------------

    async def _load(self, record: Record) -> None:
        epoch = record.epoch
        record.worker = worker = self._make_worker(record.name)
        engine: Engine | None = None
        try:
            engine = await self._admit_and_launch(record, worker, epoch)
        except HookTimeout as error:
            self._give_up(record, error)
            self._quarantine(record, worker)
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
                self._roster.set(record, _R.FAILED, type(error).__name__)
            else:
                self._back_to_unloaded(record, "configuration changed")
        record.task = None
        record.progress = None
        if engine is None:
            worker.close()
            record.worker = None
        elif record.epoch != epoch or record.retire is not None or record.removed or self._roster.closing:
            # The engine was made for a configuration that is gone, or nobody wants it any more.
            self.unload(record, record.retire or "configuration changed")
            return
        else:
            record.failure, record.attempts = None, 0
            record.resident_at = record.last_used = self._roster.now()
            self._roster.set(record, _R.RESIDENT, "loaded")
        self.settle(record)

    async def _admit_and_launch(self, record: Record, worker: EngineWorker, epoch: int) -> Engine:
        reserve = await self.reserve(record, worker)
        at_least, cause = 0, None
        for attempt in range(self._roster.settings.load_retries + 1):
            if record.epoch != epoch or record.retire is not None or self._roster.closing:
                raise TransitionCancelled("no longer wanted")
            if not record.tickets and attempt == 0:
                raise TransitionCancelled("everybody who waited has left")
            placed = await self._admission.admit(record, reserve, at_least=at_least, cause=cause)
            try:
                return await self._launch(record, worker, placed)
            except OutOfMemory as error:
                self._roster.decide(record.name, "load", f"out of memory: {error.message}")
                if attempt == self._roster.settings.load_retries:
                    raise
                at_least, cause = 1, error
                self._drop_claims(record)
                self._roster.set(record, _R.QUEUED, "out of memory while loading")
        raise AssertionError("the loop returns or raises")

    async def reserve(self, record: Record, worker: EngineWorker) -> AdmissionReserve:
        """What the engine will need: asked once an epoch, and again when the devices' room matters to it."""
        roster = self._roster
        adapter = roster.adapter(record)
        if record.capabilities is None:
            record.capabilities = await worker.call(
                adapter.describe, record.spec, hook="describe", timeout=roster.settings.reserve_timeout_s
            )
        if record.reserve is None or record.reserve.self_sizing:
            devices = views(roster, record)

            def ask() -> Any:
                return roster.plugins.ask(
                    "admission_reserve", owner=roster.owner_plugin(record), model=record.spec, devices=devices
                )

            answer = await worker.call(ask, hook="admission_reserve", timeout=roster.settings.reserve_timeout_s)
            if not isinstance(answer, AdmissionReserve) or not answer.ranks:
                raise EngineStartError(
                    f"no plugin says what a model of adapter {record.spec.adapter!r} needs: its plugin must implement "
                    "the hook admission_reserve"
                )
            record.reserve = answer
        return record.reserve

    async def _launch(self, record: Record, worker: EngineWorker, placed: Placed) -> Engine:
        roster, settings = self._roster, self._roster.settings
        adapter = roster.adapter(record)
        roster.set(record, _R.LOADING, f"room on {', '.join(placed.devices)}")
        record.ctx = ctx = self._context(record, settings.load_timeout_s)
        ctx.grant = placed.grant
        events = _Events(self, record, asyncio.get_running_loop(), worker)
        started = roster.now()
        with self._moving(placed.devices):
            before = roster.used(placed.devices)
            engine = await worker.call(
                adapter.load, record.spec, ctx, events, hook="load", timeout=settings.load_timeout_s
            )
            if not isinstance(engine, Engine):
                raise EngineStartError(f"adapter {record.spec.adapter!r} returned {type(engine).__name__}, no engine")
            pool = record.reserve.headroom_pool if record.reserve is not None else None
            permits = roster.permit_pool(placed.devices[0], pool)
            record.seat = Seat(engine, worker, record.spec, record.epoch, permits)
            report = await self._measure(record, engine, worker)
            after = roster.used(placed.devices)
        for account in placed.devices:
            realised = report.devices.get(account)
            if realised is None and account in before and account in after:
                realised = max(0, after[account] - before[account])
            roster.ledger.realise(record.name, account, realised)
        if report.host and placed.grant.host_bytes:
            roster.ledger.realise(record.name, HOST, report.host)
        roster.ledger.release(record.name, purpose="load_staging")
        roster.ledger.settle(record.name)
        roster.sample(placed.devices)
        seconds = roster.now() - started
        record.load_s = seconds if record.load_s is None else 0.5 * (record.load_s + seconds)
        record.capabilities = engine.capabilities
        if roster.observer is not None:
            roster.observer.model_loaded(record.name, seconds, outcome="ok")
        return engine

    async def _measure(self, record: Record, engine: Engine, worker: EngineWorker) -> MemoryReport:
        """Ask a new engine what it holds; one that can't say is closed again."""
        timeout = self._roster.settings.close_timeout_s
        try:
            report: MemoryReport = await worker.call(engine.memory, hook="memory", timeout=timeout)
        except HookTimeout:
            raise  # quarantined with its seat
        except BaseException:
            record.seat = None
            worker.submit(engine.close, self._context(record, timeout)).add_done_callback(consume)
            raise
        return report

    def _context(self, record: Record, timeout: float) -> TransitionContext:
        loop = asyncio.get_running_loop()

        def note(fraction: float, text: str) -> None:
            loop.call_soon_threadsafe(setattr, record, "progress", (fraction, text))

        return TransitionContext(
            deadline=time.monotonic() + timeout,
            progress=note,
            device_buffer=lambda account, nbytes: self._roster.devices[account].allocate(nbytes),
        )

    def _moving(self, accounts: Iterable[str]) -> _Moving:
        return _Moving(self._roster, tuple(accounts))

    # --- how a load ends badly ---------------------------------------------------------------------

    def _give_up(self, record: Record, error: BaseException) -> None:
        record.attempts += 1
        record.failure = failure = classify(error, attempts=record.attempts, now=self._roster.now())
        log.warning("%s: could not be loaded (%s): %s", record.name, failure.error_class, failure.message)
        self._roster.decide(record.name, "load failed", f"{failure.error_class}: {failure.message}")
        if self._roster.observer is not None:
            self._roster.observer.model_loaded(record.name, 0.0, outcome=failure.error_class)
        record.fail_tickets(failure.as_error(record.name))

    def _back_to_unloaded(self, record: Record, reason: str) -> None:
        self._drop_claims(record)
        self._roster.set(record, _R.UNLOADED, reason)

    def _drop_claims(self, record: Record) -> None:
        self._roster.give_back(record, {})
        self._admission.gone(record)

    def _quarantine(self, record: Record, worker: EngineWorker) -> None:
        """The call can't be killed: its claims stay booked until it returns."""
        if record.ctx is not None:
            record.ctx.cancelled.set()
        self._roster.set(record, _R.QUARANTINED, "a hook overran its deadline")
        self._start(record, self._await_stuck(record, worker))

    async def _await_stuck(self, record: Record, worker: EngineWorker) -> None:
        stuck = worker.stuck
        outcome: Any = None
        if stuck is not None:
            await asyncio.wait({stuck})
            outcome = None if stuck.cancelled() or stuck.exception() is not None else stuck.result()
        engine = outcome if isinstance(outcome, Engine) else record.seat.engine if record.seat is not None else None
        if engine is not None:
            ctx = self._context(record, self._roster.settings.close_timeout_s)
            closing = worker.submit(engine.close, ctx)
            await asyncio.wait({closing})
            consume(closing)
        self._finish_unload(record, worker, {}, "the overdue call returned")

    # --- unload ------------------------------------------------------------------------------------

    async def _unload(self, record: Record, reason: str) -> None:
        roster, seat = self._roster, record.seat
        assert seat is not None
        worker = seat.worker
        before = roster.used(record.devices)
        with self._moving(record.devices):
            try:
                ctx = self._context(record, roster.settings.close_timeout_s)
                await worker.call(seat.engine.close, ctx, hook="close", timeout=roster.settings.close_timeout_s)
            except HookTimeout as error:
                log.error("%s: %s", record.name, error.message)
                self._quarantine(record, worker)
                return
            except Exception:  # a failing close frees what it frees: the devices are measured afterwards
                log.exception("%s: closing the engine failed", record.name)
        self._finish_unload(record, worker, before, reason)

    def _finish_unload(self, record: Record, worker: EngineWorker, before: dict[str, int] | Any, reason: str) -> None:
        roster = self._roster
        promised = sum(nbytes for account, nbytes in roster.ledger.holding(record.name).items() if account != HOST)
        freed = roster.give_back(record, before)
        roster.decide(record.name, "unload", reason, promised=promised, freed=freed)
        if roster.observer is not None:
            roster.observer.evicted(record.name, reason)
        worker.close()
        record.seat = record.worker = record.ctx = record.task = None
        after = _R.FAILED if record.failure is not None else _R.UNLOADED
        roster.set(record, after, reason)
        self._admission.gone(record)
        self.settle(record)

    # --- what becomes of a model in a stable state -------------------------------------------------

    def settle(self, record: Record) -> None:
        """Act on what happened while a transition ran."""
        if record.state in (_R.UNLOADED, _R.FAILED):
            self._settle_down(record)
        elif record.state is _R.RESIDENT:
            if record.retire is not None:
                reason, record.retire = record.retire, None
                self.begin_drain(record, Drain(reason, force=reason != "unload requested"))
            else:
                self._serve(record)
        self._admission.request_pump()

    def _settle_down(self, record: Record) -> None:
        record.retire = None
        self._answer_unload(record, None)
        if self._roster.closing:
            record.fail_tickets(ShuttingDown("the server is shutting down"))
        elif record.removed:
            record.fail_tickets(ModelNotFound(record.name))
            self._roster.records.pop(record.name, None)
        elif record.tickets:
            if record.state is _R.FAILED:
                refusal = record.failure.refusal(record.name, self._roster.now()) if record.failure else None
                if refusal is not None:
                    record.fail_tickets(refusal)
                    return
                self._roster.set(record, _R.UNLOADED, "the cool-down is over")
            self.want(record)

    def _serve(self, record: Record) -> None:
        """Give the waiting tickets their leases, in order of arrival."""
        seat = record.seat
        assert seat is not None
        tickets, record.tickets = record.tickets, {}
        for ticket in tickets:
            if ticket.future.done():
                continue
            if ticket.serves:
                ticket.future.set_result(self.lease(record, seat, first=True))
            else:
                ticket.future.set_result(None)
        self.arm_idle(record)

    def lease(self, record: Record, seat: Seat, *, first: bool = False) -> Lease:
        return Lease(seat, lambda seat: self.released(record, seat), first=first)

    def _answer_unload(self, record: Record, error: SieError | None) -> None:
        waiters, record.unload_waiters = record.unload_waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    # --- idle time-out, death, growth --------------------------------------------------------------

    def arm_idle(self, record: Record) -> None:
        """Look again when the model would have been idle long enough. One timer a model, never moved, only renewed."""
        limit = record.spec.idle_evict_s
        if limit is None or record.idle_timer is not None or record.state is not _R.RESIDENT:
            return
        due = max(0.0, record.last_used + limit - self._roster.now())
        record.idle_timer = asyncio.get_running_loop().call_later(due, self._idle_due, record)

    def _idle_due(self, record: Record) -> None:
        record.idle_timer = None
        limit = record.spec.idle_evict_s
        if limit is None or record.state is not _R.RESIDENT or record.leases or record.tickets or record.spec.pinned:
            return
        if record.last_used + limit - self._roster.now() > _TICK_S:
            self.arm_idle(record)
        else:
            self.begin_drain(record, Drain("idle time-out"))

    def died(self, record: Record, worker: EngineWorker, reason: str) -> None:
        """An engine says that it is gone."""
        seat = record.seat
        if seat is None or seat.worker is not worker or record.state not in (_R.RESIDENT, _R.DRAINING):
            return
        seat.lose(EngineDied(f"the engine of model {record.name!r} died: {reason}"))
        plan = record.drain.plan if record.drain is not None else None
        self.unload(record, f"the engine died: {reason}")
        if plan is not None:
            self._admission.drained(record, plan)

    def grow(self, record: Record, account: str, nbytes: int) -> bool:
        """Book more for a resident engine if it is there for the taking; nobody is evicted for it."""
        ledger = self._roster.ledger
        if record.seat is None or nbytes <= 0 or ledger.available(account) < nbytes:
            return False
        ledger.book(record.name, [Need(account, nbytes)], purpose=self.next_growth())
        ledger.settle(record.name)
        return True

    def next_growth(self) -> str:
        """The purpose of a claim for bytes that an engine came to need later; each is a claim of its own."""
        self._growths += 1
        return f"growth {self._growths}"

    def keep(self, task: asyncio.Task[None]) -> None:
        """Own a task, so that it is neither lost nor forgotten at shutdown."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    async def wait_tasks(self, timeout: float) -> None:
        """Wait for the transitions that run."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)


@define(eq=False)
class _Moving:
    """While a transition moves bytes on a device, a fall of its used memory is not taken for foreign memory leaving."""

    roster: Roster
    accounts: tuple[str, ...]

    def __enter__(self) -> None:
        for account in self.accounts:
            self.roster.ledger.begin_transition(account)

    def __exit__(self, *_: object) -> None:
        for account in self.accounts:
            self.roster.ledger.end_transition(account)
