"""What leaving a pool frees, and who relies on that.

A member that leaves frees its own bytes, and of the pool's context and headroom only what no other member needs.
Several that leave together free more than the sum of what each would alone. A lien therefore relies on its victims
*together* (its bonus), as if everybody else stayed; that holds whatever other plans come to, because what two groups
free together is never less than the sum of what each frees. Only somebody who joins the pool can lower it, and has to
make up for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sie_core.memory._accounts import Claim, Lien, Owner, Pool


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


def bonus(lien: Lien, pool: Pool) -> int:
    """Bytes of context and headroom that the lien's victims free together by leaving the pool."""
    return _freed(lien.relied.get(pool, ()), PoolView(pool, pool.account.permits, 0, 0, 0), pool)


def free_members(lien: Lien, pool: Pool) -> set[str]:
    """The lien's victims in the pool on whose leaving no other lien of the account relies."""
    if lien.account not in pool.account.chain:
        return set()
    taken = {name for other in lien.account.liens if other is not lien for name in other.relied.get(pool, ())}
    return {claim.owner for claim in pool.members.values() if claim.attached} & lien.owed.keys() - taken


def losses(pool: Pool, static: int, context: int, headroom: int) -> Iterator[tuple[Lien, int]]:
    """What each lien would be short of if a newcomer with these figures joined the pool."""
    for level in pool.account.chain:
        for lien in level.liens:
            relied = lien.bonus.get(pool, 0)
            if relied:
                view = PoolView(pool, pool.account.permits, static, context, headroom)
                loss = relied - _freed(lien.relied[pool], view, pool)
                if loss > 0:
                    yield lien, loss


def relied_on(owner: Owner, claim: Claim) -> bool:
    """Whether a lien counts on this member's leaving its pool, so that no other plan can."""
    pool = claim.pool
    return pool is not None and any(owner.name in lien.relied.get(pool, ()) for lien in owner.debts)


def _freed(members: Collection[str], view: PoolView, pool: Pool) -> int:
    for claim in pool.members.values():
        if claim.attached and claim.owner in members:
            view.remove(claim)
    return view.recount()
