"""What the registry keeps of a model: its record, the tickets that wait for it, the engine's seat and its leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any

import attrs
from attrs import define, field, frozen

from sie_core.adapter import AdmissionReserve, Declined, Engine, TransitionContext
from sie_core.errors import SieError
from sie_core.memory.ledger import Need
from sie_core.residency.failures import LoadFailure
from sie_core.residency.reasons import Why
from sie_core.residency.worker import EngineWorker
from sie_core.types import Capabilities, ModelSpec, Residency, WakeCheck

__all__ = [
    "Drain",
    "HostTierStatus",
    "Lease",
    "Lora",
    "LoraStatus",
    "ModelStatus",
    "Record",
    "RegistrySettings",
    "Seat",
    "Ticket",
    "run_permit",
]

_RETURN_S = 5.0
"""A client that was told when to return may be so much later: its clock, the network, a whole number of seconds."""


@frozen
class RegistrySettings:
    """Times are seconds, sizes bytes."""

    load_wait_s: float = 30.0
    wake_wait_s: float = 15.0
    load_timeout_s: float = 600.0
    close_timeout_s: float = 60.0
    reserve_timeout_s: float = 30.0
    drain_s: float = 30.0
    drain_exempt_s: float = 60.0
    turn_s: float = 2.0
    """A resident model's guard against eviction yields once the oldest waiter elsewhere has waited this long."""
    run_permits: int = 1
    offload_timeout_s: float = 120.0
    sample_s: float = 1.0
    load_retries: int = 3
    """How often a load that ran out of memory evicts one more model and tries again."""
    decisions: int = 512
    host_cache_bytes: int = 0
    """Budget of the host tier; 0: off, evicted models unload."""
    host_pressure_limit: float = 10.0
    """Percent of the time in which tasks stand still for want of host memory, above which parked copies are dropped."""
    host_pressure_pause_s: float = 5.0
    """After one was dropped: an average over 10 s takes that long to show that it helped."""


@frozen
class HostTierStatus:
    """The host tier, in bytes. ``used``: parked copies and backups; ``idle``: kept for the next copy."""

    budget: int
    used: int
    idle: int


@frozen
class LoraStatus:
    """One LoRA adapter of a model. ``device_bytes``: what it takes while it is loaded."""

    name: str
    source: str
    loaded: bool
    device_bytes: int
    in_use: int
    failure: LoadFailure | None


@frozen
class ModelStatus:
    """One model as status and model listings show it."""

    name: str
    adapter: str
    residency: Residency
    devices: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    pinned: bool
    leases: int
    queued: int
    epoch: int
    failure: LoadFailure | None
    """Why it is failed, else how its last engine died where no other came after it."""
    capabilities: Capabilities | None
    load_s: float | None
    park_s: float | None
    wake_s: float | None
    progress: tuple[float, str] | None
    spec: ModelSpec
    declared: Capabilities | None = None
    """What its adapter says of all its models."""
    loras: tuple[LoraStatus, ...] = ()
    host_copy_bytes: int = 0
    """The part of ``host_bytes`` that is its copy in the host tier."""
    overrun_bytes: int = 0
    """What it holds beyond what it was promised."""
    figures: Mapping[str, int | float] = field(factory=dict)
    """What its engine said of itself when it was loaded."""
    leaving: bool = False
    """It is not configured any more: it ends its requests, and goes."""
    waits_for: str | None = None
    """What it waits for before it can come, or go, in words that go on from its name."""
    wake_checked: WakeCheck | None = None
    """Which wakes of its engine are checked: what ``auto`` chose; ``NEVER`` for one that has no probe, whatever the
    setting. ``None``: it does not park, or that is not known yet."""
    wake_check_s: float | None = None
    """How long its engine's last wake check took, which is part of ``wake_s``."""


class Ticket:
    """A waiting request. ``future`` ends with a lease, or with the error that the request is to see."""

    __slots__ = ("asked_s", "at", "deadline", "future", "serves", "timer")

    def __init__(self, future: asyncio.Future[Any], *, at: float, asked_s: float, serves: bool) -> None:
        self.future = future
        self.at = at
        self.asked_s = asked_s
        """How long it would wait at most."""
        self.deadline = at + asked_s
        """When it is told to come back, as things stand: a wake that comes to nothing leaves it the time of a load."""
        self.timer: asyncio.TimerHandle | None = None
        self.serves = serves
        """False: somebody who only wants the model resident (``load``), and needs no lease."""

    def fail(self, error: SieError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@define(eq=False)
class Seat:
    """A resident engine and those who use it. A new engine gets a new seat, so an old lease can't touch it."""

    engine: Engine
    worker: EngineWorker
    model: ModelSpec
    epoch: int
    permits: tuple[asyncio.Semaphore, ...] = ()
    """One for each device of a pooled engine, in an order that all engines keep."""
    leases: int = 0
    first_turn: int = 0
    """Leases given to the tickets that were queued when the engine became resident, and not yet returned."""
    lost: asyncio.Future[Any] | None = None
    dead: str | None = None
    """Why the engine is gone, if it said so."""
    offload: int | Declined | None = None
    """Host bytes that a park will take, as the engine's plugin said after the load; or why it can't park."""
    baseline: bytes | None = None
    """The first answer to the fixed input, for the wake check."""
    probed: bool = False
    """It was asked for that; one without a baseline has no probe."""
    wakes: int = 0
    check_s: float | None = None
    """How long the last wake check took."""
    auto: WakeCheck | None = None
    """Which wakes ``wake_check: auto`` checks, once a check was measured: all of them, or the first."""
    lora_turn: asyncio.Lock = field(factory=asyncio.Lock)
    """LoRA adapters are loaded and unloaded one at a time."""

    def lose(self, error: SieError) -> None:
        """Tell everybody who holds a lease that the engine is gone."""
        future = self.when_lost()
        if not future.done():
            future.set_exception(error)
            future.exception()  # mark as seen: there may be no lease to hear it

    def when_lost(self) -> asyncio.Future[Any]:
        if self.lost is None:
            self.lost = asyncio.get_running_loop().create_future()
        return self.lost


class Lease:
    """The right to use a model's engine; until it is released the engine is neither parked nor unloaded."""

    __slots__ = ("_first", "_on_release", "_seat")

    def __init__(self, seat: Seat, on_release: Callable[[Seat], None], *, first: bool = False) -> None:
        self._seat: Seat = seat
        self._on_release: Callable[[Seat], None] | None = on_release
        self._first = first
        seat.leases += 1
        if first:
            seat.first_turn += 1

    @property
    def model(self) -> ModelSpec:
        return self._seat.model

    @property
    def engine(self) -> Engine:
        return self._seat.engine

    @property
    def worker(self) -> EngineWorker:
        return self._seat.worker

    @property
    def epoch(self) -> int:
        return self._seat.epoch

    @property
    def lost(self) -> asyncio.Future[Any]:
        """Fails when the engine dies or is unloaded by force while the lease is held."""
        return self._seat.when_lost()

    @property
    def permit(self) -> AbstractAsyncContextManager[None]:
        """The right to run on the device: engines of one headroom pool share K of them."""
        return run_permit(self._seat.permits)

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is None:
            return
        seat = self._seat
        seat.leases -= 1
        if self._first:
            seat.first_turn -= 1
        on_release(seat)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@asynccontextmanager
async def run_permit(permits: tuple[asyncio.Semaphore, ...]) -> AsyncIterator[None]:
    """The right to run on every device of a pooled engine."""
    if len(permits) == 1:  # nearly always: runs should not pay for the others
        async with permits[0]:
            yield
        return
    async with AsyncExitStack() as stack:
        for permit in permits:
            await stack.enter_async_context(permit)
        yield


@define(eq=False)
class Drain:
    """Why a resident model takes no new leases, and until when it may take to finish those it has."""

    why: Why
    plan: Any = None
    park: bool = False
    """An eviction: park if that is possible. Otherwise unload."""
    force: bool = False
    """At the deadline, end the requests that still run instead of giving up."""
    timer: asyncio.TimerHandle | None = None


@define(eq=False)
class Lora:
    """A LoRA adapter that requests may name. Sizes in bytes, by account of the device."""

    name: str
    source: str | None = None
    """``None``: it is on its way out, and no request may name it."""
    configured: bool = False
    """Named in the configuration; else loaded by hand."""
    seat: Seat | None = None
    """The engine that has it."""
    loaded_from: str | None = None
    """``None``: unloaded while its engine was parked, or its files have changed: it goes before it is loaded again."""
    version: object = None
    """What its files looked like when they were read."""
    recheck: bool = False
    """Loaded by hand again: whether its files are still those is to be seen before a request uses it."""
    purpose: str | None = None
    """Of the claim for its bytes, until a park makes them part of what the engine's wake books."""
    booked: dict[str, int] = field(factory=dict)
    nbytes: int = 0
    uses: int = 0
    """Requests that use it now."""
    gives_way: bool = False
    """Another one waits for its place: new requests for it queue up behind that one."""
    failure: LoadFailure | None = None
    attempts: int = 0
    load_s: float | None = None


@define(eq=False)
class Record:
    """Everything about one model. Only the registry's own rooms change it, on the event loop."""

    spec: ModelSpec
    epoch: int
    state: Residency = Residency.UNLOADED
    tickets: dict[Ticket, None] = field(factory=dict)
    seat: Seat | None = None
    worker: EngineWorker | None = None
    ctx: TransitionContext | None = None
    task: asyncio.Task[None] | None = None
    reserve: AdmissionReserve | None = None
    capabilities: Capabilities | None = None
    devices: tuple[str, ...] = ()
    failure: LoadFailure | None = None
    attempts: int = 0
    deaths: int = 0
    """Engines that died in a row, each soon after it had become resident."""
    crash: tuple[str, str] | None = None
    """How the engine died whose unload is under way: in a line, and in detail."""
    last_crash: LoadFailure | None = None
    """How the last engine died, until the next one is there: to be shown, it refuses nothing."""
    pinned_in_file: bool = False
    pinned_by_hand: bool | None = None
    """What an operator said last, if anything; it stands until the configuration says something else."""
    drain: Drain | None = None
    held: Drain | None = None
    """A drain that begins when the launch of an engine that sizes itself is over beside it."""
    retire: Why | None = None
    """Unload as soon as the state allows, for this reason."""
    unload_waiters: list[asyncio.Future[None]] = field(factory=list)
    park_waiters: list[asyncio.Future[None]] = field(factory=list)
    removed: bool = False
    blocked: str | None = None
    """Why the model waits for memory."""
    progress: tuple[float, str] | None = None
    load_s: float | None = None
    started_at: float = 0.0
    resident_at: float = 0.0
    admitted_at: float = 0.0
    """When the last wake got its room."""
    last_used: float = 0.0
    exempt_until: float = 0.0
    """It has refused to drain, and is not asked again before."""
    expected_until: float = 0.0
    """Requests were told to come back, and are waited for."""
    booked: tuple[Need, ...] = ()
    """What was booked on the devices at the load; a wake books it again."""
    retained: dict[str, int] = field(factory=dict)
    """What the parked engine still holds, by account."""
    resident_bytes: dict[str, int | None] = field(factory=dict)
    """What it held before it was parked, by account."""
    figures: Mapping[str, int | float] = field(factory=dict)
    """What its engine said of itself when it was loaded."""
    park_s: float | None = None
    wake_s: float | None = None
    idle_timer: asyncio.TimerHandle | None = None
    loras: dict[str, Lora] = field(factory=dict)
    """By name, the least recently used first."""
    lora_waiters: list[asyncio.Future[None]] = field(factory=list)
    """Told when an adapter is not in use any more."""

    @property
    def name(self) -> str:
        return self.spec.name

    def configure(self, spec: ModelSpec) -> None:
        """Take over what the configuration says. A pin set by hand outlives one that says about it what it said."""
        if spec.pinned != self.pinned_in_file:
            self.pinned_by_hand = None
        self.pinned_in_file = spec.pinned
        self._take(spec)

    def pin(self, pinned: bool) -> None:
        """By hand."""
        self.pinned_by_hand = pinned
        self._take(self.spec)

    def _take(self, spec: ModelSpec) -> None:
        self.spec = spec if self.pinned_by_hand is None else attrs.evolve(spec, pinned=self.pinned_by_hand)
        if self.seat is not None and self.seat.epoch == self.epoch:
            self.seat.model = self.spec

    @property
    def leases(self) -> int:
        return self.seat.leases if self.seat is not None else 0

    @property
    def cycle_s(self) -> float:
        """Measured park + wake time, for the guard against thrashing; 0 until both were measured."""
        return 0.0 if self.park_s is None or self.wake_s is None else self.park_s + self.wake_s

    @property
    def oldest_ticket(self) -> float | None:
        """Arrival time of the longest waiting ticket."""
        return next(iter(self.tickets)).at if self.tickets else None

    @property
    def stays_until(self) -> float:
        """Before that nothing takes it off its device by the server's own choice; on the event loop's clock."""
        return max(self.resident_at + self.spec.min_resident_s, self.expected_until)

    def expect(self, now: float, seconds: float) -> None:
        """A request is told to come back in so many seconds: it shall find the model."""
        self.expected_until = max(self.expected_until, now + seconds + _RETURN_S)

    def lora_statuses(self) -> tuple[LoraStatus, ...]:
        """Its LoRA adapters, the least recently used first."""
        return tuple(
            LoraStatus(lora.name, lora.source, self._has(lora), lora.nbytes, lora.uses, lora.failure)
            for lora in self.loras.values()
            if lora.source is not None
        )

    def _has(self, lora: Lora) -> bool:
        return self.seat is not None and lora.seat is self.seat and lora.loaded_from is not None

    def fail_tickets(self, error: SieError) -> None:
        tickets, self.tickets = self.tickets, {}
        for ticket in tickets:
            ticket.fail(error)
