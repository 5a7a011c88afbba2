"""What a plan lacks, kept up to date while victims are added to it one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from attrs import frozen

from sie_core.memory._accounts import Account, Claim, Owner, Pool
from sie_core.memory._pools import PoolView, losses, relied_on

__all__ = ["Need", "Shortage"]


@frozen
class Need:
    """Bytes that an owner needs on one account.

    ``static`` for good, ``context`` and ``headroom`` beside it; in a ``pool`` the context counts once and of the
    headrooms the K largest.
    """

    account: str
    static: int
    context: int = 0
    headroom: int = 0
    pool: str | None = None

    @property
    def promised(self) -> int:
        """All of it, as if nobody shared anything."""
        return self.static + self.context + self.headroom


class Shortage:
    """Bytes missing for ``needs`` with the owners removed so far gone. Exact, pools and liens included.

    It is a snapshot: any change of the ledger makes it stale.
    """

    def __init__(
        self,
        needs: Sequence[tuple[Need, Account, Pool | None, Claim | None]],
        owners: Mapping[str, Owner],
    ) -> None:
        self._owners = owners
        self._views: dict[Pool, PoolView] = {}
        self._gone: set[str] = set()
        missing: dict[str, int] = {}
        for need, account, pool, replaced in needs:
            nbytes = need.promised
            if need.pool is not None:
                view = PoolView(pool, account.permits, need.static, need.context, need.headroom)
                nbytes = need.static + view.extra - (pool.extra if pool is not None else 0)
                if pool is not None:
                    self._views[pool] = view
                    for lien, loss in losses(pool, need.static, need.context, need.headroom):
                        missing[lien.account.name] = missing.get(lien.account.name, -lien.account.loose) + loss
            if replaced is not None:
                nbytes -= replaced.part
            for level in account.chain:
                missing[level.name] = missing.get(level.name, -level.loose) + nbytes
        self._missing = missing
        self._stale: set[Pool] = set()
        self._reach = dict.fromkeys(missing, 0)
        """By account, the most that could still come off with the pools' contexts and headrooms."""
        for pool, view in self._views.items():
            self._add_reach(pool, view.extra)

    @property
    def missing(self) -> Mapping[str, int]:
        """For every account that the needs touch, parents included, the bytes that are missing; 0 or less: enough."""
        for pool in self._stale:
            freed = self._views[pool].recount()
            self._add_reach(pool, -freed)
            for level in pool.account.chain:
                if level.name in self._missing:
                    self._missing[level.name] -= freed
        self._stale.clear()
        return self._missing

    @property
    def met(self) -> bool:
        """Nothing is missing any more."""
        if self._stale:
            # Counting a pool anew for each of its members would cost too much: only when it could decide.
            reach = self._reach
            for name, nbytes in self._missing.items():
                if nbytes > reach[name]:
                    return False
        for nbytes in self.missing.values():  # noqa: SIM110 - half the time of all() with a generator
            if nbytes > 0:
                return False
        return True

    def remove(self, owner: str) -> bool:
        """Count ``owner`` as gone (what it owes to others' liens pays those). Returns ``met``.

        Raises:
            KeyError: nobody of that name has a claim.
        """
        record = self._owners[owner]
        missing = self._missing
        if owner not in self._gone:
            self._gone.add(owner)
            for name, nbytes in record.base.items():
                if name in missing:
                    missing[name] -= nbytes
            for lien in record.debts:
                if lien.account.name in missing and lien.claim.owner not in self._gone:
                    missing[lien.account.name] += lien.owed[owner]
            for lien in record.liens:
                if lien.account.name in missing:
                    # Nobody waits for these bytes then, and what its victims have given is not owed to it.
                    paid = sum(nbytes for victim, nbytes in lien.owed.items() if victim in self._gone)
                    missing[lien.account.name] += lien.unpaid - paid
            for claim in record.pooled:
                if claim.retained is None and not relied_on(record, claim):
                    self._leave_pool(claim)
        return self.met

    def short(self) -> dict[str, int]:
        """By account, the bytes that are still missing (> 0)."""
        return {name: nbytes for name, nbytes in self.missing.items() if nbytes > 0}

    def _leave_pool(self, claim: Claim) -> None:
        pool = claim.pool
        assert pool is not None
        view = self._views.get(pool)
        if view is None:
            view = self._views[pool] = PoolView(pool, claim.account.permits, 0, 0, 0)
            self._add_reach(pool, view.extra)
        if view.remove(claim):
            self._stale.add(pool)

    def _add_reach(self, pool: Pool, nbytes: int) -> None:
        for level in pool.account.chain:
            if level.name in self._reach:
                self._reach[level.name] += nbytes


def remove_all(shortage: Shortage, owners: Collection[str]) -> dict[str, int]:
    """What is missing once all of ``owners`` are gone."""
    for owner in owners:
        shortage.remove(owner)
    return shortage.short()
