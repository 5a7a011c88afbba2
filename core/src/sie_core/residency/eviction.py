"""Which models to evict so that a need fits. Pure: reads the ledger, changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from sie_core.memory.ledger import Need

__all__ = ["Book", "choose"]


class Book(Protocol):
    """What the planner reads of the ledger."""

    def shortfall(self, needs: Sequence[Need], *, without: frozenset[str] = frozenset()) -> dict[str, int]: ...

    def freed_by(self, owner: str) -> dict[str, int]: ...


def choose(
    book: Book, needs: Sequence[Need], candidates: Iterable[str], *, at_least: int = 0
) -> tuple[str, ...] | None:
    """Victims from ``candidates``, taken from the front; ``()`` if the need fits as it is; ``None`` if nothing helps.

    ``at_least``: name so many victims even if the ledger says that the need fits (the device said otherwise). A first
    pass adds up what each candidate frees alone; the exact figure, with the headroom that pools share, is then asked of
    the ledger, and victims that turn out not to be needed are let off, last chosen first.
    """
    missing = book.shortfall(needs)
    if not missing and not at_least:
        return ()
    wanted = set(missing) or {need.account for need in needs}
    left = dict(missing)
    chosen: list[str] = []
    for name in candidates:
        freed = book.freed_by(name)
        if not any(freed.get(account, 0) > 0 for account in wanted):
            continue
        chosen.append(name)
        for account in left:
            left[account] -= freed.get(account, 0)
        if len(chosen) >= at_least and all(amount <= 0 for amount in left.values()):
            left = book.shortfall(needs, without=frozenset(chosen))
            if not left:
                return _trim(book, needs, chosen, at_least)
    return None


def _trim(book: Book, needs: Sequence[Need], chosen: list[str], at_least: int) -> tuple[str, ...]:
    """Let off whom the last victims made unnecessary, so that no model is evicted for nothing."""
    kept = list(chosen)
    for name in chosen[:-1]:
        if len(kept) <= max(at_least, 1):
            break
        rest = [other for other in kept if other != name]
        if not book.shortfall(needs, without=frozenset(rest)):
            kept = rest
    return tuple(kept)
