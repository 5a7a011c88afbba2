"""The made-up machine of a simulated run: devices that refuse, a watched ledger, tasks that are kept track of."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field
from sie_core import DeviceOutOfMemory, HookFailed, HostOutOfMemory, ModelSpec, ResidencyChanged
from sie_core.memory.ledger import Ledger, Need
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings

from sie_testing._sim_guests import Expected
from sie_testing._sim_launches import launch_disturbed
from sie_testing._sim_pins import Pinned
from sie_testing._sim_tier import Lookups, TierRules
from sie_testing._sim_waits import Waits
from sie_testing.fake import FakeLifecycle
from sie_testing.faults import FaultPoints
from sie_testing.virtual import VirtualClockLoop, VirtualWorker

if TYPE_CHECKING:
    from sie_core.residency.record import Record, Seat
    from sie_core.residency.tier import HostTier

__all__ = ["KIB", "SimDevice", "SimDeviceFull", "SimFault", "SimHostFull", "World", "WorldSettings", "injected"]

KIB = 1024
_MUTATORS = (
    "begin_transition", "end_transition", "observe", "observe_available", "grow", "realise", "realise_pool",
    "settle", "retain", "release", "shrink",
)  # fmt: skip


class SimFault(RuntimeError):
    """A fault that the simulation injected: nothing to wonder at in a log."""


class SimDeviceFull(DeviceOutOfMemory):
    """Injected: the ledger said that there was room."""


class SimHostFull(HostOutOfMemory):
    """Injected."""


def injected(error: BaseException) -> bool:
    """Whether the simulation made this error itself, also where the core has named its hook."""
    if isinstance(error, HookFailed) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, SimFault | SimDeviceFull | SimHostFull)


@cache
def _plugins() -> Plugins:
    """Looked for once: entry points do not change between seeds."""
    return Plugins.load()


@define(eq=False)
class _Buffer:
    device: SimDevice
    view: memoryview
    gone: bool = False

    def free(self) -> None:
        if not self.gone:
            self.gone = True
            self.device.taken -= len(self.view)


@define(eq=False)
class SimDevice:
    """A device on which others (``foreign``) take bytes too. Full is full: it refuses, as hardware does."""

    name: str
    size: int
    refused: Callable[[str, int], None]
    blind: bool = False
    """The driver's figure can't be had."""
    foreign: int = 0
    taken: int = 0
    kind: Literal["cuda", "cpu", "emulated"] = "emulated"
    description: str = "simulated"

    def total(self) -> int:
        return self.size

    def used(self) -> int | None:
        return None if self.blind else self.taken + self.foreign

    @property
    def free(self) -> int:
        return self.size - self.taken - self.foreign

    def allocate(self, nbytes: int) -> Any:
        if nbytes > self.free:
            self.refused(self.name, nbytes)
            raise DeviceOutOfMemory(f"{self.name} is full", account=self.name, needed=nbytes, free=self.free)
        self.taken += nbytes
        return _Buffer(self, memoryview(bytearray(nbytes)))


class WatchedLedger(Ledger):
    """Notes that it changed, and every call that broke one of its rules."""

    dirty = False
    broken: str | None = None
    booked: Callable[[str, Iterable[Need]], None] | None = None
    """Told of every booking."""

    def book(self, owner: str, needs: Iterable[Need], *, purpose: str = "engine", victims: Sequence[str] = ()) -> None:
        needs = tuple(needs)
        _watched("book")(self, owner, needs, purpose=purpose, victims=victims)
        if self.booked is not None and purpose != "arena":
            self.booked(owner, needs)


def _watched(name: str) -> Callable[..., Any]:
    real = getattr(Ledger, name)

    def method(self: WatchedLedger, *args: Any, **kwargs: Any) -> Any:
        self.dirty = True
        try:
            return real(self, *args, **kwargs)
        except Exception as error:
            self.broken = f"{name}{args}: {type(error).__name__}: {error}"
            raise

    return method


for _name in _MUTATORS:
    setattr(WatchedLedger, _name, _watched(_name))


class _Errors(logging.Handler):
    """Collects what residency logs as an exception, unless the simulation injected it."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not injected(error):
            self.found.append(f"logged: {record.getMessage()}: {type(error).__name__}: {error}")


@define
class WorldSettings:
    """Sizes in bytes, times in seconds."""

    devices: dict[str, int]
    host: int = 1 << 40
    registry: RegistrySettings = field(factory=RegistrySettings)
    watch_host: bool = False
    blind: tuple[str, ...] = ()


@define(eq=False)
class World:
    """A registry and everything that it stands on."""

    settings: WorldSettings
    loop: VirtualClockLoop
    devices: dict[str, SimDevice] = field(factory=dict)
    ledger: WatchedLedger = field(factory=WatchedLedger)
    registry: Registry = field(init=False)
    transitions: dict[asyncio.Task[Any], None] = field(factory=dict)
    """Tasks that the registry made for transitions and that are not done."""
    counts: Counter[str] = field(factory=Counter)
    trace: list[str] = field(factory=list)
    problems: list[str] = field(factory=list)
    honest: bool = True
    """No engine lies about its size, and no foreign memory rose: no device may ever be asked for what it has not."""
    leaks: bool = False
    """A close failed: what that engine held may never come free."""
    host_foreign: int = 0
    on_await: Callable[[asyncio.Task[Any], Any], None] | None = None
    """Told of every await of a transition, with the future that it waits for."""
    pinned: Pinned = field(init=False)
    expected: Expected = field(init=False)
    waits: Waits = field(init=False)
    tier_rules: TierRules = field(init=False)
    _handler: _Errors = field(init=False)

    def __attrs_post_init__(self) -> None:
        settings = self.settings
        self.ledger.add_account("host", total=settings.host)
        for name, size in settings.devices.items():
            self.devices[name] = SimDevice(name, size, self._refused, blind=name in settings.blind)
            self.ledger.add_account(name, total=size, permits=settings.registry.run_permits)
        self.loop.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.registry = Registry(
            _plugins(),
            self.ledger,
            [*self.devices.values()],
            settings.registry,
            make_worker=VirtualWorker,
            host_available=self.host_available if settings.watch_host else None,
            observer=(lookups := Lookups(self)),
        )
        self.pinned, self.expected, self.waits = Pinned(self), Expected(self), Waits(self)
        self.tier_rules = TierRules(self)
        self.ledger.booked = self.tier_rules.booked
        for told in (self._changed, self.tier_rules.heard, lookups.heard):
            self.registry.subscribe(told)
        self._handler = _Errors(self.problems)
        log = logging.getLogger("sie.residency")
        log.addHandler(self._handler)
        log.setLevel(logging.ERROR)
        log.propagate = False

    def leak(self) -> None:
        """An engine won't close."""
        self.leaks = True
        self.honest = False

    def close(self) -> None:
        """Take the ears off the log."""
        log = logging.getLogger("sie.residency")
        log.removeHandler(self._handler)
        log.setLevel(logging.NOTSET)
        log.propagate = True

    # --- looking into the registry -----------------------------------------------------------------

    @property
    def records(self) -> dict[str, Record]:
        return self.registry._roster.records

    @property
    def tier(self) -> HostTier:
        return self.registry._tier

    def seats(self) -> list[tuple[Record, Seat]]:
        return [(record, record.seat) for record in self.records.values() if record.seat is not None]

    def engine(self, seat: Seat) -> FakeLifecycle:
        assert isinstance(seat.engine, FakeLifecycle)
        return seat.engine

    def host_available(self) -> int:
        """What the system would still give: the copies' blocks and the arena are really taken."""
        tier: HostTier = self.registry._tier
        taken = sum(copy.nbytes for copy in tier.copies.values() if copy.block is not None)
        return self.settings.host - self.host_foreign - taken - tier.arena.idle

    # --- being told --------------------------------------------------------------------------------

    def _changed(self, event: ResidencyChanged) -> None:
        self.ledger.dirty = True
        self.counts[f"{event.before}->{event.after}"] += 1
        self.pinned.heard(event)
        self.expected.heard(event)
        self.waits.heard(event)
        self.problems.extend(filter(None, [launch_disturbed(self, event)]))
        self.trace.append(f"{self.loop.time():9.3f} {event.model}: {event.before} -> {event.after} ({event.reason})")

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.loop.time():9.3f} {text}")

    def _refused(self, device: str, nbytes: int) -> None:
        self.counts["device full"] += 1
        self.note(f"{device} refuses {nbytes} bytes")
        if self.honest:
            self.problems.append(f"{device} was asked for {nbytes} bytes that it does not have")

    # --- tasks -------------------------------------------------------------------------------------

    def _make_task(self, loop: Any, coro: Coroutine[Any, Any, Any], **rest: Any) -> asyncio.Task[Any]:
        room = getattr(coro, "__qualname__", "")
        if not room.startswith(("Loading.", "Parking.wake", "Parking.park", "Lifecycle.")):
            return asyncio.Task(coro, loop=loop, **rest)
        watched = _Watched(coro, self)
        task: asyncio.Task[Any] = asyncio.Task(watched, loop=loop, **rest)
        watched.task = task
        self.transitions[task] = None
        task.add_done_callback(self._transition_done)
        if self.on_await is not None:
            self.on_await(task, None)
        return task

    def _transition_done(self, task: asyncio.Task[Any]) -> None:
        del self.transitions[task]
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.problems.append(f"transition {task.get_name()} raised {type(error).__name__}: {error}")

    def running(self, model: str) -> int:
        """How many transitions of the model are under way."""
        return sum(not task.done() and task.get_name() == f"sie:{model}" for task in self.transitions)


class _Watched(Coroutine[Any, Any, Any]):
    """A transition's coroutine, with an ear at its awaits."""

    def __init__(self, coro: Coroutine[Any, Any, Any], world: World) -> None:
        self._coro = coro
        self._world = world
        self.task: asyncio.Task[Any] | None = None

    def __await__(self) -> Any:
        return self._coro.__await__()

    def send(self, value: Any) -> Any:
        return self._heard(self._coro.send(value))

    def throw(self, *error: Any) -> Any:
        return self._heard(self._coro.throw(*error))

    def close(self) -> None:
        self._coro.close()

    def _heard(self, awaited: Any) -> Any:
        if self._world.on_await is not None and self.task is not None:
            self._world.on_await(self.task, awaited)
        return awaited


def models_of(world: World, specs: Sequence[ModelSpec]) -> None:
    """Configure the models, with no fault of an earlier run left."""
    FaultPoints.reset_all()
    world.pinned.apply(specs)
