"""What the ledger answers: nothing here changes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attrs import frozen

from sie_core.memory._book import Book
from sie_core.memory._pools import relied_on
from sie_core.memory._shortage import Need, Shortage, remove_all


@frozen
class AccountState:
    """One account, for status. Bytes; children's claims are included. ``charged + liens = Σ charge``, so that
    ``available = capacity - foreign - charged - liens``, and no more than what the parent has."""

    account: str
    capacity: int
    used: int | None
    promised: int
    realised: int
    unrealised: int
    foreign: int
    liens: int
    available: int
    charged: int = 0
    deficit: int = 0
    total: int = 0
    reserve: int = 0
    parent: str | None = None


@frozen
class ClaimState:
    """One claim. Bytes; ``charge + lien`` is what would go with it now."""

    owner: str
    account: str
    purpose: str
    promised: int
    realised: int | None
    retained: int | None
    charge: int
    lien: int
    in_transit: bool
    pool: str | None = None


class Reading(Book):
    """The questions."""

    def available(self, account: str) -> int:
        """Bytes that can still be booked; negative while liens are unpaid or the account is over."""
        return min(level.loose - level.unpaid for level in self._account(account).chain)

    def deficit(self, account: str) -> int:
        """By how much charges and foreign memory are over the capacity, beyond what victims owe; 0 if they are not."""
        level = self._account(account)
        return max(0, -level.loose) + sum(lien.unbacked for lien in level.liens)

    def shortage(self, needs: Iterable[Need], *, owner: str | None = None, purpose: str = "engine") -> Shortage:
        """What is missing for ``needs``, to be narrowed down victim by victim: ``shortage(needs).remove(name)``.

        ``owner``: the needer, when it has parked claims (of ``purpose``) that the needs replace, as in a wake.
        """
        rows = []
        for need in needs:
            account = self._account(need.account)
            pool = self._pools.get((account.name, need.pool)) if need.pool is not None else None
            rows.append((need, account, pool, self._parked_claim(owner, account.name, purpose)))
        return Shortage(rows, self._owners)

    def shortfall(
        self,
        needs: Iterable[Need],
        *,
        without: Collection[str] = (),
        owner: str | None = None,
        purpose: str = "engine",
    ) -> dict[str, int]:
        """By account, parents included, the bytes missing (> 0) once those in ``without`` are gone. Empty: it fits."""
        shortage = self.shortage(needs, owner=owner, purpose=purpose)
        return remove_all(shortage, [name for name in without if name in self._owners])

    def freed_by(self, owner: str) -> dict[str, int]:
        """By account, parents included, what releasing ``owner`` alone would give to whoever plans next. O(1).

        Bytes it owes to liens, or is owed itself, are not counted. Of several members of a pool more may come free
        than the sum of these. Read it, don't change or keep it.
        """
        record = self._owners.get(owner)
        if record is None:
            return {}
        if not (record.edges or record.debts or record.liens):
            return record.base
        edges = {} if any(relied_on(record, claim) for claim in record.pooled) else record.edges
        freed = {name: nbytes + edges.get(name, 0) for name, nbytes in record.base.items()}
        for lien in record.debts:
            if lien.account.name in freed:
                freed[lien.account.name] -= lien.owed[owner]
        for lien in record.liens:
            freed[lien.account.name] -= lien.unpaid
        return freed

    def touches(self, needs: Iterable[Need], account: str) -> bool:
        """Whether ``needs`` take bytes of the account, or of one whose parent it is."""
        return any(level.name == account for need in needs for level in self._account(need.account).chain)

    def impossible(self, needs: Iterable[Need]) -> tuple[str, int, int] | None:
        """(account, bytes needed, bytes of the empty account) where ``needs`` would not fit if nobody held anything."""
        sums: dict[str, int] = {}
        for need in needs:
            for level in self._account(need.account).chain:
                sums[level.name] = sums.get(level.name, 0) + need.promised
        for name, nbytes in sums.items():
            if nbytes > self._accounts[name].nominal:
                return name, nbytes, self._accounts[name].nominal
        return None

    def lien(self, owner: str) -> dict[str, int]:
        """By account, the bytes that the owner's plan still waits for. Empty: it may go ahead."""
        return self._sum_liens(owner, lambda lien: lien.unpaid)

    def unbacked(self, owner: str) -> dict[str, int]:
        """By account, the part of its lien that no victim owes any more."""
        return self._sum_liens(owner, lambda lien: lien.unbacked)

    def owes(self, owner: str) -> dict[str, int]:
        """By account, what the owner owes to others' liens."""
        record = self._owners.get(owner)
        owed: dict[str, int] = {}
        for lien in record.debts if record is not None else ():
            owed[lien.account.name] = owed.get(lien.account.name, 0) + lien.owed[owner]
        return {name: nbytes for name, nbytes in owed.items() if nbytes}

    def holding(self, owner: str) -> dict[str, int]:
        """By account, the charge that would go if the owner were released now."""
        record = self._owners.get(owner)
        held: dict[str, int] = {}
        for claim in record.claims.values() if record is not None else ():
            held[claim.account.name] = held.get(claim.account.name, 0) + self._charge(claim)
        return held

    def overrun(self, owner: str) -> int:
        """Bytes that the owner is known to hold beyond what it was promised, on all accounts together."""
        record = self._owners.get(owner)
        return sum(claim.weight.overrun for claim in record.claims.values()) if record is not None else 0

    def relies_on_unpaid(self, owner: str) -> bool:
        """Whether the owner counts on room of a pool that another member has booked and still waits for."""
        record = self._owners.get(owner)
        for claim in record.pooled if record is not None else ():
            pool = claim.pool
            if pool is None or not claim.attached:
                continue
            unpaid = {
                lien.claim
                for level in claim.account.chain
                for lien in level.liens
                if lien.claim.pool is pool and lien.claim is not claim
            }
            if not unpaid:
                continue
            alone = pool.extra_without(unpaid) - pool.extra_without({*unpaid, claim})
            if alone > pool.extra_without(()) - pool.extra_without({claim}):
                return True
        return False

    def claims(self, owner: str | None = None) -> list[ClaimState]:
        """Every claim, or those of one owner, in order of booking."""
        if owner is None:
            chosen = list(self._by_serial.values())
        else:
            chosen = [*self._owners[owner].claims.values()] if owner in self._owners else []
        liens = {lien.claim: lien.unpaid for lien in self._liens() if lien.account is lien.claim.account}
        return [
            ClaimState(
                owner=claim.owner,
                account=claim.account.name,
                purpose=claim.purpose,
                promised=claim.promised,
                realised=claim.realised,
                retained=claim.retained,
                charge=self._charge(claim) - liens.get(claim, 0),
                lien=liens.get(claim, 0),
                in_transit=claim.in_transit,
                pool=claim.pool.key if claim.pool is not None else None,
            )
            for claim in chosen
        ]

    def accounts(self) -> list[AccountState]:
        """Every account, in order of opening."""
        return [
            AccountState(
                account=level.name,
                capacity=level.capacity,
                used=level.used,
                promised=level.weight.promised,
                realised=level.weight.realised,
                unrealised=max(0, level.weight.charge - level.weight.realised),
                foreign=level.foreign,
                liens=level.unpaid,
                available=self.available(level.name),
                charged=level.weight.charge - level.unpaid,
                deficit=self.deficit(level.name),
                total=level.total,
                reserve=level.reserve,
                parent=level.parent.name if level.parent is not None else None,
            )
            for level in self._accounts.values()
        ]
