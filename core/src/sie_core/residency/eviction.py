"""Which models to evict so that a need fits. Pure: reads the ledger, changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from sie_core.memory.ledger import Need

__all__ = ["Book", "choose"]


class Book(Protocol):
    """What the planner reads of the ledger."""

    def shortfall(
        self, needs: Sequence[Need], *, without: Collection[str] = (), owner: str | None = None
    ) -> dict[str, int]: ...

    def freed_by(self, owner: str) -> Mapping[str, int]: ...


def choose(
    book: Book, needs: Sequence[Need], candidates: Iterable[str], *, at_least: int = 0, owner: str | None = None
) -> tuple[str, ...] | None:
    """Victims from ``candidates``, taken from the front; ``()`` if the need fits as it is; ``None`` if nothing helps.

    ``owner``: the needer, when it is parked and the needs replace what it holds. ``at_least``: name so many victims
    even if the ledger says that the need fits (the device said otherwise).

    A first pass adds up what each candidate frees alone; the exact figure, with the headroom that pools share, is then
    asked of the ledger, and victims that turn out not to be needed are let off.
    """
    missing = book.shortfall(needs, owner=owner)
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
            left = book.shortfall(needs, without=chosen, owner=owner)
            if not left:
                return _trim(book, needs, chosen, missing, at_least, owner)
    return None


def _trim(
    book: Book, needs: Sequence[Need], chosen: list[str], missing: dict[str, int], at_least: int, owner: str | None
) -> tuple[str, ...]:
    """Let off whom the later victims made unnecessary, so that no model is evicted for nothing."""
    freed = {name: dict(book.freed_by(name)) for name in chosen}
    spare = {account: sum(of.get(account, 0) for of in freed.values()) - short for account, short in missing.items()}
    kept = list(chosen)
    for name in chosen[:-1]:
        if len(kept) <= max(at_least, 1):
            break
        if all(freed[name].get(account, 0) <= left for account, left in spare.items()):
            kept.remove(name)
            for account in spare:
                spare[account] -= freed[name].get(account, 0)
    # Sums of what each frees alone leave out what pools share: the ledger has the last word.
    if len(kept) < len(chosen) and book.shortfall(needs, without=kept, owner=owner):
        return tuple(chosen)
    return tuple(kept)
