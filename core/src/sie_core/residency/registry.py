"""The front door of residency: leases, loads and unloads, pins, configuration changes, status, shutdown."""

from __future__ import annotations

import asyncio
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from sie_core.adapter import AdmissionReserve, Device, DeviceNeed
from sie_core.errors import (
    DeadlineExceeded,
    EngineDied,
    ModelLoading,
    ModelNotFound,
    ResourceExhausted,
    ShuttingDown,
    SieError,
    Unsupported,
)
from sie_core.memory.ledger import AccountState, Ledger
from sie_core.residency.admission import Admission
from sie_core.residency.answers import AnswerBook
from sie_core.residency.changes import Changes
from sie_core.residency.fence import launch_beside
from sie_core.residency.lifecycle import Lifecycle
from sie_core.residency.loras import LoraHold
from sie_core.residency.pins import Pins
from sie_core.residency.reasons import PARK_REQUESTED, SHUTDOWN, UNLOAD_REQUESTED
from sie_core.residency.record import Drain, HostTierStatus, Lease, ModelStatus, Record, RegistrySettings, Ticket
from sie_core.residency.roster import HOST, Observer, Roster, consume, log
from sie_core.residency.tier import HostTier
from sie_core.residency.wake_check import wake_checked
from sie_core.residency.watch import Watch
from sie_core.residency.worker import EngineWorker, Worker
from sie_core.types import Decision, ModelSpec, Residency, ResidencyChanged

if TYPE_CHECKING:
    from sie_core.plugins import Plugins, SlowHook

__all__ = ["Registry"]

_R = Residency
_FOREVER = float("inf")
_UNDER_WAY = frozenset({_R.QUEUED, _R.LOADING, _R.WAKING})


class Registry:
    """One record per model. Every method runs on the event loop; transitions run as tasks of the registry's own."""

    def __init__(
        self,
        plugins: Plugins,
        ledger: Ledger,
        devices: Sequence[Device],
        settings: RegistrySettings | None = None,
        *,
        make_worker: Callable[[str], EngineWorker] = Worker,
        host_available: Callable[[], int] | None = None,
        host_pressure: Callable[[], float | None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._roster = Roster(plugins, ledger, devices, settings or RegistrySettings(), observer)
        self._admission = Admission(self._roster)
        self._tier = HostTier(self._roster, self._roster.settings.host_cache_bytes)
        self._lifecycle = Lifecycle(self._roster, self._admission, self._tier, make_worker)
        self._watch = Watch(self._roster, self._admission, self._lifecycle, host_available, host_pressure)
        self._changes = Changes(self._roster, self._lifecycle)
        self.answers = AnswerBook(ledger)
        self._pins = Pins(self._roster, self._lifecycle, self.load, make_worker)

    # --- leases ------------------------------------------------------------------------------------

    def try_acquire(self, name: str) -> Lease | None:
        """A lease at once, if the model is resident and nobody is ahead; else ``None``. Raises ModelNotFound."""
        record = self._find(name)
        if record.state is _R.RESIDENT and not record.tickets and record.seat is not None:
            return self._lifecycle.lease(record, record.seat)
        return None

    async def acquire(self, name: str, *, wait_s: float | None = None) -> Lease:
        """A lease, after a wake or a load if need be; the wait is bounded by ``wait_s`` and the configured inline wait.

        Raises:
            ModelNotFound, ModelLoadFailed, ShuttingDown
            ModelLoading, ResourceExhausted: not yet, with the time after which to try again.
        """
        lease = self.try_acquire(name)
        if lease is not None:
            return lease
        got = await self._wait(self._find(name), _FOREVER if wait_s is None else wait_s, serves=True)
        assert isinstance(got, Lease)
        return got

    async def load(self, name: str, *, wait_s: float | None = None) -> None:
        """Make a model resident. ``wait_s=None`` waits until it is; a permanent failure is tried again."""
        record = self._find(name)
        if record.state is _R.RESIDENT:
            return
        if record.state is _R.FAILED and record.failure is not None:
            record.failure = None  # somebody asks for it by hand: they may have mended the cause
            self._roster.set(record, _R.UNLOADED, "load requested")
        await self._wait(record, _FOREVER if wait_s is None else wait_s, serves=False)

    async def _wait(self, record: Record, wait_s: float, *, serves: bool) -> Lease | None:
        self._refuse(record)
        loop = asyncio.get_running_loop()
        ticket = Ticket(loop.create_future(), at=loop.time(), asked_s=wait_s, serves=serves)
        record.tickets[ticket] = None
        self._set_timer(record, ticket)
        self._lifecycle.want(record)
        try:
            lease: Lease | None = await ticket.future
        except BaseException:
            future = ticket.future
            if future.done() and not future.cancelled() and future.exception() is None and future.result() is not None:
                future.result().release()  # the lease came in the same turn in which the request was cancelled
            raise
        finally:
            if ticket.timer is not None:
                ticket.timer.cancel()
            self._leave(record, ticket)
        return lease

    def _set_timer(self, record: Record, ticket: Ticket) -> None:
        ticket.deadline = self._deadline(record, ticket)
        if ticket.deadline != _FOREVER:
            ticket.timer = asyncio.get_running_loop().call_at(ticket.deadline, self._expire, record, ticket)

    def _deadline(self, record: Record, ticket: Ticket) -> float:
        """The ticket waits no longer than what its model does now may take."""
        limit = _FOREVER
        if ticket.serves:
            settings = self._roster.settings
            limit = settings.wake_wait_s if self._will_wake(record) else settings.load_wait_s
        return ticket.at + min(ticket.asked_s, limit)

    def _will_wake(self, record: Record) -> bool:
        """Whether a wake is what brings the model to who waits for it, as far as can be told."""
        drain = record.drain
        if record.retire is not None or record.removed:
            return False
        if record.state is _R.DRAINING and drain is not None:
            return (drain.park or drain.plan is not None) and self._lifecycle.parking.why_not(record) is None
        return record.state in (_R.PARKING, _R.PARKED, _R.WAKING)

    def _refuse(self, record: Record) -> None:
        if self._roster.closing:
            raise ShuttingDown("the server is shutting down", retry_after_s=5.0)
        if record.state is _R.FAILED and record.failure is not None:
            refusal = record.failure.refusal(record.name, self._roster.now())
            if refusal is not None:
                raise refusal
            record.failure = None
            self._roster.set(record, _R.UNLOADED, "the cool-down is over")

    def _expire(self, record: Record, ticket: Ticket) -> None:
        """The time is up, unless the model that was to wake has to be loaded after all."""
        if self._deadline(record, ticket) > ticket.deadline:
            self._set_timer(record, ticket)
        else:
            ticket.fail(self._not_yet(record))

    def _not_yet(self, record: Record) -> SieError:
        retry = self._retry_after(record)
        record.expect(self._roster.now(), retry)
        if record.blocked is not None and record.state is _R.QUEUED:
            return ResourceExhausted(f"model {record.name!r} {record.blocked}", retry_after_s=retry)
        note = f" ({record.progress[1]}, {record.progress[0]:.0%})" if record.progress else ""
        return ModelLoading(f"model {record.name!r} is {record.state}{note}", retry_after_s=retry)

    def _retry_after(self, record: Record) -> float:
        """What is left of the measured load or wake time, in whole seconds that do not go past its end.

        Where none was measured: the time that it has taken so far, but no longer than a request waits. Who comes back
        too early waits for the rest; the model waits for those who come late.
        """
        spent = self._roster.now() - record.started_at if record.state in _UNDER_WAY else 0.0
        usual = record.wake_s if self._will_wake(record) else record.load_s
        left = min(spent, self._roster.settings.load_wait_s) if usual is None else usual - spent
        return max(1.0, float(math.floor(left)))

    def _leave(self, record: Record, ticket: Ticket) -> None:
        record.tickets.pop(ticket, None)
        if not record.tickets and record.state in (_R.QUEUED, _R.WAKING) and self._admission.waits(record):
            self._lifecycle.cancel(record, "everybody who waited has left")

    # --- operators ---------------------------------------------------------------------------------

    async def unload(self, name: str, *, force: bool = False, wait_s: float | None = None) -> None:
        """Unload a model, also a pinned one. ``force`` ends requests that run with an error instead of waiting.

        Raises:
            DeadlineExceeded: requests were still running when the drain deadline came.
        """
        record = self._find(name)
        roster = self._roster
        if record.state is _R.UNLOADED:
            return
        if record.state is _R.FAILED:
            record.failure = None
            roster.set(record, _R.UNLOADED, UNLOAD_REQUESTED.words)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record.unload_waiters.append(waiter)
        if record.state is _R.PARKED:
            self._lifecycle.drains.unload_parked(record, UNLOAD_REQUESTED)
        elif record.state in (_R.PARKING, _R.WAKING):
            record.retire = UNLOAD_REQUESTED
        elif record.state in (_R.QUEUED, _R.LOADING):
            record.retire = UNLOAD_REQUESTED
            record.fail_tickets(ResourceExhausted(f"model {name!r} was unloaded on request", retry_after_s=1.0))
            self._lifecycle.cancel(record, UNLOAD_REQUESTED.words)
        elif record.state is _R.RESIDENT:
            self._lifecycle.drains.begin(record, Drain(UNLOAD_REQUESTED, force=force))
        elif record.state is _R.DRAINING:
            record.retire = UNLOAD_REQUESTED  # in case that the plan it drains for is called off
        if force and record.seat is not None and record.state is _R.DRAINING:
            record.seat.lose(ResourceExhausted(f"model {name!r} was unloaded by force", retry_after_s=1.0))
        await self._answer(record, waiter, wait_s)

    async def _answer(self, record: Record, waiter: asyncio.Future[None], wait_s: float | None) -> None:
        waiter.add_done_callback(consume)  # whoever asked may have gone by then
        done, _ = await asyncio.wait({waiter}, timeout=wait_s)
        if not done:
            waits = self._waits_for(record)
            raise DeadlineExceeded(
                f"model {record.name!r} is still {record.state}" + (f": it {waits}" if waits else "")
            )
        waiter.result()

    async def park(self, name: str, *, wait_s: float | None = None) -> None:
        """Move a resident model to the host tier once its requests are done.

        Raises:
            Unsupported: it can't be parked, with the reason; or it has no engine.
            ModelLoading: it is on its way to being resident.
            ResourceExhausted: the host tier had no room, or the engine failed to park; it was unloaded.
            DeadlineExceeded: requests were still running when the drain deadline came.
        """
        record = self._find(name)
        if record.state is _R.PARKED:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if record.state is _R.RESIDENT:
            why_not = self._lifecycle.parking.why_not(record)
            if why_not is not None:
                raise Unsupported(f"model {name!r} can't be parked: {why_not}")
            record.park_waiters.append(waiter)
            self._lifecycle.drains.begin(record, Drain(PARK_REQUESTED, park=True))
        elif record.state is _R.PARKING or (record.drain is not None and record.drain.park):
            record.park_waiters.append(waiter)
        elif record.state in (_R.UNLOADED, _R.UNLOADING, _R.FAILED, _R.QUARANTINED):
            raise Unsupported(f"model {name!r} is {record.state}: there is no engine to park, load it first")
        else:
            raise ModelLoading(
                f"model {name!r} is {record.state}: only a resident model can be parked",
                retry_after_s=self._retry_after(record),
            )
        await self._answer(record, waiter, wait_s)

    async def wake(self, name: str, *, wait_s: float | None = None) -> None:
        """Bring a parked model back; any other is loaded. Raises as ``load`` does."""
        await self.load(name, wait_s=wait_s)

    def why_not_parked(self, name: str) -> str | None:
        """Why a park of the model would unload it instead; ``None``: it would be parked."""
        return self._lifecycle.parking.why_not(self._find(name))

    def pin(self, name: str, pinned: bool = True) -> None:
        """A pinned model is never a victim; it still unloads on request, configuration change and shutdown.

        This stands until the configuration says something else about the model's pin, or the server ends.
        """
        record = self._find(name)
        record.pin(pinned)
        if pinned and record.drain is not None and record.drain.plan is not None:
            self._admission.refused(record, record.drain.plan, "it was pinned")
        elif not pinned:
            self._lifecycle.idle.arm(record)
        self._admission.request_pump()

    async def make_room(self, lease: Lease, nbytes: int) -> bool:
        """Evict others so that a resident engine that ran out of memory can have ``nbytes`` more on its devices.

        What it gets stays booked for it: its headroom was evidently promised too small. ``False``: nobody could go.
        """
        record = self._roster.records.get(lease.model.name)
        if record is None or record.seat is None or record.seat.engine is not lease.engine or not record.devices:
            return False
        ranks = tuple(DeviceNeed(max(1, nbytes), device=device) for device in record.devices)
        purpose, seat = self._lifecycle.next_growth(), record.seat
        try:
            await self._admission.admit(record, AdmissionReserve(ranks), purpose=purpose, at_least=1)
        except SieError:
            return False
        if record.seat is not seat or record.state not in (_R.RESIDENT, _R.DRAINING):
            self._roster.ledger.release(record.name, purpose=purpose)
            return False
        self._roster.ledger.settle(record.name)
        return True

    # --- configuration -----------------------------------------------------------------------------

    def apply(self, specs: Iterable[ModelSpec]) -> None:
        """Take over a configuration: models that did not change are not touched.

        A change that matters to the engine raises the model's epoch: a load in flight is called off and its waiters go
        on with the new configuration; a resident engine drains and unloads.
        """
        self._changes.apply(specs)
        self._pins.load()
        self._admission.request_pump()

    # --- LoRA adapters -----------------------------------------------------------------------------

    async def hold_lora(self, lease: Lease, name: str, *, wait_s: float | None = None) -> LoraHold:
        """See to it that a leased engine has a LoRA adapter and keeps it until the hold is released.

        The wait is bounded by ``wait_s`` and the configured inline wait.

        Raises:
            Unsupported: the model has no adapter of that name, or takes none at all.
            LoraLoading: it is not there yet, with the time after which to try again.
            ModelLoadFailed, ResourceExhausted, EngineDied.
        """
        record, limit = self._find(lease.model.name), self._roster.settings.load_wait_s
        if record.seat is None or record.seat.engine is not lease.engine:
            raise EngineDied(f"the engine of model {record.name!r} is gone")
        limit = limit if wait_s is None else min(limit, wait_s)
        return await self._lifecycle.loras.hold(record, record.seat, name, limit)

    async def load_lora(self, model: str, name: str, source: str | None, *, wait_s: float | None = None) -> None:
        """Let requests name a LoRA adapter, and load it now, with its model if need be. Raises as ``hold_lora``.

        ``source=None``: one that is configured or was loaded before.
        """
        until = None if wait_s is None else self._roster.now() + wait_s
        self._lifecycle.loras.add(self._find(model), name, source)
        with await self.acquire(model, wait_s=wait_s) as lease:
            left = None if until is None else max(0.0, until - self._roster.now())
            try:
                (await self.hold_lora(lease, name, wait_s=left)).release()
            except Unsupported:
                self._lifecycle.loras.refuse(self._find(model), name)
                raise

    async def unload_lora(self, model: str, name: str, *, wait_s: float | None = None) -> None:
        """Unload a LoRA adapter once no request uses it; one that is configured may be named again.

        Raises:
            Unsupported: there is none of that name.
            DeadlineExceeded: requests still used it after ``wait_s`` seconds.
        """
        await self._lifecycle.loras.remove(self._find(model), name, wait_s)

    # --- status ------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        record = self._roster.records.get(name)
        return record is not None and not record.removed

    def names(self) -> list[str]:
        """The configured models."""
        return [name for name, record in self._roster.records.items() if not record.removed]

    def status(self, name: str) -> ModelStatus:
        """How one model stands. Raises ModelNotFound."""
        return self._status(self._find(name))

    def _status(self, record: Record) -> ModelStatus:
        name = record.name
        held = self._roster.ledger.holding(name)
        failure = record.failure or record.last_crash
        return ModelStatus(
            name=name,
            adapter=record.spec.adapter,
            residency=record.state,
            devices=record.devices,
            device_bytes=sum(nbytes for account, nbytes in held.items() if account != HOST),
            host_bytes=held.get(HOST, 0),
            pinned=record.spec.pinned,
            leases=record.leases,
            queued=len(record.tickets),
            epoch=record.epoch,
            failure=failure,
            capabilities=record.capabilities,
            declared=self._roster.declared(record),
            load_s=record.load_s,
            park_s=record.park_s,
            wake_s=record.wake_s,
            progress=record.progress,
            spec=record.spec,
            loras=record.lora_statuses() if record.loras else (),
            host_copy_bytes=self._tier.held(name),
            overrun_bytes=self._roster.ledger.overrun(name),
            figures=record.figures,
            leaving=record.removed,
            waits_for=self._waits_for(record),
            wake_checked=wake_checked(record),
            wake_check_s=record.seat.check_s if record.seat is not None else None,
        )

    def _waits_for(self, record: Record) -> str | None:
        """What stands between a model and what it is about to do, in words that go on from its name."""
        if record.state in (_R.QUEUED, _R.WAKING) and record.blocked is not None:
            return record.blocked
        if record.held is None and not self._lifecycle.drains.waits(record):
            return None
        launch = launch_beside(self._roster, record)
        if launch is None:
            return None
        where = ", ".join(launch.devices)
        return f"waits until {launch.name} has been launched, which measures what is free on {where}"

    async def describe(self, name: str) -> ModelStatus:
        """The same, with its capabilities, if they can be told without loading it. Raises ModelNotFound."""
        record = self._find(name)
        if record.capabilities is None and record.state in (_R.UNLOADED, _R.FAILED):
            await self._lifecycle.loading.describe(record)
        return self.status(name)

    def statuses(self) -> list[ModelStatus]:
        """How every model stands, in the order of the configuration; those that left it too, until they are gone."""
        return [self._status(record) for record in self._roster.records.values()]

    def accounts(self) -> list[AccountState]:
        """The ledger's accounts."""
        return list(self._roster.ledger.accounts())

    def left_behind(self) -> dict[str, dict[str, int]]:
        """By device and model, the bytes that closed engines did not give back."""
        return {name: self._roster.leftovers.on(name) for name in self._roster.devices}

    def host_tier(self) -> HostTierStatus:
        """How full the host tier is."""
        return HostTierStatus(budget=self._tier.budget, used=self._tier.used, idle=self._tier.arena.idle)

    def slow_hooks(self) -> list[SlowHook]:
        """The plugins' hooks that did not return in time."""
        return self._roster.plugins.pure.slow

    def decisions(self) -> list[Decision]:
        """The newest decisions, oldest first."""
        return list(self._roster.decisions)

    def subscribe(self, callback: Callable[[ResidencyChanged], None]) -> Callable[[], None]:
        """Be told of every change; returns the way out. The callback runs inline and must return at once."""
        self._roster.subscribers.append(callback)
        return lambda: self._roster.subscribers.remove(callback)

    def health(self) -> list[str]:
        """What keeps the server from working as it should: loaders that are stuck."""
        now, settings = self._roster.now(), self._roster.settings
        problems = []
        for record in self._roster.records.values():
            if record.state is _R.QUARANTINED:
                problems.append(f"model {record.name!r} is quarantined: a call into its engine does not return")
            elif record.state is _R.LOADING and now - record.started_at > settings.load_timeout_s / 2:
                problems.append(f"model {record.name!r} has been loading for {now - record.started_at:.0f} s")
        return problems

    # --- start and end -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin sampling memory and load the pinned models in the background.

        Raises:
            ConfigError: the pinned models do not fit together.
        """
        self._watch.start()
        await self._pins.start()

    async def shutdown(self, deadline_s: float = 30.0, *, drain_s: float | None = None) -> None:
        """Fail who waits, cancel what loads, drain and unload everything; all within ``deadline_s`` seconds.

        ``drain_s`` of them are for the requests that run; ``None``: half.
        """
        roster, loop = self._roster, asyncio.get_running_loop()
        until = loop.time() + deadline_s
        within = deadline_s / 2 if drain_s is None else drain_s
        roster.closing = True
        self._watch.stop()
        for record in list(roster.records.values()):
            record.fail_tickets(ShuttingDown("the server is shutting down", retry_after_s=5.0))
            record.retire = SHUTDOWN
            if record.state in (_R.QUEUED, _R.LOADING, _R.WAKING):
                self._lifecycle.cancel(record, SHUTDOWN.words)
            elif record.state is _R.PARKED:
                self._lifecycle.unload(record, SHUTDOWN)
            elif record.state in (_R.RESIDENT, _R.DRAINING):
                self._lifecycle.drains.end(record)  # whatever it was for
                self._lifecycle.drains.begin(record, Drain(SHUTDOWN, force=True), within=within)
        while self._lifecycle.running or any(
            r.state in (_R.RESIDENT, _R.DRAINING, _R.PARKED) for r in roster.records.values()
        ):
            left = until - loop.time()
            if left <= 0:
                held = [name for name, record in roster.records.items() if record.seat or record.task]
                log.error("shutdown: out of time for %s", ", ".join(held))
                break
            await self._lifecycle.wait_tasks(min(left, 0.05))
            await asyncio.sleep(0.005)
        self._tier.close()
        roster.plugins.shutdown()

    def _find(self, name: str) -> Record:
        record = self._roster.records.get(name)
        if record is None or record.removed:
            names = [known for known, other in self._roster.records.items() if not other.removed]
            raise ModelNotFound(name, suggestions=difflib.get_close_matches(name, names, n=3))
        return record
