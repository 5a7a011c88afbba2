"""What closed engines left behind on devices: bytes that the driver still counts as used, and that no claim explains.

They are known by the model's name, so that they are not taken for other processes'. They are told only where nothing
else can have moved the device's figure while the engine was closed: no other transition, no request of a neighbour.
They are forgotten when the device has fewer unexplained bytes in use again; where others give bytes back, that may be
too early.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from sie_core.units import format_apart, format_bytes

if TYPE_CHECKING:
    from sie_core.residency.record import Record
    from sie_core.residency.roster import Roster

__all__ = ["Closing", "Leftovers"]

_WORTH_TELLING = 1 << 20
_MUCH = 0.1
"""Of what it held: less may be what drivers and allocators round."""
_log = logging.getLogger("sie.residency")


@frozen
class Closing:
    """How things stood before an engine was closed. Bytes by account."""

    at: float
    held: Mapping[str, int]
    before: Mapping[str, int]
    unexplained: Mapping[str, int]


@define
class _Account:
    base: int
    """Unexplained bytes before the first was left behind."""
    left: dict[str, int] = field(factory=dict)


class Leftovers:
    """By account and model, the bytes that closed engines did not give back."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._accounts: dict[str, _Account] = {}

    def on(self, account: str) -> dict[str, int]:
        """By model, the bytes that its closed engines left behind there."""
        known = self._accounts.get(account)
        return dict(known.left) if known is not None else {}

    def holders(self, account: str) -> str:
        """Who holds what no claim explains there, in words."""
        left = self.on(account)
        if not left:
            return "other processes"
        names = ", ".join(f"{name} ({format_bytes(nbytes)})" for name, nbytes in left.items())
        foreign = next(state.foreign for state in self._roster.ledger.accounts() if state.account == account)
        others = " and other processes" if foreign - sum(left.values()) >= _WORTH_TELLING else ""
        return f"closed engines of {names} that did not give it back{others}"

    def closing(self, record: Record) -> Closing | None:
        """Take down how things stand, before its engine is closed; ``None``: nothing can be told from it."""
        roster = self._roster
        if record.seat is None or record.seat.dead is not None:
            return None  # a dead engine's bytes went with it, at a time that nobody knows
        held: dict[str, int] = {}
        for claim in roster.ledger.claims(record.name):
            nbytes = claim.realised if claim.retained is None else claim.retained
            if nbytes and claim.account in record.devices and not self._busy(record, claim.account):
                held[claim.account] = held.get(claim.account, 0) + nbytes
        before = roster.used(held)
        unexplained = {account: used - self._explained(account) for account, used in before.items()}
        return Closing(roster.now(), held, before, unexplained)

    def closed(self, record: Record, was: Closing | None, alone: Callable[[str], bool]) -> None:
        """Compare, after the engine was closed. ``alone``: whether no other transition ran on an account."""
        if was is None:
            return
        for account, after in self._roster.used(was.before).items():
            held, freed = was.held[account], was.before[account] - after
            left = min(held, held - freed)
            if left < max(_WORTH_TELLING, _MUCH * held) or not alone(account):
                continue
            if not self._busy(record, account, since=was.at):
                self._keep(record.name, account, left, held, was.unexplained[account])

    def _keep(self, model: str, account: str, left: int, held: int, unexplained: int) -> None:
        known = self._accounts.setdefault(account, _Account(max(0, unexplained)))
        known.left[model] = known.left.get(model, 0) + left
        had, gave = format_apart(held, held - left)
        why = f"its closed engine held {had} on {account} and gave back {gave}: {format_bytes(left)} are left behind"
        _log.warning("%s: %s; if they do not come free, only a restart gives them back", model, why)
        self._roster.decide(model, "left behind", why, promised=held, freed=held - left)

    def look(self) -> None:
        """Forget what has come free after all."""
        for account, known in list(self._accounts.items()):
            used = self._roster.used([account]).get(account)
            if used is None or self._roster.moves(account):
                continue
            extra = max(0, used - self._explained(account) - known.base)
            missing = sum(known.left.values()) - extra
            for model, nbytes in sorted(known.left.items(), key=lambda one: one[1], reverse=True):
                if nbytes * (1 - _MUCH) <= missing:
                    missing -= nbytes
                    del known.left[model]
                    _log.info("%s: what its closed engine left behind on %s has come free", model, account)
            if not known.left:
                del self._accounts[account]

    def _explained(self, account: str) -> int:
        """What engines are known to hold there, or were promised where nobody can tell."""
        total = 0
        for claim in self._roster.ledger.claims():
            if claim.account != account:
                continue
            known = claim.realised if claim.retained is None else claim.retained
            if known is None:  # one in transit has nothing yet: its load has not begun
                known = claim.promised if claim.purpose == "engine" and not claim.in_transit else 0
            total += known
        return total

    def _busy(self, record: Record, account: str, since: float = float("inf")) -> bool:
        """Whether a neighbour runs requests there, or has since: what it takes for them goes up and down."""
        return any(
            other.leases or other.last_used > since
            for other in self._roster.records.values()
            if other is not record and account in other.devices
        )
