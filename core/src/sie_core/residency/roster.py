"""What the rooms of residency share: the records, the ledger, the devices, the events and the decision ring."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from sie_core.adapter import Adapter, Device
from sie_core.errors import MissingAdapter
from sie_core.memory.ledger import Ledger
from sie_core.residency import machine
from sie_core.residency.leftovers import Leftovers
from sie_core.residency.reasons import Why
from sie_core.residency.record import Record, RegistrySettings
from sie_core.types import Capabilities, Cause, Decision, Residency, ResidencyChanged
from sie_core.units import format_bytes

if TYPE_CHECKING:
    from sie_core.plugins import Plugins

__all__ = ["HOST", "Observer", "Roster"]

HOST = "host"
GROWTH = "growth"
_WORTH_TELLING = 1 << 20
"""Bytes of an overrun; what is less comes of rounding."""
_ARRIVING = frozenset({Residency.QUEUED, Residency.LOADING, Residency.WAKING})
log = logging.getLogger("sie.residency")


class Observer(Protocol):
    """Who wants to count: telemetry. Each call must return at once."""

    def model_loaded(self, model: str, seconds: float, *, outcome: str) -> None: ...

    def evicted(self, model: str, cause: Cause) -> None: ...

    def parked(self, model: str, seconds: float, *, outcome: str) -> None: ...

    def woken(self, model: str, seconds: float, *, outcome: str) -> None: ...

    def host_cache_lookup(self, model: str, *, hit: bool) -> None: ...


class Roster:
    """One record per model, and the one place where a state changes."""

    def __init__(
        self,
        plugins: Plugins,
        ledger: Ledger,
        devices: Sequence[Device],
        settings: RegistrySettings,
        observer: Observer | None = None,
    ) -> None:
        self.plugins = plugins
        self.ledger = ledger
        self.devices: dict[str, Device] = {device.name: device for device in devices}
        self.settings = settings
        self.observer = observer
        self.records: dict[str, Record] = {}
        self.recent: dict[str, None] = {}
        """Resident models, least recently used first."""
        self.moving: dict[str, None] = {}
        """Models on their way to being resident."""
        self.permits: dict[tuple[str, str], asyncio.Semaphore] = {}
        self.decisions: deque[Decision] = deque(maxlen=settings.decisions)
        self.subscribers: list[Callable[[ResidencyChanged], None]] = []
        self.closing = False
        self.look_at_host: Callable[[], None] = lambda: None
        """Tell the ledger what the host has now: a figure that is a second old may be 40 GiB off. The watch's."""
        self._epochs = itertools.count(1)
        self._marks = itertools.count(1)
        self._movers: dict[str, int] = {}
        self._last_mover: dict[str, int] = {}
        self.leftovers = Leftovers(self)

    def now(self) -> float:
        """Seconds on the event loop's clock, which tests make virtual."""
        return asyncio.get_running_loop().time()

    def next_epoch(self) -> int:
        return next(self._epochs)

    def adapter(self, record: Record) -> Adapter:
        """A fresh adapter object. Raises MissingAdapter. Makes it here, so call it on the engine's thread."""
        entry = self.plugins.adapters.get(record.spec.adapter)
        if entry is None:
            raise MissingAdapter(record.spec.adapter, found=sorted(self.plugins.adapters))
        return entry.cls()

    def declared(self, record: Record) -> Capabilities | None:
        """What its adapter says of all its models."""
        entry = self.plugins.adapters.get(record.spec.adapter)
        found = None if entry is None else getattr(entry.cls, "declares", None)
        return found if isinstance(found, Capabilities) else None

    def owner_plugin(self, record: Record) -> str | None:
        entry = self.plugins.adapters.get(record.spec.adapter)
        return entry.plugin if entry is not None else None

    # --- states and events -------------------------------------------------------------------------

    def set(self, record: Record, after: Residency, reason: str, cause: Cause | None = None) -> None:
        """Change a state, and tell everybody who asked to be told."""
        before = record.state
        if before is after:
            return
        machine.check(record.name, before, after)
        record.state = after
        if after is Residency.RESIDENT:
            self.recent[record.name] = None
        elif after not in (Residency.DRAINING, Residency.RESIDENT):
            self.recent.pop(record.name, None)
        if after in _ARRIVING:
            self.moving[record.name] = None
        else:
            self.moving.pop(record.name, None)
        log.info("%s: %s -> %s (%s)", record.name, before, after, reason)
        event = ResidencyChanged(record.name, before, after, reason, record.epoch, time.time(), cause)
        self.plugins.notify(event)
        for subscriber in tuple(self.subscribers):
            try:
                subscriber(event)
            except Exception:  # a listener's fault must not tear a transition
                log.exception("a subscriber of residency events failed")

    def touch(self, record: Record) -> None:
        """Mark a resident model as just used."""
        record.last_used = self.now()
        if record.name in self.recent:
            del self.recent[record.name]
            self.recent[record.name] = None

    def decide(
        self,
        model: str,
        action: str,
        reason: str,
        cause: Cause | None = None,
        *,
        needed: int = 0,
        promised: int = 0,
        freed: int = 0,
        victims: Iterable[str] = (),
    ) -> None:
        """Keep why something was evicted, refused or dropped."""
        self.decisions.append(
            Decision(
                at=time.time(),
                model=model,
                action=action,
                reason=reason,
                needed_bytes=needed,
                promised_bytes=promised,
                freed_bytes=freed,
                victims=tuple(victims),
                cause=cause,
            )
        )

    def departed(self, model: str, action: str, why: Why, *, promised: int, freed: int) -> None:
        """A model has left its device, or the host tier: keep why, and count it where it was evicted."""
        self.decide(model, action, why.words, why.cause, promised=promised, freed=freed)
        if self.observer is not None and why.cause.evicts:
            self.observer.evicted(model, why.cause)

    # --- memory ------------------------------------------------------------------------------------

    def sample(self, accounts: Iterable[str]) -> dict[str, int]:
        """What the driver calls used, by account, where it can be told; the ledger is told too."""
        seen: dict[str, int] = {}
        for account in accounts:
            device = self.devices.get(account)
            if device is None:
                continue
            self._realise_pools(account, device)
            used = device.used()
            if used is not None:
                seen[account] = used
                self.ledger.observe(account, used)
        return seen

    def _realise_pools(self, account: str, device: Device) -> None:
        """Book what this process really has on a device, for the pools of in-process engines.

        Their contexts, activations and the framework's cache are in no engine's own report, and would be taken for
        somebody else's.
        """
        process_used = getattr(device, "process_used", None)
        if process_used is None:
            return
        mine = None
        for known, pool in self.permits:
            if known == account:
                mine = process_used(os.getpid()) if mine is None else mine
                self.ledger.realise_pool(account, pool, mine)

    def report_overrun(self, record: Record) -> None:
        """Say so where an engine turned out to hold more than it was promised. It is charged for it all the same."""
        over = self.ledger.overrun(record.name)
        if over >= _WORTH_TELLING:
            why = f"it holds {format_bytes(over)} more than it was promised"
            log.warning("%s: %s", record.name, why)
            self.decide(record.name, "overrun", why, promised=sum(need.promised for need in record.booked))

    def used(self, accounts: Iterable[str]) -> Mapping[str, int]:
        """The same without telling the ledger."""
        found = {name: self.devices[name].used() for name in accounts if name in self.devices}
        return {name: used for name, used in found.items() if used is not None}

    def give_back(self, record: Record, before: Mapping[str, int]) -> int:
        """Release a model's claims and look at its devices, in one step; returns the bytes that really came free.

        Freed bytes are credited as measured: what the driver still counts as used shows up as foreign memory.
        """
        held = self.ledger.release(record.name)
        after = self.sample(record.devices)
        record.devices = ()
        return sum(
            before[account] - after[account] if account in before and account in after else freed
            for account, freed in held.items()
            if account != HOST
        )

    @contextmanager
    def moving_bytes(self, accounts: Iterable[str]) -> Iterator[Callable[[str], bool]]:
        """While a transition moves bytes, a fall of a device's used memory is not taken for foreign memory leaving.

        Yields a question: was this the only transition on the account all along, so that what changed is its doing?
        """
        moved = [*accounts]
        if HOST not in moved and self.ledger.has_account(HOST):
            moved.append(HOST)  # staging and copies move there
        mark = next(self._marks)
        alone = {account: not self._movers.get(account) for account in moved}
        for account in moved:
            self.ledger.begin_transition(account)
            self._movers[account] = self._movers.get(account, 0) + 1
            self._last_mover[account] = mark
        try:
            yield lambda account: alone.get(account, False) and self._last_mover[account] == mark
        finally:
            for account in moved:
                self.ledger.end_transition(account)
                self._movers[account] -= 1

    def moves(self, account: str) -> bool:
        """Whether a transition moves bytes there now."""
        return bool(self._movers.get(account))

    def growths(self, model: str, purpose: str | None = None) -> dict[str, int]:
        """By account, what was booked for the model after its load; all of it, or for one purpose."""
        grown: dict[str, int] = {}
        for claim in self.ledger.claims(model):
            wanted = claim.purpose.startswith(GROWTH) if purpose is None else claim.purpose == purpose
            if wanted:
                grown[claim.account] = grown.get(claim.account, 0) + claim.promised
        return grown

    def release_growths(self, model: str) -> None:
        """Strike those claims: they are part of what its next wake books."""
        for claim in self.ledger.claims(model):
            if claim.purpose.startswith(GROWTH):
                self.ledger.release(model, purpose=claim.purpose)

    def permits_of(self, accounts: Iterable[str], pool: str | None) -> tuple[asyncio.Semaphore, ...]:
        """The run permits that engines of one pool share on each device, in the order in which to take them."""
        if pool is None:
            return ()
        keys = [(account, pool) for account in sorted(accounts)]
        for key in keys:
            if key not in self.permits:
                self.permits[key] = asyncio.Semaphore(self.settings.run_permits)
        return tuple(self.permits[key] for key in keys)


def consume(future: asyncio.Future[Any]) -> None:
    """Take note of a future's error, so that asyncio does not report it as never retrieved."""
    if not future.cancelled():
        future.exception()
