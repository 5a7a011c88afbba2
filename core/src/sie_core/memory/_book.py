"""The state of the ledger and the moves that keep its sums right. The rules for callers are in ``ledger``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from sie_core.errors import LedgerError
from sie_core.memory._accounts import Account, Claim, Lien, Owner, Pool
from sie_core.memory._pools import bonus, free_members
from sie_core.memory._shortage import Need
from sie_core.units import format_bytes


class Book:
    """Accounts, claims, pools and liens. The sums are right after every method; ``_balance`` pays the liens."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._owners: dict[str, Owner] = {}
        self._pools: dict[tuple[str, str], Pool] = {}
        self._by_serial: dict[int, Claim] = {}
        self._serial = 0

    # --- finding -----------------------------------------------------------------------------------

    def _account(self, name: str) -> Account:
        level = self._accounts.get(name)
        if level is None:
            raise LedgerError(f"there is no account {name!r} (there are: {', '.join(self._accounts) or 'none'})")
        return level

    def _owner(self, name: str) -> Owner:
        record = self._owners.get(name)
        if record is None:
            raise LedgerError(f"{name!r} holds no claim")
        return record

    def _claim(self, owner: str, account: str, purpose: str) -> Claim:
        claim = self._owner(owner).claims.get((account, purpose))
        if claim is None:
            raise LedgerError(f"{owner!r} holds no {purpose!r} claim on {account!r}")
        return claim

    def _parked_claim(self, owner: str | None, account: str, purpose: str) -> Claim | None:
        record = self._owners.get(owner) if owner is not None else None
        claim = record.claims.get((account, purpose)) if record is not None else None
        return claim if claim is not None and claim.retained is not None else None

    def _liens(self) -> Iterator[Lien]:
        return (lien for level in self._accounts.values() for lien in level.liens)

    def _sum_liens(self, owner: str, figure: Callable[[Lien], int]) -> dict[str, int]:
        record = self._owners.get(owner)
        sums: dict[str, int] = {}
        for lien in record.liens if record is not None else ():
            sums[lien.account.name] = sums.get(lien.account.name, 0) + figure(lien)
        return {name: nbytes for name, nbytes in sums.items() if nbytes}

    @staticmethod
    def _charge(claim: Claim) -> int:
        """What would go with the claim now."""
        edge = claim.pool.edges.get(claim, 0) if claim.pool is not None else 0
        return claim.part + edge

    # --- claims ------------------------------------------------------------------------------------

    def _check_booking(self, owner: str, needs: Sequence[Need], purpose: str, victims: Collection[str]) -> None:
        if owner in victims:
            raise LedgerError(f"{owner!r} can't be its own victim")
        seen = set()
        for need in needs:
            self._account(need.account)
            if need.account in seen:
                raise LedgerError(f"{owner!r}: two needs on {need.account!r} in one booking")
            seen.add(need.account)
            if min(need.static, need.context, need.headroom) < 0:
                raise LedgerError(f"{owner!r}: a need on {need.account!r} is negative")
            if self._parked_claim(owner, need.account, purpose) is not None:
                continue
            for claim in self._owners[owner].claims.values() if owner in self._owners else ():
                if claim.account.name != need.account:
                    continue
                if claim.purpose == purpose:
                    raise LedgerError(f"{owner!r} holds a {purpose!r} claim on {need.account!r} already")
                if need.pool is not None and claim.pool is not None and claim.pool.key == need.pool:
                    raise LedgerError(f"{owner!r} is a member of pool {need.pool!r} on {need.account!r} already")

    def _add_claim(self, owner: str, need: Need, purpose: str) -> Claim:
        account = self._accounts[need.account]
        parked = self._parked_claim(owner, need.account, purpose)
        held = None
        if parked is not None:
            held = parked.realised if parked.realised is not None else parked.retained
            self._remove_claim(parked)
        pool = None
        if need.pool is not None:
            pool = self._pools.setdefault((account.name, need.pool), Pool(need.pool, account))
        self._serial += 1
        claim = Claim(
            owner, account, purpose, need.static, need.context, need.headroom, pool, self._serial, realised=held
        )
        self._by_serial[claim.serial] = claim
        record = self._owners.setdefault(owner, Owner(owner))
        record.claims[account.name, purpose] = claim
        if pool is not None:
            record.pooled = (*record.pooled, claim)
            pool.members[claim.serial] = claim
            pool.attach(claim)
            self._refresh_pool(pool)
        self._refresh(claim)
        return claim

    def _remove_claim(self, claim: Claim) -> None:
        record = self._owners[claim.owner]
        del record.claims[claim.account.name, claim.purpose]
        del self._by_serial[claim.serial]
        for level in claim.account.chain:
            level.weight = level.weight.plus(claim.weight, -1)
            record.base[level.name] -= claim.part
            if not any(level in other.account.chain for other in record.claims.values()):
                del record.base[level.name]
        pool = claim.pool
        if pool is not None:
            record.pooled = tuple(other for other in record.pooled if other is not claim)
            del pool.members[claim.serial]
            if claim.attached:
                pool.unattach(claim)
            if not pool.members:
                pool.unclaimed = None
                del self._pools[claim.account.name, pool.key]
            self._refresh_pool(pool)

    def _refresh(self, claim: Claim) -> None:
        before, after = claim.weight, claim.weigh()
        claim.weight = after
        grown, claim.part = after.charge - claim.part, after.charge
        base = self._owners[claim.owner].base
        for level in claim.account.chain:
            level.weight = level.weight.plus(before, -1).plus(after)
            base[level.name] = base.get(level.name, 0) + grown

    def _refresh_pool(self, pool: Pool) -> None:
        before, after = pool.weight, pool.weigh()
        pool.weight = after
        edges = pool.find_edges()
        if edges != pool.edges:
            self._note_edges(pool, -1)
            pool.edges = edges
            self._note_edges(pool, 1)
        for level in pool.account.chain:
            level.weight = level.weight.plus(before, -1).plus(after)

    def _note_edges(self, pool: Pool, sign: int) -> None:
        for claim, nbytes in pool.edges.items():
            noted = self._owners[claim.owner].edges
            for level in pool.account.chain:
                left = noted.get(level.name, 0) + sign * nbytes
                if left:
                    noted[level.name] = left
                else:
                    noted.pop(level.name, None)

    def _leave_pool(self, claim: Claim) -> None:
        """The claim stops counting for its pool's context and headroom."""
        if claim.pool is not None and claim.attached:
            claim.pool.unattach(claim)
            self._refresh_pool(claim.pool)

    # --- liens -------------------------------------------------------------------------------------

    def _add_lien(self, claim: Claim, level: Account, unpaid: int, victims: Sequence[str]) -> None:
        lien = Lien(claim, level, unpaid)
        level.liens.append(lien)
        level.unpaid += unpaid
        self._owners[claim.owner].liens.append(lien)
        self._allocate(lien, victims)

    def _allocate(self, lien: Lien, victims: Iterable[str]) -> None:
        """Let the victims owe what nobody owes yet, each no more than it holds and does not owe already."""
        name = lien.account.name
        for victim in victims:
            record = self._owners.get(victim)
            if record is None or name not in record.base:
                continue
            if victim not in lien.owed:
                lien.owed[victim] = 0
                record.debts.append(lien)
            spare = record.base[name] - self._owed(record, lien.account)
            lien.owed[victim] += max(0, min(spare, lien.unbacked))
        for pool in self._pools.values():
            had = lien.bonus.get(pool, 0)
            lien.relied[pool] = free_members(lien, pool)
            lien.bonus[pool] = max(had, min(bonus(lien, pool), had + lien.unbacked))
            lien.take_bonus(pool, 0)

    def _cover(self, level: Account) -> int:
        """A newcomer joined pools: it pays what their members no longer free on leaving to the liens that relied on it.

        Returns the bytes that this took.
        """
        covered = 0
        for lien in level.liens:
            for pool, relied in list(lien.bonus.items()):
                loss = relied - bonus(lien, pool)
                if loss > 0:
                    lien.take_bonus(pool, loss)
                    lien.pay(loss)
                    covered += loss
        self._strike_paid(level)
        return covered

    @staticmethod
    def _owed(record: Owner, level: Account) -> int:
        return sum(lien.owed[record.name] for lien in record.debts if lien.account is level)

    def _forgive(self, lien: Lien, victim: str) -> None:
        """The victim owes nothing to this lien any more."""
        lien.owed.pop(victim, None)
        for members in lien.relied.values():
            members.discard(victim)
        record = self._owners.get(victim)
        if record is not None and lien in record.debts:
            record.debts.remove(lien)
        self._share_anew(lien)

    def _share_anew(self, lien: Lien) -> None:
        """What nobody owes any more, the other victims owe as far as they hold it."""
        self._trim_bonus(lien)
        if lien.unbacked > 0:
            self._allocate(lien, tuple(lien.owed))

    def _strike(self, lien: Lien) -> None:
        """The lien is paid, or its plan cancelled."""
        lien.account.liens.remove(lien)
        self._owners[lien.claim.owner].liens.remove(lien)
        lien.account.unpaid -= lien.unpaid
        lien.unpaid = 0
        for victim in lien.owed:
            self._owners[victim].debts.remove(lien)

    def _strike_paid(self, level: Account) -> None:
        for lien in [lien for lien in level.liens if not lien.unpaid]:
            self._strike(lien)

    def _strike_liens(self, claim: Claim) -> None:
        for lien in [lien for lien in self._owners[claim.owner].liens if lien.claim is claim]:
            self._strike(lien)

    def _waiting_beside(self, claim: Claim) -> list[tuple[Account, int, tuple[str, ...]]]:
        """By account on which a pooled claim waits for bytes: by how much it is over now, and who owes them."""
        if claim.pool is None:
            return []
        return [
            (lien.account, max(0, -lien.account.loose), tuple(lien.owed))
            for lien in self._owners[claim.owner].liens
            if lien.claim is claim
        ]

    def _hand_over(self, gone: Claim, inherited: Sequence[tuple[Account, int, tuple[str, ...]]]) -> None:
        """A claim that waited for its pool's room is gone, and another that came after it relies on that room: it waits
        for it now."""
        pool = gone.pool
        for level, over, victims in inherited:
            short = -level.loose - over
            heirs = pool.members.values() if pool is not None else ()
            heir = next((claim for claim in heirs if claim.attached and claim.in_transit), None)
            if short <= 0 or heir is None:
                continue
            known = [lien for lien in self._owners[heir.owner].liens if lien.claim is heir and lien.account is level]
            if known:
                known[0].unpaid += short
                level.unpaid += short
                self._allocate(known[0], victims)
            else:
                self._add_lien(heir, level, short, victims)

    def _trim(self, owner: str) -> None:
        """Nobody owes more than it holds: what shrank without paying (a deficit took it) is another's to owe."""
        record = self._owners.get(owner)
        for lien in reversed(record.debts) if record is not None else ():
            assert record is not None
            over = self._owed(record, lien.account) - record.base.get(lien.account.name, 0)
            if over > 0:
                lien.owed[owner] -= min(over, lien.owed[owner])
            self._share_anew(lien)

    @staticmethod
    def _trim_bonus(lien: Lien) -> None:
        for pool, relied in list(lien.bonus.items()):
            lien.take_bonus(pool, relied - bonus(lien, pool))

    def _balance(self, payer: str | None = None) -> None:
        """Pay liens from loose bytes: those that name ``payer`` first, then the oldest."""
        again = True
        while again:
            again = False
            for level in self._accounts.values():
                if level.liens and level.loose > 0:
                    self._pay(level, payer)
                    again = True

    def _pay(self, level: Account, payer: str | None) -> None:
        loose = level.loose
        mine = [lien for lien in level.liens if payer in lien.owed]
        turns = [(lien, lien.owed.get(payer or "", 0) + sum(lien.bonus.values())) for lien in mine]
        turns += [(lien, lien.unpaid) for lien in (*mine, *level.liens)]
        for lien, most in turns:
            nbytes = min(loose, most, lien.unpaid)
            if nbytes > 0:
                lien.pay(nbytes, payer)
                loose -= nbytes
        self._strike_paid(level)


def bytes_by_account(figures: Mapping[str, int]) -> str:
    """``cuda:0 1.5 GiB, host 20.0 MiB``"""
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in figures.items())
