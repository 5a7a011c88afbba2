"""Who may take which bytes next: the queue of loads that wait for memory, and the plans that evict for it.

Looking, planning and booking are one step without an await. The longest waiting ticket goes first; a load that waits
for memory on a device holds back younger ones there, so that small models can't starve a large one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import attrs

from sie_core.adapter import AdmissionReserve
from sie_core.errors import DeviceNotFound, LedgerError, NeverFits, ResourceExhausted, SieError
from sie_core.memory.ledger import Need
from sie_core.residency.choosing import Choosing, all_ways
from sie_core.residency.fence import leaving
from sie_core.residency.placement import Placement, as_it_stands, grant_for, places, regrant
from sie_core.residency.plans import Needer, Placed, Plan
from sie_core.residency.reasons import Why
from sie_core.residency.record import Drain, Record
from sie_core.residency.roster import HOST, Roster, log
from sie_core.residency.victims import Victims
from sie_core.types import Residency
from sie_core.units import format_apart, format_bytes

__all__ = ["Admission"]

_POLL_S = 0.1
_TICK_S = 0.001
_STAYS_S = 1.0
"""A plan that was made anew because idle models could pay is not made anew again before that, whatever came of it."""


class Admission:
    """The queue and the plans. ``drain``, ``undrain``, ``evict`` and ``recheck`` are the lifecycle's."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._waiting: list[Needer] = []
        self._pump_due = False
        self._poll: asyncio.TimerHandle | None = None
        self.drain: Callable[[Record, Drain], None]
        self.undrain: Callable[[Record, str], None]
        self.evict: Callable[[Record, Why], None]
        self.recheck: Callable[[], None]
        self.victims = Victims(roster)
        self._choosing = Choosing(roster, self.victims)

    # --- the front door ----------------------------------------------------------------------------

    async def admit(
        self,
        record: Record,
        reserve: AdmissionReserve,
        *,
        purpose: str = "engine",
        at_least: int = 0,
        cause: SieError | None = None,
        wake: bool = False,
    ) -> Placed:
        """Wait until the bytes are booked and really free.

        Raises:
            NeverFits: larger than the empty device.
            DeviceNotFound: the model names a device that is not there.
            ResourceExhausted: pinned models or foreign memory are in the way.
            TransitionCancelled: withdrawn.
        """
        future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        needer = Needer(record, reserve, future, self._roster.now(), purpose, at_least, cause, wake)
        self._waiting.append(needer)
        try:
            self.pump()
            return await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._unbook(needer)  # granted in the same turn in which whoever waited was cancelled
                self.request_pump()
            self._forget(needer, "given up")
            raise
        finally:
            del needer, future  # an error would keep this frame, and with it itself

    def withdraw(self, record: Record, error: SieError) -> None:
        """Call off what a model waits for."""
        for needer in self._of(record):
            self._forget(needer, error.message)
            if not needer.future.done():
                needer.future.set_exception(error)

    def holds(self, record: Record, plan: Plan) -> bool:
        """Whether ``plan`` is made for this model."""
        return any(needer.plan is plan for needer in self._of(record))

    def waits(self, record: Record) -> bool:
        """Whether the model still waits for its bytes, so that calling it off costs nothing."""
        return bool(self._of(record)) or (record.state is Residency.QUEUED)

    @property
    def busy(self) -> bool:
        """Whether anybody waits for memory."""
        return bool(self._waiting)

    def request_pump(self) -> None:
        """Look again soon; any number of requests in one turn of the loop make one look."""
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Give out what can be given out, longest waiting ticket first."""
        self._pump_due = False
        self.recheck()
        self.victims.next_look = float("inf")
        held_back: set[str] = set()
        for needer in sorted(self._waiting, key=lambda needer: needer.since):
            if needer.future.done():
                continue
            try:
                if needer.plan is not None:
                    self._look_at_plan(needer, held_back)
                if needer.plan is None and not needer.future.done():
                    self._try(needer, held_back)
            except Exception as error:  # a bug of ours: this load fails, and the queue goes on for everybody else
                log.exception("planning for %s failed", needer.record.name)
                self._fail(needer, error if isinstance(error, SieError) else LedgerError(f"planning failed: {error!r}"))
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        if any(needer.plan is None or needer.plan.draining for needer in self._waiting):
            # Guards and exemptions run out with time alone, and nobody reports that.
            now = self._roster.now()
            wait = min(_POLL_S, max(_TICK_S, self.victims.next_look - now))
            self._poll = asyncio.get_running_loop().call_later(wait, self._poll_again)

    def _poll_again(self) -> None:
        self._poll = None
        self.pump()

    # --- what the lifecycle reports ----------------------------------------------------------------

    def drained(self, record: Record, plan: Plan) -> None:
        """A victim's last lease is back. When all are, and only then, the first one goes."""
        plan.draining.discard(record.name)
        if plan.draining or plan.committed:
            return
        plan.committed = True
        for name in plan.victims:
            victim = self._roster.records.get(name)
            if victim is not None and victim.state in (Residency.DRAINING, Residency.PARKED):
                self.evict(victim, plan.why)
            elif victim is None or victim.state not in (Residency.UNLOADING, Residency.QUARANTINED):
                plan.owing.discard(name)  # gone on its own; one that is still going says so when it is gone
        self.request_pump()

    def refused(self, record: Record, plan: Plan, reason: str) -> None:
        """A victim would not drain: nobody is evicted, and the needer plans again without it."""
        if not any(needer.plan is plan for needer in self._waiting):
            self.undrain(record, reason)
        for needer in tuple(self._waiting):
            if needer.plan is plan:
                if record.exempt_until <= self._roster.now():
                    needer.refused.add(record.name)
                self._roster.decide(record.name, "drain given up", reason, victims=plan.victims)
                self._cancel_plan(needer, reason)
                self.request_pump()

    def speak_up(self, record: Record, plan: Plan) -> None:
        """A request came for a draining victim: let it off if idle models can pay instead."""
        needer = next((needer for needer in self._waiting if needer.plan is plan), None)
        if needer is None or plan.committed:
            return
        if self._choosing.idle_can_pay(needer, set(), but=record.name):
            self.refused(record, plan, "a request came for it and idle models can pay instead")

    def fits_elsewhere(self, record: Record) -> bool:
        """Whether a cold load could get room on other devices than the ones it has, evicting whom it may."""
        if record.reserve is None:
            return False
        movable = frozenset(name for name, other in self._roster.records.items() if not other.spec.pinned)
        return any(
            place.devices != record.devices and not self._roster.ledger.shortfall(place.all_needs, without=movable)
            for place in places(self._roster, record, record.reserve)
        )

    def gone(self, record: Record) -> None:
        """A model has given its bytes back."""
        for needer in self._waiting:
            if needer.plan is not None:
                needer.plan.owing.discard(record.name)
        self.request_pump()

    # --- plans -------------------------------------------------------------------------------------

    def _look_at_plan(self, needer: Needer, held_back: set[str]) -> None:
        plan = needer.plan
        assert plan is not None
        if needer.at_least and plan.owing:
            return  # the book says that the bytes are there, the device said otherwise: wait for the victims
        if self._would_not_be_alone(needer, plan):
            return
        if not any(self._roster.ledger.lien(needer.record.name).values()):
            if needer.purpose == "engine" and self._roster.ledger.relies_on_unpaid(needer.record.name):
                return  # the pool's room is booked, and not there yet
            self._let_off(plan, "the bytes came from elsewhere")
            self._grant(needer, plan.placed)
        elif not plan.owing:
            self._cancel_plan(needer, "its victims freed less than they held")
        elif self._may_be_made_anew(needer, plan) and self._choosing.idle_can_pay(needer, held_back):
            needer.stays_until = self._roster.now() + _STAYS_S
            self._cancel_plan(needer, "idle models can pay instead")  # and another one is made in the same look

    def _may_be_made_anew(self, needer: Needer, plan: Plan) -> bool:
        return bool(plan.draining) and self._roster.now() >= needer.stays_until

    def _would_not_be_alone(self, needer: Needer, plan: Plan) -> bool:
        """It measures what is free, and somebody, of its own victims or not, is still giving bytes back there."""
        if not needer.reserve.self_sizing or needer.wake or any(self._roster.ledger.lien(needer.record.name).values()):
            return False
        if not plan.committed:
            self._let_off(plan, "the bytes came from elsewhere")
            plan.draining.clear()
        return next(leaving(self._roster, needer, plan.placed.devices), None) is not None

    def _let_off(self, plan: Plan, reason: str) -> None:
        if not plan.committed:
            for name in plan.victims:
                victim = self._roster.records.get(name)
                if victim is not None and victim.drain is not None and victim.drain.plan is plan:
                    self.undrain(victim, reason)

    def _cancel_plan(self, needer: Needer, reason: str) -> None:
        plan, needer.plan = needer.plan, None
        if plan is not None:
            self._unbook(needer)
            self._gives_up_its_place(needer)
            self._let_off(plan, reason)

    def _unbook(self, needer: Needer) -> None:
        ledger, record = self._roster.ledger, needer.record
        if needer.wake:
            ledger.retain(record.name, record.retained)
        else:
            ledger.release(record.name, purpose=needer.purpose)
            ledger.release(record.name, purpose="load_staging")

    @staticmethod
    def _gives_up_its_place(needer: Needer) -> None:
        if needer.purpose == "engine" and not needer.wake:
            needer.record.devices = needer.record.booked = ()

    def _forget(self, needer: Needer, reason: str) -> None:
        if needer in self._waiting:
            self._waiting.remove(needer)
            self._cancel_plan(needer, reason)
            self.request_pump()

    def _grant(self, needer: Needer, placed: Placed) -> None:
        self._waiting.remove(needer)
        needer.record.blocked = None
        if needer.plan is not None and not needer.wake and not needer.at_least:
            self._top_up(needer, placed)  # not where the device gave out before the book did
        placed.grant = as_it_stands(self._roster, needer.record.name, placed.grant)
        if not needer.future.done():
            needer.future.set_result(placed)

    def _top_up(self, needer: Needer, placed: Placed) -> None:
        """Victims go whole and free more than was missing: up to what it wants, that is the needer's too."""
        ledger, record = self._roster.ledger, needer.record
        devices = dict(placed.grant.devices)
        if ledger.touches(needer.plan.needs if needer.plan is not None else (), HOST):
            self._roster.look_at_host()
        for account, rank in zip(placed.devices, needer.reserve.ranks, strict=True):
            had = devices[account]
            extra = min(rank.want_bytes - had.static_bytes, ledger.available(account))
            if extra <= 0 or not ledger.grow(record.name, account, extra, purpose=needer.purpose):
                continue
            devices[account] = attrs.evolve(had, static_bytes=had.static_bytes + extra)
            if needer.purpose == "engine":
                record.booked = tuple(
                    attrs.evolve(need, static=need.static + extra) if need.account == account else need
                    for need in record.booked
                )
        placed.grant = attrs.evolve(placed.grant, devices=devices)

    def _fail(self, needer: Needer, error: SieError) -> None:
        if needer in self._waiting:
            self._waiting.remove(needer)
        self._cancel_plan(needer, error.message)
        self._roster.decide(needer.record.name, "refused", error.message)
        if not needer.future.done():
            needer.future.set_exception(error)

    def _of(self, record: Record) -> list[Needer]:
        return [needer for needer in self._waiting if needer.record is record]

    # --- planning ----------------------------------------------------------------------------------

    def _try(self, needer: Needer, held_back: set[str]) -> None:
        ways = self._ways(needer)
        if ways is not None and any(self._roster.ledger.touches(place.all_needs, HOST) for place in ways):
            self._roster.look_at_host()
        if ways is None or self._squeeze_in(needer, ways[0]):
            return
        best = self._choosing.best(needer, ways, held_back)
        if best is not None:
            self._book(needer, *best)
            return
        if not self._hopeless(needer, ways):
            needer.record.blocked = "waits for memory that running models hold"
            held_back.update(account for place in ways for account in place.devices)

    def _ways(self, needer: Needer) -> list[Placement] | None:
        """The placements that an empty machine could take; ``None`` after the needer was failed."""
        roster, record = self._roster, needer.record
        ways = all_ways(self._roster, needer)
        if needer.wake:
            return ways
        if not ways:
            there = ", ".join(roster.devices)
            wanted = record.spec.device or f"{len(needer.reserve.ranks)} devices"
            self._fail(needer, DeviceNotFound(f"model {record.name!r} wants {wanted}; this machine has {there}"))
            return None
        verdicts = [roster.ledger.impossible(place.all_needs) for place in ways]
        open_ways = [place for place, verdict in zip(ways, verdicts, strict=True) if verdict is None]
        if not open_ways:
            account, needed, capacity = next(verdict for verdict in verdicts if verdict is not None)
            wants, has = format_apart(needed, capacity)
            message = (
                f"model {record.name!r} needs {wants} on {account}, which has {has} "
                "in all: use a smaller model or dtype, less runtime_headroom, or a larger device"
            )
            self._fail(needer, NeverFits(message, account=account, needed=needed, capacity=capacity))
            return None
        return open_ways

    def _hopeless(self, needer: Needer, ways: list[Placement]) -> bool:
        """Fail the needer if not even evicting everybody would help: pins, or memory that is not ours."""
        roster, record = self._roster, needer.record
        # A batch that ran out of memory keeps its leases and its permit while it waits: no longer than a guard lasts.
        late = needer.purpose != "engine" and roster.now() - needer.at > roster.settings.turn_s
        if needer.at_least and (late or not self._others(needer, ways)):
            self._fail(needer, needer.cause or ResourceExhausted("nothing is left to evict", retry_after_s=5.0))
            return True
        movable = frozenset(
            name for name, other in roster.records.items() if not other.spec.pinned and other is not record
        )
        missing = [roster.ledger.shortfall(place.all_needs, without=movable, owner=needer.owner) for place in ways]
        if not all(missing):
            return False
        account, short = next(iter(missing[0].items()))
        pinned = sorted(name for name, other in roster.records.items() if other.spec.pinned and other.seat is not None)
        holders = f"pinned models ({', '.join(pinned)})" if pinned else roster.leftovers.holders(account)
        advice = "unpin or unload something, or try again later"
        if not pinned and roster.leftovers.on(account):
            advice = "restart the server, or try again later"
        own = roster.ledger.holding(record.name).get(account, 0)
        if needer.purpose != "engine" and not pinned:
            holders, advice = f"the model itself ({format_bytes(own)})", "use a larger device, or ask it for less"
        message = f"model {record.name!r} is {format_bytes(short)} short on {account}, held by {holders}: {advice}"
        state = next(state for state in roster.ledger.accounts() if state.account == account)
        if needer.purpose != "engine" and not pinned and not state.foreign:
            self._fail(needer, NeverFits(message, account=account, needed=own + short, capacity=state.capacity))
        else:
            self._fail(needer, ResourceExhausted(message, retry_after_s=10.0))
        return True

    def _others(self, needer: Needer, ways: list[Placement]) -> bool:
        """Whether any other model that may ever be evicted is on one of these devices, or on its way there."""
        accounts = {account for place in ways for account in place.devices}
        held = self._roster.ledger.holding
        return any(
            other is not needer.record
            and not other.spec.pinned
            and any(nbytes > 0 and account in accounts for account, nbytes in held(other.name).items())
            for other in self._roster.records.values()
        )

    def _book(self, needer: Needer, place: Placement, victims: tuple[str, ...]) -> None:
        roster, record = self._roster, needer.record
        if needer.wake:
            needs, grant = place.needs, regrant(place)
        else:
            needs, grant = grant_for(roster, place, needer.reserve)
        needed = sum(roster.ledger.shortfall(place.all_needs, owner=needer.owner).values())
        self._enter(needer, needs, place.staging, victims)
        placed = Placed(place.devices, grant)
        if needer.purpose == "engine":
            record.devices = place.devices
            record.booked = tuple(need for need in needs if need.account != HOST)
        if not victims:
            ledger, name = roster.ledger, record.name
            if needer.purpose == "engine" and (ledger.relies_on_unpaid(name) or any(ledger.lien(name).values())):
                needer.plan = Plan(placed, needer.why, (), set(), set(), tuple(needs), tuple(place.staging))
                record.blocked = "waits for memory that another model of its pool is about to get"
            else:
                self._grant(needer, placed)
            return
        roster.decide(
            record.name,
            "evict",
            needer.cause.message if needer.cause is not None else "room for another model",
            needer.why.cause,
            needed=needed,
            promised=sum(sum(roster.ledger.freed_by(name).values()) for name in victims),
            victims=victims,
        )
        staging = tuple(place.staging)
        needer.plan = plan = Plan(placed, needer.why, victims, set(victims), set(victims), tuple(needs), staging)
        record.blocked = f"waits for {', '.join(victims)} to leave"
        for name in victims:
            self.drain(roster.records[name], Drain(plan.why, plan))

    def _enter(self, needer: Needer, needs: Sequence[Need], staging: Sequence[Need], victims: tuple[str, ...]) -> None:
        ledger, name = self._roster.ledger, needer.record.name
        ledger.book(name, needs, purpose=needer.purpose, victims=victims)
        if staging:
            ledger.book(name, staging, purpose="load_staging", victims=victims)

    def _squeeze_in(self, needer: Needer, place: Placement) -> bool:
        """Grant what a victim needs to end its requests, out of what its successor waits for.

        The victim frees it again when it goes; without it, each would wait for the other.
        """
        drain = needer.record.drain
        plan: Plan | None = drain.plan if drain is not None else None
        if plan is None or plan.committed or needer.purpose == "engine" or needer.at_least:
            return False
        heir = next((other for other in self._waiting if other.plan is plan), None)
        if heir is None:
            return False
        ledger = self._roster.ledger
        self._unbook(heir)
        fits = not ledger.shortfall(place.all_needs)
        if fits:
            self._book(needer, place, ())
        if ledger.shortfall((*plan.needs, *plan.staging), without=plan.victims, owner=heir.owner):
            heir.plan = None  # what it had went to others who wait longer
            self._gives_up_its_place(heir)
            self._let_off(plan, "its successor has to plan anew")
            self.request_pump()
        else:
            self._enter(heir, plan.needs, plan.staging, plan.victims)
        return fits
