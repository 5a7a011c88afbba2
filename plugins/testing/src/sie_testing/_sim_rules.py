"""What must hold after every step of a simulated run, and what must be left at its end: nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from sie_core import LedgerError, Residency
from sie_core.residency.machine import HOLDS_ENGINE, IN_TRANSITION

from sie_testing._sim_plans import PlanRules
from sie_testing._sim_world import World

if TYPE_CHECKING:
    from sie_core.residency.record import Record, Seat

__all__ = ["BrokenRule", "Rules"]

_R = Residency
_EMPTY = frozenset({_R.UNLOADED, _R.FAILED})
_COPIES = frozenset({_R.RESIDENT, _R.DRAINING, _R.PARKING, _R.PARKED, _R.WAKING, _R.UNLOADING, _R.QUARANTINED})
_AFTER_PARK = frozenset({_R.PARKED, _R.WAKING, _R.UNLOADING, _R.QUARANTINED})
_ARENA = "idle host arena"


class BrokenRule(AssertionError):
    """A rule of the design did not hold."""


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise BrokenRule(rule)


class Rules:
    """Looks at one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.looks = 0
        self._promised: dict[str, tuple[Seat, dict[str, int]]] = {}
        """By model, what was promised to its engine when it last served."""
        self._away: set[str] = set()
        self._plans = PlanRules(world)

    def look(self) -> None:
        """Between two steps: the whole book when it changed. Raises BrokenRule."""
        world, ledger = self._world, self._world.ledger
        if world.problems:
            raise BrokenRule(world.problems[0])
        broken = world.pinned.look() or world.tier_rules.look()
        _require(broken is None, broken or "")
        if not ledger.dirty:
            return
        ledger.dirty = False
        self.looks += 1
        _require(ledger.broken is None, f"the registry broke a rule of the ledger: {ledger.broken}")
        try:
            ledger.check()
        except LedgerError as error:
            raise BrokenRule(str(error)) from error
        self._claims()
        self._tier()
        for record in world.records.values():
            self._record(record)
        broken = self._plans.look()
        _require(broken is None, broken or "")

    # --- the book ----------------------------------------------------------------------------------

    def _claims(self) -> None:
        """No claim whose owner's state may not hold it; no engine that holds more than stands in the book."""
        world = self._world
        charged: dict[tuple[str, str], int] = {}
        for claim in world.ledger.claims():
            key = claim.owner, claim.account
            charged[key] = charged.get(key, 0) + max(0, claim.charge)
            if claim.owner == _ARENA:
                continue
            record = world.records.get(claim.owner)
            _require(record is not None, f"{claim.owner} is no model any more and holds {claim}")
            assert record is not None
            _require(record.state not in _EMPTY, f"{record.name} is {record.state} and holds {claim}")
        for record, seat in world.seats():
            engine = world.engine(seat)
            factor = engine.options.realised
            if factor is not None and factor > 1 and record.state not in (_R.RESIDENT, _R.DRAINING, _R.PARKED):
                continue  # it lies, and while it moves nobody knows yet
            if factor is None and engine.options.freed < 1 and record.state in _AFTER_PARK:
                continue  # it tells nothing and frees less than it says: only a device that nobody else uses tells
            for account in engine.devices:
                holds, stands = engine.really_holds(account), charged.get((record.name, account), 0)
                _require(holds <= stands, f"{record.name} ({record.state}) holds {holds} on {account}, booked {stands}")

    def _tier(self) -> None:
        world, tier = self._world, self._world.tier
        _require(tier.used <= max(tier.budget, 0), f"the host tier holds {tier.used} of {tier.budget}")
        booked = {c.owner: c.promised for c in world.ledger.claims() if c.purpose == "host copy"}
        copies = {name: copy.nbytes for name, copy in tier.copies.items()}
        _require(booked == copies, f"copies {copies} and their claims {booked} differ")
        for name in copies:
            record = world.records.get(name)
            _require(
                record is not None and record.state in _COPIES, f"{name} has a copy and is {record and record.state}"
            )
        idle = sum(c.promised for c in world.ledger.claims() if c.owner == _ARENA)
        # A copy takes its block on the engine's thread; the book follows when the park has ended.
        _require(idle >= tier.arena.idle, f"the arena has {tier.arena.idle} idle bytes, booked are {idle}")

    # --- records -----------------------------------------------------------------------------------

    def _record(self, record: Record) -> None:
        world, state, name = self._world, record.state, record.name
        running = world.running(name)
        _require(running <= 1, f"{running} transitions of {name} run")
        if state in IN_TRANSITION:
            _require(record.task is not None, f"{name} is {state}, and nothing runs that would end that")
        else:
            _require(running == 0, f"{name} is {state}, and a transition still runs")
        if state in HOLDS_ENGINE:
            _require(record.seat is not None, f"{name} is {state} without an engine")
        elif state in _EMPTY:
            _require(record.seat is None and record.worker is None, f"{name} is {state} and keeps its engine")
        roster = world.registry._roster
        _require((name in roster.recent) == (state in (_R.RESIDENT, _R.DRAINING)), f"{name} is {state}: recent")
        _require((name in roster.moving) == (state in (_R.QUEUED, _R.LOADING, _R.WAKING)), f"{name} is {state}: moving")
        _require((record.drain is None) or state in (_R.DRAINING, _R.PARKED), f"{name} is {state} with a drain")
        self._leases(record)
        self._promise(record)
        self._loras(record)
        self._waiters(record)

    def _loras(self, record: Record) -> None:
        """What the book says of adapters is what the engine has, whenever nobody is at it."""
        loras, seat = record.loras.values(), record.seat
        _require(all(lora.uses >= 0 for lora in loras), f"{record.name}: an adapter was given back twice")
        if record.state is not _R.RESIDENT or seat is None or seat.dead is not None or seat.lora_turn.locked():
            return
        booked = {lora.name for lora in loras if lora.seat is seat}
        engine = self._world.engine(seat)
        if engine.dead:
            return  # the registry has not heard of it yet
        there = set(engine._held.loras)
        _require(booked == there, f"{record.name} has the adapters {there}, and {booked} are booked")

    def _promise(self, record: Record) -> None:
        """What an engine came to need at run time, its wake books again: no park forgets it, none books it twice."""
        name, seat, state = record.name, record.seat, record.state
        if seat is None or record.retained or state not in (_R.RESIDENT, _R.DRAINING, _R.PARKING):
            self._away.add(name)
            return
        promised: dict[str, int] = {}
        for claim in self._world.ledger.claims():
            if claim.owner == name and claim.account in record.devices and not claim.in_transit:
                promised[claim.account] = promised.get(claim.account, 0) + claim.promised
        if seat.lora_turn.locked():
            return  # an adapter is on its way in or out
        for lora in record.loras.values():
            for account, nbytes in lora.booked.items() if lora.seat is seat else ():
                promised[account] = promised.get(account, 0) - nbytes
        known = self._promised.get(name)
        if known is not None and known[0] is seat and name in self._away:
            _require(known[1] == promised, f"{name} was promised {known[1]} before it was parked, and now {promised}")
        self._away.discard(name)
        self._promised[name] = seat, promised

    def _leases(self, record: Record) -> None:
        seat, state = record.seat, record.state
        if seat is None:
            return
        _require(seat.leases >= seat.first_turn >= 0, f"{record.name}: {seat.leases} leases, {seat.first_turn} first")
        if seat.leases and state not in (_R.RESIDENT, _R.DRAINING):
            told = seat.lost is not None and seat.lost.done()
            _require(told, f"{record.name} is {state} with {seat.leases} leases that have not been told")

    def _waiters(self, record: Record) -> None:
        """Nobody waits for something that nobody is about to do."""
        state = record.state
        waiting = [ticket for ticket in record.tickets if not ticket.future.done()]
        idle = state in (*_EMPTY, _R.RESIDENT) or (state is _R.PARKED and record.drain is None)
        _require(not (waiting and idle), f"{record.name} is {state}, and {len(waiting)} tickets wait")
        if state in _EMPTY:
            asked = [f for f in (*record.unload_waiters, *record.park_waiters) if not f.done()]
            _require(not asked, f"{record.name} is {state}, and {len(asked)} operators wait for that")

    # --- the end -----------------------------------------------------------------------------------

    def nothing_left(self, threads: set[threading.Thread]) -> None:
        """After the shutdown: every account is empty, no engine, no task, no thread, no error that nobody saw."""
        world = self._world
        self.look()
        _require(not world.ledger.claims(), f"claims are left: {world.ledger.claims()}")
        for name, device in world.devices.items():
            _require(device.taken == 0 or world.leaks, f"{device.taken} bytes are still taken on {name}")
        _require(not world.tier.copies, f"copies are left: {list(world.tier.copies)}")
        _require(world.tier.arena.idle == 0, f"{world.tier.arena.idle} bytes are left in the arena")
        for record in world.records.values():
            _require(record.state in _EMPTY, f"{record.name} is {record.state} after the shutdown")
            _require(not record.tickets, f"{record.name} still has tickets")
            _require(not any(lora.uses for lora in record.loras.values()), f"{record.name} has adapters in use")
        bringing = world.registry._lifecycle.loras._bringing
        _require(not bringing, f"adapters are still on their way: {[lora.name for lora in bringing]}")
        needers = world.registry._admission._waiting
        _require(not needers, f"{[needer.record.name for needer in needers]} still wait for memory")
        for account in world.ledger._accounts.values():
            _require(account.transitions == 0, f"{account.transitions} transitions never ended on {account.name}")
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        _require(not tasks, f"tasks are left: {tasks}")
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        _require(not left, f"threads are left: {left}")
        _require(not world.loop.unhandled, f"nobody handled {_told(world.loop.unhandled)}")


def _told(contexts: list[dict[str, Any]]) -> str:
    return "; ".join(f"{context.get('message')}: {context.get('exception')!r}" for context in contexts)
