"""The ledger's invariants, worked out from the claims alone and compared with the sums kept along the way."""

from __future__ import annotations

from collections.abc import Mapping

from sie_core.errors import LedgerError
from sie_core.memory._accounts import NOTHING, Account, Claim, Owner, Pool
from sie_core.memory._pools import bonus


def audit(
    accounts: Mapping[str, Account],
    owners: Mapping[str, Owner],
    pools: Mapping[tuple[str, str], Pool],
    claims: Mapping[int, Claim],
) -> None:
    """Raise LedgerError with the first broken invariant."""
    _audit_owners(owners, claims)
    _audit_pools(pools, claims)
    for level in accounts.values():
        _audit_sums(level, pools, claims)
        _audit_liens(level, owners)
        _audit_capacity(level)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise LedgerError(f"broken invariant: {rule}")


def _audit_owners(owners: Mapping[str, Owner], claims: Mapping[int, Claim]) -> None:
    listed = {claim.serial for owner in owners.values() for claim in owner.claims.values()}
    _require(listed == set(claims), "every claim has an owner, and every owner's claims are in the book")
    for owner in owners.values():
        _require(bool(owner.claims), f"owner {owner.name!r} without a claim")
        base: dict[str, int] = {}
        for claim in owner.claims.values():
            _require(claim.owner == owner.name, f"a claim of {claim.owner!r} is listed under {owner.name!r}")
            for level in claim.account.chain:
                base[level.name] = base.get(level.name, 0) + claim.weigh().charge
        _require(base == owner.base, f"what {owner.name!r} holds is {base}, noted as {owner.base}")
        pooled = {claim.serial for claim in owner.claims.values() if claim.pool is not None}
        _require(pooled == {claim.serial for claim in owner.pooled}, f"pooled claims of {owner.name!r}")


def _audit_pools(pools: Mapping[tuple[str, str], Pool], claims: Mapping[int, Claim]) -> None:
    for (account, key), pool in pools.items():
        members = [claim for claim in claims.values() if claim.pool is pool]
        _require(bool(members), f"pool {key!r} on {account!r} without members")
        _require({claim.serial for claim in members} == set(pool.members), f"members of pool {key!r} on {account!r}")
        attached = [claim for claim in members if claim.attached]
        _require(len(attached) == len(pool.headrooms) == len(pool.contexts), f"ranking of pool {key!r} on {account!r}")
        tops = sorted((claim.headroom for claim in attached), reverse=True)[: pool.account.permits]
        extra = max(claim.context for claim in attached) + sum(tops) + pool.surcharge if attached else 0
        _require(pool.weight == pool.weigh() and pool.weight.charge == extra, f"extra of pool {key!r} on {account!r}")


def _audit_sums(level: Account, pools: Mapping[tuple[str, str], Pool], claims: Mapping[int, Claim]) -> None:
    total = NOTHING
    for claim in claims.values():
        if level in claim.account.chain:
            total = total.plus(claim.weigh())
    for pool in pools.values():
        if level in pool.account.chain:
            total = total.plus(pool.weigh())
    _require(total == level.weight, f"the claims on {level.name!r} come to {total}, noted as {level.weight}")


def _audit_liens(level: Account, owners: Mapping[str, Owner]) -> None:
    _require(level.unpaid == sum(lien.unpaid for lien in level.liens), f"sum of the liens on {level.name!r}")
    owed: dict[str, int] = {}
    for lien in level.liens:
        needer = lien.claim.owner
        _require(needer in owners and lien.claim in owners[needer].claims.values(), f"lien of {needer!r} without claim")
        _require(lien.unpaid > 0 and lien.unbacked >= 0, f"lien of {needer!r} on {level.name!r} is over-backed")
        _require(min(lien.owed.values(), default=0) >= 0, f"a victim of {needer!r} owes a negative number of bytes")
        for victim, nbytes in lien.owed.items():
            _require(victim in owners and lien in owners[victim].debts, f"{victim!r} does not know that it owes")
            owed[victim] = owed.get(victim, 0) + nbytes
        for pool, nbytes in lien.bonus.items():
            _require(0 < nbytes <= bonus(lien, pool), f"lien of {needer!r} relies on more than pool {pool.key!r} frees")
    for victim, nbytes in owed.items():
        held = owners[victim].base.get(level.name, 0)
        _require(nbytes <= held, f"{victim!r} owes {nbytes} on {level.name!r} and holds {held}")
    relied = [(pool, name) for lien in level.liens for pool, names in lien.relied.items() for name in names]
    _require(len(relied) == len(set(relied)), f"two liens on {level.name!r} rely on one member of a pool")
    _require(level.loose <= 0 or not level.liens, f"loose bytes on {level.name!r} while a lien is unpaid")


def _audit_capacity(level: Account) -> None:
    """What was promised, less what is still to come, fits the empty account; overruns and foreign bytes are apart."""
    promised = level.weight.charge - level.weight.overrun - level.unpaid
    _require(promised <= level.nominal, f"{level.name!r} promised {promised} of {level.nominal} bytes")
    over = level.foreign + level.weight.overrun + level.nominal - level.capacity
    _require(-level.loose <= over, f"{level.name!r} is over by {-level.loose} bytes with nobody else to blame")
