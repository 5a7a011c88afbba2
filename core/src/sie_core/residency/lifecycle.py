"""The lifecycle of every model: which transition runs, and what becomes of a model when one ends.

Transitions are tasks that the registry owns. Requests never run one, so cancelling a request can't tear it in half. A
transition that ends looks at what became of its model meanwhile (another configuration, an unload, a shutdown) and acts
on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import attrs

from sie_core._hookanswers import problem_of_engine
from sie_core.adapter import Engine, MemoryReport, TransitionContext
from sie_core.errors import (
    EngineDied,
    HookFailed,
    HookTimeout,
    ModelNotFound,
    ResourceExhausted,
    ShuttingDown,
    SieError,
    TransitionCancelled,
    TransitionError,
)
from sie_core.residency.admission import Admission
from sie_core.residency.drains import Drains
from sie_core.residency.failures import LIVED_S, crashed
from sie_core.residency.idle import IdleTimers
from sie_core.residency.loading import Loading
from sie_core.residency.loras import Loras
from sie_core.residency.parking import Parking
from sie_core.residency.reasons import CONFIG_CHANGED, Why, died
from sie_core.residency.record import Drain, Lease, Record, Seat
from sie_core.residency.roster import HOST, Roster, consume, log
from sie_core.residency.tier import HostTier
from sie_core.residency.worker import EngineWorker
from sie_core.types import Cause, Residency
from sie_core.units import format_bytes

__all__ = ["Lifecycle"]

_R = Residency
_INTERRUPTED = Why(Cause.INTERRUPTED, "its transition was interrupted")


class Lifecycle:
    """Runs the transitions of all models, side by side; one at a time for each model."""

    def __init__(
        self, roster: Roster, admission: Admission, tier: HostTier, make_worker: Callable[[str], EngineWorker]
    ) -> None:
        self.roster = roster
        self.admission = admission
        self.make_worker = make_worker
        self.drains = Drains(self)
        self.idle = IdleTimers(self)
        self.loading = Loading(self)
        self.parking = Parking(self, tier)
        self.loras = Loras(self)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._growths = 0
        self.left_pinned: Callable[[Record], None]
        """Told of a pinned model that was unloaded though no operator asked for it."""
        admission.drain = self.drains.begin
        admission.undrain = self.drains.call_off
        admission.evict = self.evict
        admission.recheck = self.drains.recheck
        admission.victims.parkable = lambda record: self.parking.why_not(record) is None

    # --- starting transitions ----------------------------------------------------------------------

    def want(self, record: Record) -> None:
        """Somebody has a ticket: start what brings the model to them, unless it is under way."""
        drain = record.drain
        if drain is not None and drain.plan is not None:
            self.admission.speak_up(record, drain.plan)
        elif record.task is not None or self.roster.closing:
            return
        elif record.state is _R.UNLOADED:
            self.roster.set(record, _R.QUEUED, "it is needed")
            record.crash = None
            record.started_at = self.roster.now()
            self._start(record, self.loading.load(record))
        elif record.state is _R.PARKED:
            self.roster.set(record, _R.WAKING, "it is needed")
            record.started_at = self.roster.now()
            self._start(record, self.parking.wake(record))

    def evict(self, record: Record, why: Why) -> None:
        """Take a drained model off its device: park it if that is possible, else unload it."""
        why_not = self.parking.why_not(record) if record.state is _R.DRAINING else "it is parked"
        if why_not is None:
            self.drains.end(record)
            self.roster.set(record, _R.PARKING, why.words, why.cause)
            self._start(record, self.parking.park(record, why))
        else:
            if self.parking.tier.on and record.state is _R.DRAINING:
                self.roster.decide(record.name, "not parked", why_not)
            self.unload(record, why)

    def unload(self, record: Record, why: Why) -> None:
        """Destroy the engine of a drained, parked or dead model."""
        self.drains.end(record)
        record.held = None
        self.admission.withdraw(record, TransitionCancelled(why.words))  # what it wanted beyond its load
        self.roster.set(record, _R.UNLOADING, why.words, why.cause)
        self._start(record, self._unload(record, why))

    def cancel(self, record: Record, reason: str) -> None:
        """Call off a load or wake: at once while it waits for memory, else at its next look at ``cancelled``."""
        if record.ctx is not None:
            record.ctx.cancelled.set()
        self.admission.withdraw(record, TransitionCancelled(reason))

    def unwanted(self, record: Record, epoch: int) -> bool:
        """Whether what a transition was started for is gone."""
        return record.epoch != epoch or record.retire is not None or record.removed or self.roster.closing

    def _start(self, record: Record, transition: Coroutine[Any, Any, None]) -> None:
        record.task = asyncio.get_running_loop().create_task(transition, name=f"sie:{record.name}")
        self.keep(record.task)
        record.task.add_done_callback(lambda task: self._ended(record, task))

    def _ended(self, record: Record, task: asyncio.Task[None]) -> None:
        """A transition ends with another one or without a task. One that was torn from outside does neither."""
        if record.task is not task or not (task.cancelled() or task.exception() is not None):
            return
        if not task.cancelled():
            log.error("%s: its transition failed", record.name, exc_info=task.exception())
        elif all(other.cancelling() for other in asyncio.all_tasks()):
            return  # the loop itself is being closed: nothing that is started now would run
        record.task = None
        if record.ctx is not None:
            record.ctx.cancelled.set()
        worker = record.worker if record.seat is None else record.seat.worker
        if worker is not None and worker.stuck is not None:
            load = Why(Cause.LOAD_FAILED, _INTERRUPTED.words)
            self.quarantine(record, worker, load if record.seat is None else _INTERRUPTED)
        elif record.seat is not None:
            self.unload(record, _INTERRUPTED)
        else:
            self.loading.give_up_quietly(record, "its load was interrupted")

    def count_lookup(self, record: Record, *, hit: bool) -> None:
        """What a model that was wanted came to be there by, once that is known: a wake that fails is no hit."""
        if self.parking.tier.on and self.roster.observer is not None:
            self.roster.observer.host_cache_lookup(record.name, hit=hit)

    # --- what transitions share --------------------------------------------------------------------

    def worker_for(self, record: Record) -> EngineWorker:
        """A worker for the model's next engine."""
        worker = self.make_worker(record.name)
        worker.plugin = self.roster.owner_plugin(record) or ""
        return worker

    async def ask(self, record: Record, worker: EngineWorker, hook: str, timeout: float, **arguments: Any) -> Any:
        """Ask the plugins, the adapter's own first, on the engine's thread."""
        plugins, owner = self.roster.plugins, self.roster.owner_plugin(record)

        def call() -> Any:
            return plugins.ask(hook, owner=owner, **arguments)

        return await worker.call(call, hook=hook, timeout=timeout)

    async def move(
        self, record: Record, seat: Seat, hook: str, timeout: float, ctx: TransitionContext
    ) -> tuple[Any, Mapping[str, int | None]]:
        """Ask the plugins to move a resident engine; their answer, and what the engine says that it holds now.

        One call on the engine's thread, because each costs a wake its time twice over.
        """
        plugins, owner, engine = self.roster.plugins, self.roster.owner_plugin(record), seat.engine

        def call() -> tuple[Any, Mapping[str, int | None]]:
            answer = plugins.ask(hook, owner=owner, engine=engine, ctx=ctx)
            try:
                return answer, {} if answer is None else _checked(engine.memory(), seat.worker.plugin).devices
            except Exception as error:  # never to be taken for a failure of the move itself, which may be tried again
                raise TransitionError(f"moved, but can't say what it holds: {error!r}") from error

        moved: tuple[Any, Mapping[str, int | None]] = await seat.worker.call(call, hook=hook, timeout=timeout)
        return moved

    def context(self, record: Record, timeout: float) -> TransitionContext:
        """What a blocking call gets."""
        loop = asyncio.get_running_loop()

        def note(fraction: float, text: str) -> None:
            loop.call_soon_threadsafe(setattr, record, "progress", (fraction, text))

        ctx = TransitionContext(
            deadline=time.monotonic() + timeout,
            progress=note,
            device_buffer=lambda account, nbytes: self.roster.devices[account].allocate(nbytes),
        )
        copy = self.parking.tier.copies.get(record.name)
        if copy is not None:
            ctx.host_buffer = copy.buffer
        return ctx

    async def report(self, seat: Seat) -> dict[str, int]:
        """What an engine itself says that it holds, by account, where it can tell."""
        timeout = self.roster.settings.close_timeout_s
        report: MemoryReport = await seat.worker.call(seat.engine.memory, hook="memory", timeout=timeout)
        return {account: held for account, held in report.devices.items() if held is not None}

    async def close_engine(self, record: Record, seat: Seat) -> None:
        """Close it; what it raises is logged, the devices are measured afterwards. Raises HookTimeout."""
        timeout = self.roster.settings.close_timeout_s
        try:
            ctx = self.context(record, timeout)
            await seat.worker.call(seat.engine.close, ctx, hook="close", timeout=timeout)
        except HookTimeout:
            raise
        except Exception:
            log.exception("%s: closing the engine failed", record.name)

    def quarantine(self, record: Record, worker: EngineWorker, why: Why) -> None:
        """A call can't be killed: its claims stay booked until it returns. ``why``: what the model leaves for then."""
        self.admission.withdraw(record, TransitionCancelled("a call into its engine does not return"))
        if record.ctx is not None:
            record.ctx.cancelled.set()
        self.roster.set(record, _R.QUARANTINED, "a hook overran its deadline", why.cause)
        stuck = f"model {record.name!r} could not be parked: a call into its engine does not return"
        self.answer_park(record, ResourceExhausted(stuck))  # nobody knows when the call returns, if it does
        self._start(record, self._await_stuck(record, worker, why))
        self.admission.request_pump()

    async def _await_stuck(self, record: Record, worker: EngineWorker, why: Why) -> None:
        stuck = worker.stuck
        outcome: Any = None
        if stuck is not None:
            await asyncio.wait({stuck})
            outcome = None if stuck.cancelled() or stuck.exception() is not None else stuck.result()
        engine = outcome if isinstance(outcome, Engine) else record.seat.engine if record.seat is not None else None
        if engine is not None:
            closing = worker.submit(engine.close, self.context(record, self.roster.settings.close_timeout_s))
            await asyncio.wait({closing})
            consume(closing)
        self._finish_unload(record, worker, {}, Why(why.cause, "the overdue call returned"))

    # --- unload ------------------------------------------------------------------------------------

    async def _unload(self, record: Record, why: Why) -> None:
        seat = record.seat
        assert seat is not None
        leftovers = self.roster.leftovers
        was, before = leftovers.closing(record), self.roster.used(record.devices)
        try:
            with self.roster.moving_bytes(record.devices) as alone:
                await self.close_engine(record, seat)
                leftovers.closed(record, was, alone)
        except HookTimeout as error:
            log.error("%s: %s", record.name, error.message)
            self.quarantine(record, seat.worker, why)
            return
        self._finish_unload(record, seat.worker, before, why)

    def _finish_unload(self, record: Record, worker: EngineWorker, before: Mapping[str, int], why: Why) -> None:
        roster = self.roster
        promised = sum(nbytes for account, nbytes in roster.ledger.holding(record.name).items() if account != HOST)
        was_parked = bool(record.retained)
        dropped = self.parking.tier.forget(record.name)
        freed = roster.give_back(record, before)
        if dropped and was_parked:
            roster.departed(record.name, "drop", why, promised=promised + dropped, freed=freed + dropped)
        else:
            roster.departed(record.name, "unload", why, promised=promised, freed=freed)
        worker.close()
        record.seat = record.worker = record.ctx = record.task = None
        record.retained, record.figures = {}, {}
        self.loras.engine_gone(record)
        if record.crash is not None and record.deaths > 1:
            record.failure = crashed(*record.crash, deaths=record.deaths, now=roster.now())
        after = _R.FAILED if record.failure is not None else _R.UNLOADED
        roster.set(record, after, why.words, why.cause)
        asked = bool(record.unload_waiters or record.park_waiters) or record.removed or roster.closing
        self.admission.gone(record)
        self.settle(record)
        if record.spec.pinned and record.state is _R.UNLOADED and not asked:
            self.left_pinned(record)

    # --- what becomes of a model in a stable state -------------------------------------------------

    def settle(self, record: Record, epoch: int | None = None) -> None:
        """Act on what happened while a transition ran. ``epoch``: the one in which it began."""
        if record.state in (_R.UNLOADED, _R.FAILED):
            self._settle_down(record)
        elif record.state is _R.RESIDENT:
            self._settle_resident(record)
        elif record.state is _R.PARKED:
            self._settle_parked(record, record.epoch if epoch is None else epoch)
        self.admission.request_pump()

    def _settle_resident(self, record: Record) -> None:
        assert record.seat is not None
        if record.seat.dead is not None:
            self.unload(record, died(record.seat.dead))
        elif record.retire is not None:
            why, record.retire = record.retire, None
            self.drains.begin(record, Drain(why, force=why.cause is not Cause.REQUESTED))
        else:
            self._serve(record)

    def _settle_parked(self, record: Record, epoch: int) -> None:
        assert record.seat is not None
        self.answer_park(record, None)
        if record.seat.dead is not None:
            self.unload(record, died(record.seat.dead))
        elif self.unwanted(record, epoch):
            self.drains.unload_parked(record, record.retire or CONFIG_CHANGED)
        elif record.tickets:
            self.want(record)

    def _settle_down(self, record: Record) -> None:
        record.retire = None
        self.answer_unload(record, None)
        self.answer_park(record, ResourceExhausted(f"model {record.name!r} could not be parked and was unloaded"))
        if self.roster.closing:
            record.fail_tickets(ShuttingDown("the server is shutting down"))
        elif record.removed:
            record.fail_tickets(ModelNotFound(record.name))
            self.roster.records.pop(record.name, None)
        elif record.tickets:
            if record.state is _R.FAILED:
                refusal = record.failure.refusal(record.name, self.roster.now()) if record.failure else None
                if refusal is not None:
                    record.fail_tickets(refusal)
                    return
                self.roster.set(record, _R.UNLOADED, "the cool-down is over")
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
        self.idle.arm(record)

    def lease(self, record: Record, seat: Seat, *, first: bool = False) -> Lease:
        return Lease(seat, lambda seat: self.drains.released(record, seat), first=first)

    def answer_park(self, record: Record, error: SieError | None) -> None:
        """Tell the operators who asked for a park how it ended."""
        waiters, record.park_waiters = record.park_waiters, []
        _answer(waiters, error)

    def answer_unload(self, record: Record, error: SieError | None) -> None:
        """Tell the operators who asked for an unload how it ended."""
        waiters, record.unload_waiters = record.unload_waiters, []
        _answer(waiters, error)

    # --- death, growth, tasks ----------------------------------------------------------------------

    def died(self, record: Record, worker: EngineWorker, reason: str, details: str = "") -> None:
        """An engine says that it is gone. A transition that runs on it notices when it ends."""
        seat = record.seat
        if seat is None or seat.worker is not worker or seat.dead is not None:
            return
        seat.dead = reason
        log.warning("%s: its engine died: %s", record.name, f"{reason}\n{details}" if details else reason)
        now, in_a_row = self.roster.now(), 1
        if record.state not in (_R.PARKING, _R.PARKED):  # It had nothing to do: that tells nothing of the next one.
            soon = now - record.resident_at < LIVED_S
            in_a_row = record.deaths = record.deaths + 1 if soon or record.state is _R.LOADING else 1
            record.crash = reason, details
        record.last_crash = crashed(reason, details, deaths=in_a_row, now=now)
        gone = f"the engine of model {record.name!r} died"
        seat.lose(EngineDied(f"{gone}: {reason}").explained(details).guarded(gone))
        if record.state not in (_R.RESIDENT, _R.DRAINING, _R.PARKED):
            return
        plan = record.drain.plan if record.drain is not None else None
        self.unload(record, died(reason))
        if plan is not None:
            self.admission.drained(record, plan)

    def overran(self, record: Record, seat: Seat, error: HookTimeout) -> None:
        """A call into a resident engine does not return: its thread is lost, and the engine with it."""
        log.error("%s: %s", record.name, error.message)
        if seat.worker.stuck is not None:
            seat.worker.stuck.add_done_callback(consume)
        self.died(record, seat.worker, error.message)

    def grow(self, record: Record, worker: EngineWorker, account: str, nbytes: int) -> bool:
        """Book more for an engine that loads or is resident, if it is there; nobody is evicted for it."""
        loads = record.state is _R.LOADING and record.worker is worker
        serves = record.seat is not None and record.seat.worker is worker and not record.retained
        if nbytes <= 0 or account not in record.devices or not (loads or serves):
            return False
        more = f"its engine needs {format_bytes(nbytes)} more than was promised"
        if not self.roster.ledger.grow(record.name, account, nbytes):
            self.roster.decide(record.name, "growth refused", more, needed=nbytes)
            return False
        self.roster.decide(record.name, "growth", more, needed=nbytes)
        # A wake books it again.
        record.booked = tuple(
            attrs.evolve(need, static=need.static + nbytes) if need.account == account else need
            for need in record.booked
        )
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


def _checked(report: Any, plugin: str) -> MemoryReport:
    problem = problem_of_engine("memory", report)
    if problem is not None:
        raise HookFailed("memory", plugin=plugin, problem=problem)
    checked: MemoryReport = report
    return checked


def _answer(waiters: list[asyncio.Future[None]], error: SieError | None) -> None:
    for waiter in waiters:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
