"""The ledger's parts: accounts, claims, pools and liens, each with figures kept up to date as it changes.

Nothing here decides anything; :mod:`sie_core.memory.ledger` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
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
    entitled: int = 0
    """Of ``retained``, what was promised to it: a parked engine that grows takes what is not its own."""
    in_transit: bool = True
    weight: Weight = NOTHING
    part: int = 0
    """Bytes of this claim alone: its charge, in a pool without context and headroom, which the pool is charged."""

    @property
    def promised(self) -> int:
        return self.static + self.context + self.headroom

    @property
    def attached(self) -> bool:
        """Counts for its pool's context and headroom."""
        return self.pool is not None and self.retained is None

    def weigh(self) -> Weight:
        """The weight of the claim by itself; in a pool, without context and headroom, which the pool weighs."""
        own = self.promised if self.pool is None else self.static
        held = self.realised
        if self.retained is not None:
            # A parked engine's promise rests; what it kept is all that counts until it wakes.
            own, held = min(self.entitled, self.retained), self.retained
        known = held or 0
        overrun = max(0, known - own)
        most = max(self.promised, known)
        if self.in_transit:
            return Weight(own + overrun, own, known, 0, most, known, overrun)
        # Where nobody can tell what a settled engine holds it is taken to hold its weights, never its headroom.
        taken = known if held is not None else self.static + (self.context if self.pool is None else 0)
        return Weight(own + overrun, own, known, taken, 0, 0, overrun)


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
        self.unclaimed: int | None = None
        """By how much it is over what the members hold; ``None``: the driver does not tell."""
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

    def extra_without(self, absent: Collection[Claim]) -> int:
        """Context and headroom if these members were not there; without the surcharge."""
        present = [claim for claim in self.members.values() if claim.attached and claim not in absent]
        if not present:
            return 0
        tops = sorted((claim.headroom for claim in present), reverse=True)[: self.account.permits]
        return max(claim.context for claim in present) + sum(tops)

    def weigh(self) -> Weight:
        extra = self.extra
        promised = extra - (self.surcharge if extra else 0)
        taken = self.unclaimed
        if taken is None:
            # Whoever has settled has made the context, and no engine's figure includes it.
            contexts = (claim.context for _, claim in self.contexts if not claim.in_transit)
            taken = next(contexts, 0)
        return Weight(extra, promised, self.unclaimed or 0, taken, 0, 0, extra - promised)

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


@define(eq=False)
class Lien:
    """Bytes that a booked plan still waits for, and who owes them.

    ``owed``: by victim, out of its own bytes. ``bonus``: by pool, the context and headroom that the victims in
    ``relied`` free together when all of them have left it; no two liens of an account rely on the same member.
    """

    claim: Claim
    account: Account
    unpaid: int
    owed: dict[str, int] = field(factory=dict)
    bonus: dict[Pool, int] = field(factory=dict)
    relied: dict[Pool, set[str]] = field(factory=dict)

    @property
    def unbacked(self) -> int:
        return self.unpaid - sum(self.owed.values()) - sum(self.bonus.values())

    def pay(self, nbytes: int, payer: str | None = None) -> None:
        """Bytes came in: the payer owes that much less, then the pools, then those who were named last."""
        self.unpaid -= nbytes
        self.account.unpaid -= nbytes
        if payer in self.owed:
            self.owed[payer] -= min(nbytes, self.owed[payer])
        over = -self.unbacked
        for pool in list(self.bonus):
            over -= self.take_bonus(pool, over)
        for victim in reversed(self.owed):
            less = max(0, min(over, self.owed[victim]))
            self.owed[victim] -= less
            over -= less

    def take_bonus(self, pool: Pool, nbytes: int) -> int:
        """Rely on up to ``nbytes`` less of a pool; returns how much less that is."""
        less = max(0, min(nbytes, self.bonus[pool]))
        self.bonus[pool] -= less
        if not self.bonus[pool]:
            del self.bonus[pool], self.relied[pool]
        return less


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
