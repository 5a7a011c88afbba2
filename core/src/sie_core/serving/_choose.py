"""Which waiting items make up the next run. Pure: no clock, no await, callable from any thread.

A run costs ``start + rate x padded tokens``, padded because engines pad items to the longest of their run. Items of
similar length together waste little padding, many small runs waste starts; how many tokens one start is worth is
learnt from the runs themselves, so a CPU gets small tight runs and a GPU large ones without any setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

if TYPE_CHECKING:
    from sie_core.adapter import Prepared

__all__ = ["RunCost", "Sizing", "Slot", "choose"]

_BUCKETS = 16  # lengths are told apart this finely; keeps the search for the best grouping at some 100 steps
_MAX_PASSED = 8  # a request that was passed over this often is taken whatever its length


@define(eq=False)
class Slot:
    """One item that could run: where it belongs, and what the engine needs for it."""

    job: Any
    index: int
    prepared: Prepared
    tokens: int


@frozen
class Sizing:
    """``budget``: padded tokens no run may exceed. ``target``: padded tokens beyond which a run gains nothing.

    ``start``: what starting a run costs, in tokens.
    """

    budget: int
    target: int
    start: int


def choose(window: Sequence[Slot], sizing: Sizing) -> list[Slot]:
    """The items of ``window`` (in order of their turn) to run next.

    The first always goes, and so does every one that was passed over often; the others join by similar length, in order
    of their turn.
    """
    if len(window) < 2:
        return list(window)
    lengths = [slot.tokens for slot in window]
    longest, total = max(lengths), sum(lengths)
    padded = longest * len(window)
    if padded <= sizing.target and padded - total <= sizing.start:
        return list(window)
    shortest_wanted, longest_wanted = _group_of_first(lengths, longest, sizing)
    head = window[0]
    chosen = [head]
    _take([slot for slot in window if slot.job.passed >= _MAX_PASSED], chosen, sizing.budget)
    similar = [slot for slot in window if shortest_wanted < slot.tokens <= longest_wanted]
    _take(similar, chosen, sizing.target)
    return chosen


def _take(slots: Sequence[Slot], chosen: list[Slot], limit: int) -> None:
    """Add those of ``slots``, in order, that fit into ``limit`` padded tokens beside ``chosen``."""
    there = {id(slot) for slot in chosen}
    longest = max((slot.tokens for slot in chosen), default=0)
    for slot in slots:
        new_longest = max(longest, slot.tokens)
        if (len(chosen) + 1) * new_longest > limit or id(slot) in there:
            continue
        longest = new_longest
        chosen.append(slot)


def _group_of_first(lengths: Sequence[int], longest: int, sizing: Sizing) -> tuple[int, int]:
    """Bounds ``(above, up_to)`` of the lengths that go together with the first one in the cheapest grouping of all.

    Cheapest: the sum over groups of ``start + count x longest`` is smallest, with groups cut to the target.
    """
    width = max(1, -(-longest // _BUCKETS))
    counts: dict[int, int] = {}
    for tokens in lengths:
        bucket = -(-tokens // width)
        counts[bucket] = counts.get(bucket, 0) + 1
    buckets = sorted(counts)
    best = [0.0] + [float("inf")] * len(buckets)  # best[j]: cheapest grouping of the j shortest buckets
    cut = [0] * (len(buckets) + 1)
    for j in range(1, len(buckets) + 1):
        top, held = buckets[j - 1] * width, 0
        for i in range(j - 1, -1, -1):
            held += counts[buckets[i]]
            padded = held * top
            cost = best[i] + padded + sizing.start * max(1.0, padded / sizing.target)
            if cost < best[j]:
                best[j], cut[j] = cost, i
    mine = buckets.index(-(-lengths[0] // width)) + 1
    j = len(buckets)
    while cut[j] >= mine:
        j = cut[j]
    above = buckets[cut[j] - 1] * width if cut[j] else 0
    return above, buckets[j - 1] * width


_FORGET = 0.98  # weight of a run falls to a half in 34 runs: follows a machine that others come to share
_ENOUGH_RUNS = 8
_START_DEFAULT, _START_MIN, _START_MAX = 48, 16, 8192
_STARTS_PER_RUN = 16  # a run this many starts long spends 6% on starting; longer ones only answer later
_TARGET_MIN = 256


@define
class RunCost:
    """Learns, by least squares with forgetting, what a run costs."""

    runs: int = 0
    seconds: float = 0.0
    """How long a run takes, lately."""
    item_seconds: float = 0.0
    """How long an item takes, lately; what ``Retry-After`` is measured with."""
    _sums: list[float] = field(factory=lambda: [0.0] * 5)
    _start: int = _START_DEFAULT

    def observe(self, padded: int, items: int, seconds: float) -> None:
        """A run of ``items`` items and ``padded`` tokens took ``seconds``."""
        self.runs += 1
        weight = 0.2 if self.runs > 1 else 1.0
        self.seconds += weight * (seconds - self.seconds)
        self.item_seconds += weight * (seconds / items - self.item_seconds)
        if self.runs == 1:
            return  # the first run pays for allocations and caches that no other pays
        n, x, y, xx, xy = self._sums
        n, x, y = n * _FORGET + 1, x * _FORGET + padded, y * _FORGET + seconds
        xx, xy = xx * _FORGET + padded * padded, xy * _FORGET + padded * seconds
        self._sums = [n, x, y, xx, xy]
        spread = n * xx - x * x
        if self.runs < _ENOUGH_RUNS or spread < 0.01 * n * xx:
            return  # runs of one size tell nothing about the start
        rate = (n * xy - x * y) / spread
        if rate <= 0:
            self._start = _START_MAX
        else:
            self._start = int(min(max((y - rate * x) / n / rate, _START_MIN), _START_MAX))

    def sizing(self, budget: int, preferred: int | None = None) -> Sizing:
        """How large the next run should be, within ``budget``."""
        target = preferred or max(_TARGET_MIN, _STARTS_PER_RUN * self._start)
        return Sizing(budget=budget, target=min(budget, target), start=self._start)
