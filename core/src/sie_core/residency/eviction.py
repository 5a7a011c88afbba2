"""Which models to evict so that a need fits. Pure: reads the ledger, changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from attrs import frozen

from sie_core.memory.ledger import Need

__all__ = ["Book", "Cost", "choose", "least"]

_NEARLY = 1.25
"""Of the fewest bytes that have to go: so much more is no reason to take what was used last."""
_T = TypeVar("_T")


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
    asked of the ledger, and victims that turn out not to be needed are let off. When nobody is left to add, the ledger
    is asked too: the last engines of a pool free more together than each alone.
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
    if chosen and len(chosen) >= at_least and not book.shortfall(needs, without=chosen, owner=owner):
        return tuple(chosen)
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


@frozen
class Cost:
    """What a placement costs others: how many of its victims are at work, the bytes that go, their last use (seconds).

    ``room``: bytes available on its devices, which decides where all else is equal.
    """

    busy: int
    evicted: int
    last_used: float
    room: int


def least(options: Sequence[tuple[Cost, _T]]) -> _T:
    """The option that costs others least. ``options`` must not be empty.

    Fewest victims at work, whatever the bytes: a request that runs may take longer than the new one can wait. Of those,
    the fewest bytes, and among nearly equal ones the victims that were used longest ago.
    """
    busy = min(cost.busy for cost, _ in options)
    most = _NEARLY * min(cost.evicted for cost, _ in options if cost.busy == busy)
    able = [(cost, option) for cost, option in options if cost.busy == busy and cost.evicted <= most]
    return min(able, key=lambda one: (one[0].last_used, -one[0].room))[1]
