"""The book of bytes: one account for each device, one for the host; every byte stands in it before it is taken.

::

    charge(claim)      = max(promised, realised); retained, for a parked engine
    charge(pool)       = Σ max(static, realised) + largest context + the K largest headrooms
    available(account) = total - reserve - foreign - Σ charge              (a child's: no more than its parent's)
    need(load)         = static + context + headroom

A plan is booked in full when it is made. What is not there yet is its *lien*: bytes that the victims it named owe it.
Bytes that a victim frees pay the liens that named it first, then the oldest; nobody else can have them.

Pure: no I/O, no clock, no await. Not thread-safe: one thread (the event loop's) owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sie_core.errors import LedgerError
from sie_core.memory._accounts import Account
from sie_core.memory._audit import audit
from sie_core.memory._book import bytes_by_account
from sie_core.memory._reading import AccountState, ClaimState, Reading
from sie_core.memory._shortage import Need, Shortage

__all__ = ["AccountState", "ClaimState", "Ledger", "Need", "Shortage"]


class Ledger(Reading):
    """All accounts and claims. Methods raise LedgerError where the caller broke a rule, and then change nothing."""

    # --- accounts ----------------------------------------------------------------------------------

    def add_account(
        self, name: str, *, total: int, reserve: int = 0, parent: str | None = None, permits: int = 1
    ) -> None:
        """Open an account of ``total`` bytes, of which ``reserve`` are never given out.

        ``permits`` (K) engines of a pool may run at the same time. A charge is a charge on ``parent`` too.
        """
        if name in self._accounts:
            raise LedgerError(f"account {name!r} exists already")
        if total < 0 or reserve < 0 or permits < 1:
            raise LedgerError(f"account {name!r}: total and reserve must not be negative, permits at least 1")
        above = self._account(parent) if parent is not None else None
        self._accounts[name] = Account(name, total, reserve, above, permits)

    def has_account(self, name: str) -> bool:
        """Whether there is an account of that name."""
        return name in self._accounts

    def begin_transition(self, account: str) -> None:
        """A load, park or wake runs on the account (and its parent): until it ends, falls of ``used`` don't count."""
        for level in self._account(account).chain:
            level.transitions += 1

    def end_transition(self, account: str) -> None:
        """The opposite of ``begin_transition``."""
        chain = self._account(account).chain
        if any(level.transitions < 1 for level in chain):
            raise LedgerError(f"no transition runs on {account!r}")
        for level in chain:
            level.transitions -= 1

    def observe(self, account: str, used: int | None) -> None:
        """The driver's figure for bytes in use by anybody; ``None``: nobody can tell, nothing changes.

        Call ``realise`` with figures read before this one. A rise of what others hold binds at once, a fall once no
        transition runs.
        """
        level = self._account(account)
        if used is None:
            return
        level.used = used
        weight = level.weight
        # What a plan still waits for it can't have taken.
        least = max(0, used - weight.settled - max(0, weight.transit - level.unpaid))
        most = max(0, used - weight.settled - weight.transit_known)
        if least > level.foreign:
            level.foreign = least
        elif most < level.foreign and not level.transitions:
            level.foreign = most
            self._balance()

    def observe_available(self, account: str, available: int) -> None:
        """The host's way: capacity = available now + Σ realised - reserve. Falls bind at once, rises once quiet."""
        level = self._account(account)
        weight = level.weight
        level.used = max(0, level.total - available)
        transit = max(0, weight.transit - level.unpaid)
        most = min(level.nominal, available + weight.settled + transit - level.reserve)
        least = min(level.nominal, available + weight.settled + weight.transit_known - level.reserve)
        level.floating = min(level.capacity, most)
        if least > level.floating and not level.transitions:
            level.floating = least
            self._balance()

    # --- booking -----------------------------------------------------------------------------------

    def book(self, owner: str, needs: Iterable[Need], *, purpose: str = "engine", victims: Sequence[str] = ()) -> None:
        """Book ``needs`` in full, in transit. What is missing becomes the owner's lien on ``victims``, in that order.

        A parked claim of the same purpose is replaced: that is how a wake is booked.

        Raises:
            LedgerError: the victims can't cover what is missing, or the claim exists already.
        """
        needs = tuple(needs)
        victims = tuple(dict.fromkeys(victims))
        self._check_booking(owner, needs, purpose, victims)
        missing = self.shortfall(needs, without=victims, owner=owner, purpose=purpose)
        if missing:
            raise LedgerError(f"{owner!r} can't be booked: {bytes_by_account(missing)} missing on top of its victims")
        chain = {level.name: level for need in needs for level in self._account(need.account).chain}
        charged = {name: level.weight.charge for name, level in chain.items()}
        claims = [self._add_claim(owner, need, purpose) for need in needs]
        for name, level in chain.items():
            taken = level.weight.charge - charged[name] + self._cover(level)
            unpaid = min(taken, -level.loose)
            if unpaid > 0:
                claim = next(claim for claim in claims if level in claim.account.chain)
                self._add_lien(claim, level, unpaid, victims)
        self._balance()

    def grow(self, owner: str, account: str, nbytes: int, *, purpose: str = "engine") -> bool:
        """Promise ``nbytes`` more to a claim, out of what is available. ``False``: they are not to be had."""
        claim = self._claim(owner, account, purpose)
        if nbytes < 0:
            raise LedgerError("a promise can't grow by a negative number of bytes")
        if nbytes > self.available(account) or claim.retained is not None:
            return False
        claim.static += nbytes
        self._refresh(claim)
        return True

    def shrink(self, owner: str, account: str, nbytes: int, *, purpose: str = "engine") -> None:
        """Take back a part of a claim's promise: the engine needs it no more. What it holds stays charged."""
        claim = self._claim(owner, account, purpose)
        if nbytes < 0:
            raise LedgerError("a promise can't shrink by a negative number of bytes")
        if claim.retained is not None:
            raise LedgerError(f"{owner!r} is parked: its promise rests")
        claim.static -= min(nbytes, claim.static)
        self._refresh(claim)
        self._balance(owner)
        self._trim(owner)

    def realise(self, owner: str, account: str, nbytes: int | None, purpose: str = "engine") -> None:
        """Note what the claim really holds; ``None``: nobody can tell."""
        claim = self._claim(owner, account, purpose)
        if nbytes is not None and nbytes < 0:
            raise LedgerError("realised bytes can't be negative")
        claim.realised = nbytes
        self._refresh(claim)
        self._balance(owner)
        self._trim(owner)

    def realise_pool(self, account: str, pool: str, nbytes: int | None) -> None:
        """Note the driver's figure for all engines of a pool together, context and activations included.

        Without one (``None``), activations show as foreign memory for as long as they are there.
        """
        group = self._pools.get((account, pool))
        if group is None:
            return
        held = sum(claim.weight.settled + claim.weight.transit_known for claim in group.members.values())
        group.surcharge, group.unclaimed = 0, None
        self._refresh_pool(group)
        if nbytes is not None:
            charge = group.extra + sum(claim.part for claim in group.members.values())
            group.surcharge = max(0, nbytes - charge) if len(group.headrooms) else 0
            group.unclaimed = max(0, nbytes - held)
            self._refresh_pool(group)
        self._balance()
        for lien in self._liens():
            self._share_anew(lien)

    def settle(self, owner: str) -> None:
        """The load or wake is over: what the owner's claims don't hold by now counts as headroom, not as on its way."""
        for claim in self._owner(owner).claims.values():
            claim.in_transit = False
            self._refresh(claim)
            if claim.pool is not None:
                self._refresh_pool(claim.pool)

    def retain(self, owner: str, retained: Mapping[str, int], *, purpose: str = "engine") -> None:
        """The engine is parked: by account, the bytes it keeps, which is all it is charged from now on."""
        claims = [(self._claim(owner, account, purpose), nbytes) for account, nbytes in retained.items()]
        if any(nbytes < 0 for _, nbytes in claims):
            raise LedgerError("retained bytes can't be negative")
        for lien in self._owner(owner).liens:
            kept = [(claim, nbytes) for claim, nbytes in claims if lien.account in claim.account.chain]
            if kept and sum(nbytes - self._charge(claim) for claim, nbytes in kept) + lien.unpaid > 0:
                raise LedgerError(f"{owner!r} can't keep bytes on {lien.account.name!r} that it still waits for")
        for claim, nbytes in claims:
            self._strike_liens(claim)
            entitled = claim.weight.charge - claim.weight.overrun
            self._leave_pool(claim)
            claim.entitled, claim.retained, claim.in_transit = min(entitled, nbytes), nbytes, False
            self._refresh(claim)
        self._balance(owner)
        for lien in list(self._owner(owner).debts):
            if any(lien.account in claim.account.chain for claim, _ in claims):
                self._forgive(lien, owner)
        self._balance()

    def release(self, owner: str, *, purpose: str | None = None) -> dict[str, int]:
        """Strike the owner's claims (of one purpose). Returns by account the charge that went.

        Unknown owners hold nothing. A needer's lien goes with it, which is how a plan is cancelled.
        """
        record = self._owners.get(owner)
        if record is None:
            return {}
        claims = [claim for claim in record.claims.values() if purpose is None or claim.purpose == purpose]
        went: dict[str, int] = {}
        for claim in claims:
            inherited = self._waiting_beside(claim)
            self._strike_liens(claim)
            before = claim.account.weight.charge
            self._remove_claim(claim)
            went[claim.account.name] = went.get(claim.account.name, 0) + before - claim.account.weight.charge
            self._hand_over(claim, inherited)
        self._balance(owner)
        self._trim(owner)
        if not record.claims:
            for lien in list(record.debts):
                self._forgive(lien, owner)
            del self._owners[owner]
            self._balance()
        return went

    def check(self) -> None:
        """Every invariant, from scratch. Raises LedgerError naming the first that does not hold."""
        audit(self._accounts, self._owners, self._pools, self._by_serial)
