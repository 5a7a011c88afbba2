"""The host tier: copies of parked engines and kept backups, the budget they live in, and whose goes first.

Bytes are booked on the host account before they are taken. The budget is a limit inside that account, for copies only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from math import inf

from attrs import define, field

from sie_core.errors import HostOutOfMemory
from sie_core.memory._pages import round_up
from sie_core.memory.arena import Arena, ArenaBlock
from sie_core.memory.ledger import Need
from sie_core.residency.fence import launch_beside
from sie_core.residency.roster import HOST, Roster
from sie_core.types import Residency
from sie_core.units import format_bytes

__all__ = ["PARK_WAITS_S", "RELIEF_WAITS_S", "HostCopy", "HostTier"]

PARK_WAITS_S = 1.0
"""A park waits so long for copies that have to go; it never waits for host memory beyond that."""
RELIEF_WAITS_S = 10.0
"""What is leaving counts as gone for so long where memory runs short; then somebody else has to go as well."""

_TICK_S = 0.001
"""Clocks of event loops are no finer: who has waited for so long may be looked at that much early."""
_COPY = "host copy"
_ARENA = "idle host arena"
_ALIGN = 64


@define(eq=False)
class HostCopy:
    """Host memory set aside for one engine's state: ``nbytes`` are charged, and buffers are cut from one block."""

    owner: str
    nbytes: int
    arena: Arena
    block: ArenaBlock | None = None
    taken: int = 0
    droppable: bool = False
    """Its engine can do without it while it is resident; says nothing of the time in which the engine is parked."""

    def buffer(self, nbytes: int) -> memoryview:
        """The next ``nbytes`` of it, aligned to 64 bytes. Called on the engine's thread: fresh memory is touched here.

        Raises:
            HostOutOfMemory: more than ``host_offload_bytes`` announced, or no memory to map.
        """
        if self.block is None:
            self.block = self.arena.take(self.nbytes)
        start = -(-self.taken // _ALIGN) * _ALIGN
        if start + nbytes > len(self.block.view):
            raise HostOutOfMemory(
                f"the engine of {self.owner!r} asks for more than the {format_bytes(self.nbytes)} it announced",
                account=HOST,
                needed=start + nbytes,
                free=len(self.block.view),
            )
        self.taken = start + nbytes
        return self.block.view[start : self.taken]

    def free(self) -> None:
        """Give the block back to the arena. Idempotent; the engine must not look into it any more."""
        block, self.block = self.block, None
        if block is not None:
            self.arena.give_back(block)


@define(eq=False)
class HostTier:
    """``budget`` in bytes; 0: off. Everything here runs on the event loop, but ``HostCopy.buffer``."""

    roster: Roster
    budget: int
    arena: Arena = field(factory=Arena)
    copies: dict[str, HostCopy] = field(factory=dict)
    """By model, the one that was parked (or woken) longest ago first."""
    going: dict[str, asyncio.Future[None]] = field(factory=dict)
    """By model, what drops its copy."""
    awaited: dict[str, int] = field(factory=dict)
    """By model that parks, the bytes of its copy, while it waits for others to go."""
    _waited_for: dict[asyncio.Future[None], float] = field(factory=dict)
    """Since when."""
    _closed: bool = False

    @property
    def on(self) -> bool:
        return self.budget > 0

    @property
    def used(self) -> int:
        return sum(copy.nbytes for copy in self.copies.values())

    def held(self, model: str) -> int:
        """Host bytes charged for the model's copy."""
        copy = self.copies.get(model)
        return copy.nbytes if copy is not None else 0

    def leaving(self, patience_s: float) -> dict[str, asyncio.Future[None]]:
        """By model whose copy is being dropped, or goes with its engine, what to wait for.

        Without those that somebody has waited for longer than ``patience_s`` seconds: they may never go.
        """
        ends = dict(self.going)
        for name in self.copies:
            record = self.roster.records.get(name)
            if record is not None and record.state is Residency.UNLOADING and record.task is not None:
                ends[name] = record.task
        now = self.roster.now()
        self._waited_for = {end: self._waited_for.get(end, now) for end in ends.values() if not end.done()}
        latest = now - patience_s + _TICK_S
        return {name: end for name, end in ends.items() if self._waited_for.get(end, -inf) > latest}

    def leaving_bytes(self, patience_s: float) -> int:
        """What those copies will give back."""
        return sum(self.held(name) for name in self.leaving(patience_s))

    def room_for(self, nbytes: int, *, keep: Collection[str]) -> list[str] | None:
        """Whose copies have to go so that ``nbytes`` fit; ``None``: they can't be had.

        From what is free; then droppable backups, which cost nothing to lose; then the copy that was parked longest ago
        and that nobody waits for. Never one of ``keep``. What is leaving already counts as gone, and what other parks
        wait for as taken.
        """
        self.roster.look_at_host()
        short = self._short(nbytes + sum(self.awaited.values()) - self.leaving_bytes(PARK_WAITS_S))
        if short <= 0:
            return []
        if nbytes > self.budget:
            return None
        go: list[str] = []
        for name in self.in_order_of_going():
            if short <= 0:
                break
            if name not in keep and not self._beside_a_launch(name):
                go.append(name)
                short -= self.copies[name].nbytes
        return go if short <= 0 else None

    def in_order_of_going(self) -> list[str]:
        """Whose copies may go: droppable backups first, then those that were parked longest ago.

        Last those whose engines would give device memory back beside a launch: only a host that runs short takes them.
        """
        able = [name for name in self.copies if self._may_go(name)]
        return sorted(able, key=lambda name: (self._beside_a_launch(name), self._is_parked(name)))

    def _beside_a_launch(self, name: str) -> bool:
        return self._is_parked(name) and launch_beside(self.roster, self.roster.records[name]) is not None

    def _is_parked(self, name: str) -> bool:
        record = self.roster.records.get(name)
        return record is not None and record.state is Residency.PARKED

    def give_back_idle(self, nbytes: int) -> int:
        """Give idle arena memory back to the system. Returns how much."""
        before = self.arena.idle
        self.arena.trim(min(nbytes, before))
        self._book_arena()
        return before - self.arena.idle

    def _short(self, nbytes: int) -> int:
        """How many bytes are missing, in the budget or on the host."""
        host = self.roster.ledger.available(HOST) + self.arena.idle
        return max(nbytes - (self.budget - self.used), nbytes - host)

    def _may_go(self, name: str) -> bool:
        record = self.roster.records.get(name)
        copy = self.copies[name]
        if record is None or name in self.going:
            return False
        # The state decides, not the copy: one that is kept through wakes is a backup and all there is by turns.
        if record.state in (Residency.RESIDENT, Residency.DRAINING):
            return copy.droppable
        if record.state is not Residency.PARKED or record.spec.pinned:
            return False
        return not record.tickets and record.task is None and record.drain is None

    def set_aside(self, model: str, nbytes: int) -> HostCopy | None:
        """Book ``nbytes`` for a model's copy; ``None``: not to be had. What lies idle in the arena is used first."""
        nbytes = round_up(nbytes)
        self.roster.look_at_host()
        if self._short(nbytes) > 0:
            return None
        copy = HostCopy(model, nbytes, self.arena, self.arena.take_idle(nbytes))
        self._book_arena()
        missing = nbytes - self.roster.ledger.available(HOST)
        if missing > 0:
            self.arena.trim(missing)
            self._book_arena()
        if self.roster.ledger.available(HOST) < nbytes:
            copy.free()
            self._book_arena()
            return None
        self.copies[model] = copy
        # In transit until it is there: memory that nobody has touched yet still looks free.
        self.roster.ledger.book(model, [Need(HOST, static=nbytes)], purpose=_COPY)
        return copy

    def realise(self, model: str, nbytes: int) -> bool:
        """The copy is there and takes ``nbytes``. ``False``: more than was set aside, and than there is."""
        copy = self.copies.get(model)
        if copy is None:
            return nbytes == 0
        more = round_up(nbytes) - copy.nbytes if nbytes > copy.nbytes else 0
        if more:
            self.roster.look_at_host()
            if self.used + more > self.budget or not self.roster.ledger.grow(model, HOST, more, purpose=_COPY):
                return False
            copy.nbytes += more
        self.roster.ledger.realise(model, HOST, copy.nbytes, purpose=_COPY)
        self.roster.ledger.settle(model)
        self._book_arena()  # its block may have come from there
        return True

    def keep_parked(self, model: str) -> None:
        """The model is parked: of all copies, its own is the last to go."""
        copy = self.copies.pop(model, None)
        if copy is not None:
            self.copies[model] = copy

    def keep_backup(self, model: str, *, droppable: bool) -> None:
        """The model is awake and keeps its copy."""
        copy = self.copies.pop(model)
        copy.droppable = droppable
        self.copies[model] = copy

    def forget(self, model: str) -> int:
        """The copy is dropped: the engine does not look into it any more. Returns the bytes that came free."""
        copy = self.copies.pop(model, None)
        if copy is None:
            return 0
        copy.free()
        self.roster.ledger.release(model, purpose=_COPY)
        self._book_arena()
        return copy.nbytes

    def _book_arena(self) -> None:
        """The idle part of the arena is memory that this process holds: it stands in the book."""
        ledger = self.roster.ledger
        # What is idle beyond the budget would never be used again.
        self.arena.trim(self.arena.idle - (0 if self._closed else max(0, self.budget - self.used)))
        ledger.release(_ARENA)
        # Nor is it kept where the host has run short since.
        self.arena.trim(self.arena.idle - max(0, ledger.available(HOST)))
        if self.arena.idle:
            ledger.book(_ARENA, [Need(HOST, static=self.arena.idle)], purpose="arena")
            ledger.realise(_ARENA, HOST, self.arena.idle, purpose="arena")
            ledger.settle(_ARENA)

    def close(self) -> None:
        """Give everything back to the system, and keep nothing from now on."""
        self._closed = True
        self._book_arena()
