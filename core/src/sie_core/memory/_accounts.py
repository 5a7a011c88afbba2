"""The ledger's parts: accounts, claims, pools and liens, each with figures kept up to date as it changes.

Nothing here decides anything; :mod:`sie_core.memory.ledger` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from attrs import define, field


class Weight(NamedTuple):
    """What a claim or a pool adds to its account, in bytes.

    ``realised`` counts known bytes only. ``settled`` is what settled claims are known or taken to hold, ``transit``
    what claims in transit may hold by now at the most, ``transit_known`` what they are known to hold, and ``overrun``
    what is held beyond any promise.
    """

    charge: int = 0
    promised: int = 0
    realised: int = 0
    settled: int = 0
    transit: int = 0
    transit_known: int = 0
    overrun: int = 0

    def plus(self, other: Weight, sign: int = 1) -> Weight:
        return Weight(*(mine + sign * theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Weight()


@define(eq=False)
class Account:
    """One device or the host. ``weight`` includes the accounts whose parent this is."""

    name: str
    total: int
    reserve: int
    parent: Account | None
    permits: int
    chain: tuple[Account, ...] = field(init=False)
    floating: int | None = None
    """Capacity of an account that follows what is available (the host); ``None``: total - reserve."""
    used: int | None = None
    foreign: int = 0
    transitions: int = 0
    weight: Weight = NOTHING
    unpaid: int = 0
    liens: list[Lien] = field(factory=list)
    """Unpaid liens, oldest first."""

    def __attrs_post_init__(self) -> None:
        self.chain = (self, *(self.parent.chain if self.parent is not None else ()))

    @property
    def nominal(self) -> int:
        """Bytes of the empty account."""
        return self.total - self.reserve

    @property
    def capacity(self) -> int:
        return self.nominal if self.floating is None else self.floating

    @property
    def loose(self) -> int:
        """Bytes that are free and that no lien has had yet; negative: overrun."""
        return self.capacity - self.foreign - self.weight.charge + self.unpaid


@define(eq=False)
class Claim:
    """One line of the book."""

    owner: str
    account: Account
    purpose: str
    static: int
    context: int
    headroom: int
    pool: Pool | None
    serial: int
    realised: int | None = None
    retained: int | None = None
    in_transit: bool = True
    exit: int | None = None
    """What leaving frees beyond the claim's own bytes, frozen when a plan named the owner (see Pool.detach)."""
    weight: Weight = NOTHING
    part: int = 0
    """Bytes of this claim alone: its charge, or in a pool its static bytes and its frozen exit."""

    @property
    def promised(self) -> int:
        return self.static + self.context + self.headroom

    @property
    def attached(self) -> bool:
        """Counts for its pool's context and headroom."""
        return self.pool is not None and self.exit is None and self.retained is None

    def weigh(self) -> Weight:
        """The weight of the claim by itself; in a pool, without context and headroom, which the pool weighs."""
        promised = self.promised if self.pool is None else self.static + (self.exit or 0)
        if self.retained is not None:
            # A parked engine's promise rests; what it kept is all that counts until it wakes.
            promised = self.retained
        held = self.realised if self.retained is None else self.retained
        most = max(self.promised, held or 0)
        known = held or 0
        own = self.static if self.pool is not None else promised
        overrun = max(0, known - own) if self.retained is None else 0
        if self.in_transit:
            return Weight(promised + overrun, promised, known, 0, most, known, overrun)
        # Where nobody can tell what a settled engine holds it is taken to hold its weights, never its headroom.
        taken = known if held is not None else self.static + (self.context if self.pool is None else 0)
        return Weight(promised + overrun, promised, known, taken, 0, 0, overrun)


class _Ranking:
    """Claims in order of one of their figures, largest first."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int]] = []
        self._claims: dict[int, Claim] = {}

    def add(self, figure: int, claim: Claim) -> None:
        insort(self._keys, (-figure, claim.serial))
        self._claims[claim.serial] = claim

    def remove(self, figure: int, claim: Claim) -> None:
        del self._keys[bisect_left(self._keys, (-figure, claim.serial))]
        del self._claims[claim.serial]

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, place: int) -> tuple[int, Claim]:
        negative, serial = self._keys[place]
        return -negative, self._claims[serial]

    def __iter__(self) -> Iterator[tuple[int, Claim]]:
        return ((-negative, self._claims[serial]) for negative, serial in self._keys)


class Pool:
    """Engines of one process on one device: one context, and the headroom of those that may run at the same time.

    ``extra`` = largest context + sum of the K largest headrooms + surcharge, over the attached members; 0 without any.
    """

    def __init__(self, key: str, account: Account) -> None:
        self.key = key
        self.account = account
        self.members: dict[int, Claim] = {}
        self.headrooms = _Ranking()
        self.contexts = _Ranking()
        self.surcharge = 0
        """By how much the driver's figure for the whole process is over what was promised."""
        self.unclaimed = 0
        """By how much it is over what the members hold."""
        self.weight = NOTHING
        self.edges: dict[Claim, int] = {}
        """Members whose leaving would lower ``extra``, and by how much."""

    def attach(self, claim: Claim) -> None:
        self.headrooms.add(claim.headroom, claim)
        self.contexts.add(claim.context, claim)

    def unattach(self, claim: Claim) -> None:
        self.headrooms.remove(claim.headroom, claim)
        self.contexts.remove(claim.context, claim)
        if not len(self.headrooms):
            self.surcharge = 0

    @property
    def extra(self) -> int:
        count = len(self.headrooms)
        if not count:
            return 0
        top = sum(self.headrooms[place][0] for place in range(min(self.account.permits, count)))
        return self.contexts[0][0] + top + self.surcharge

    def weigh(self) -> Weight:
        extra = self.extra
        promised = extra - (self.surcharge if extra else 0)
        return Weight(extra, promised, self.unclaimed, self.unclaimed, 0, 0, extra - promised)

    def find_edges(self) -> dict[Claim, int]:
        """Only holders of one of the K largest headrooms or of the largest context can make a difference."""
        count = len(self.headrooms)
        if count == 1:
            return {self.headrooms[0][1]: self.extra}
        edges: dict[Claim, int] = {}
        permits = self.account.permits
        if count:
            heir = self.headrooms[permits][0] if count > permits else 0
            for place in range(min(permits, count)):
                headroom, claim = self.headrooms[place]
                if headroom > heir:
                    edges[claim] = headroom - heir
            context, claim = self.contexts[0]
            lead = context - self.contexts[1][0]
            if lead:
                edges[claim] = edges.get(claim, 0) + lead
        return edges


class PoolView:
    """A pool as it would be with some members gone and one newcomer; removing all its members costs O(members)."""

    def __init__(self, pool: Pool | None, permits: int, static: int, context: int, headroom: int) -> None:
        self._pool = pool
        self._permits = permits
        self._newcomer = static + context + headroom > 0
        self._context = context
        self._headroom = headroom
        self._gone: set[int] = set()
        self._holders: set[int] = set()
        self._from_headroom = 0
        self._from_context = 0
        self.extra = self._count()

    def remove(self, claim: Claim) -> bool:
        """Count the member as gone. Whether ``extra`` may have changed (``recount`` tells)."""
        self._gone.add(claim.serial)
        return claim.serial in self._holders

    def recount(self) -> int:
        """The bytes of context and headroom that have gone since the last count."""
        before = self.extra
        self.extra = self._count()
        return before - self.extra

    def _count(self) -> int:
        pool, gone = self._pool, self._gone
        context = self._context if self._newcomer else 0
        tops = [self._headroom] if self._newcomer else []
        self._holders = set()
        surcharge = 0
        if pool is not None:
            ranking, place = pool.headrooms, self._from_headroom
            while place < len(ranking) and ranking[place][1].serial in gone:
                place += 1
            self._from_headroom = place
            found = 0
            while place < len(ranking) and found < self._permits:
                headroom, claim = ranking[place]
                place += 1
                if claim.serial not in gone:
                    found += 1
                    tops.append(headroom)
                    self._holders.add(claim.serial)
            ranking, place = pool.contexts, self._from_context
            while place < len(ranking) and ranking[place][1].serial in gone:
                place += 1
            self._from_context = place
            if place < len(ranking):
                context = max(context, ranking[place][0])
                self._holders.add(ranking[place][1].serial)
                surcharge = pool.surcharge
        return context + sum(sorted(tops, reverse=True)[: self._permits]) + surcharge


@define(eq=False)
class Lien:
    """Bytes that a booked plan still waits for, and how much of them each of its victims owes."""

    claim: Claim
    account: Account
    serial: int
    unpaid: int
    owed: dict[str, int] = field(factory=dict)

    @property
    def unbacked(self) -> int:
        return self.unpaid - sum(self.owed.values())

    def pay(self, nbytes: int, payer: str | None = None) -> None:
        """Bytes came in; whoever paid owes that much less, and of the rest those who were named last."""
        self.unpaid -= nbytes
        self.account.unpaid -= nbytes
        if payer in self.owed:
            mine = min(nbytes, self.owed[payer])
            self.owed[payer] -= mine
        over = -self.unbacked
        for victim in reversed(self.owed):
            if over <= 0:
                break
            less = min(over, self.owed[victim])
            self.owed[victim] -= less
            over -= less


@define(eq=False)
class Owner:
    """All claims of one owner. ``base``: by account, parents included, what they hold without any pool's extra."""

    name: str
    claims: dict[tuple[str, str], Claim] = field(factory=dict)
    pooled: tuple[Claim, ...] = ()
    base: dict[str, int] = field(factory=dict)
    edges: dict[str, int] = field(factory=dict)
    """By account, parents included, what the pools' extra would lose with this owner; mostly empty."""
    liens: list[Lien] = field(factory=list)
    """What this owner is owed, oldest first."""
    debts: list[Lien] = field(factory=list)
    """Liens that name this owner as a victim, oldest first."""
