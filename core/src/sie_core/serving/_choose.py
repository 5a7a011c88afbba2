"""Which waiting items make up the next run. Pure: no clock, no await, callable from any thread.

A run costs ``start + rate x tokens``, where an engine that pads its items to the longest of the run pays for the
padding too. Items of similar length together waste little padding, many small runs waste starts; how many tokens one
start is worth is learnt from the runs themselves: a CPU gets small tight runs and a GPU large ones, without a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

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
    """``budget``: tokens no run may exceed. ``target``: tokens beyond which a run gains nothing. Both with the padding
    that the engine adds if it ``pads``. ``start``: what starting a run costs, in tokens.
    """

    budget: int
    target: int
    start: int
    pads: bool = True

    def size(self, count: int, longest: int, total: int) -> int:
        """Tokens that a run of ``count`` items costs."""
        return count * longest if self.pads else total


def choose(window: Sequence[Slot], sizing: Sizing) -> list[Slot]:
    """The items of ``window`` (in order of their turn) to run next.

    The first always goes, and so does every one that was passed over often; the others join by similar length, in order
    of their turn.
    """
    if len(window) < 2:
        return list(window)
    lengths = [slot.tokens for slot in window]
    longest, total = max(lengths), sum(lengths)
    size = sizing.size(len(window), longest, total)
    if size <= sizing.target and size - total <= sizing.start:
        return list(window)
    chosen = [window[0]]
    _take([slot for slot in window if slot.job.passed >= _MAX_PASSED], chosen, sizing.budget, sizing)
    similar = window
    if sizing.pads:
        above, up_to = _group_of_first(lengths, longest, sizing)
        similar = [slot for slot in window if above < slot.tokens <= up_to]
    _take(similar, chosen, sizing.target, sizing)
    return chosen


def _take(slots: Sequence[Slot], chosen: list[Slot], limit: int, sizing: Sizing) -> None:
    """Add those of ``slots``, in order, that fit into ``limit`` tokens beside ``chosen``."""
    there = {id(slot) for slot in chosen}
    longest, total = max(slot.tokens for slot in chosen), sum(slot.tokens for slot in chosen)
    for slot in slots:
        new_longest, new_total = max(longest, slot.tokens), total + slot.tokens
        if id(slot) in there or sizing.size(len(chosen) + 1, new_longest, new_total) > limit:
            continue
        longest, total = new_longest, new_total
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


_FORGET = 0.99  # weight of a run falls to a half in 69 runs: follows a machine that others come to share
_FADE = 1.02  # the quickest run is forgotten at this rate
_ENOUGH_RUNS = 8
_START_DEFAULT, _START_MIN, _START_MAX = 48, 16, 8192
_STARTS_PER_RUN = 16  # a run this many starts long spends 6% on starting; longer ones only answer later
_TARGET_MIN = 512
_PROBE_EVERY = 4  # under load all runs would be of one size, and nothing be learnt: one in four is larger
_LONG_RUN_S = 0.25  # whoever comes now waits for the run under way: no run is made longer than this on purpose


@define
class RunCost:
    """Learns, by least squares with forgetting, what a run costs."""

    runs: int = 0
    quickest: float = float("inf")
    """How long a run takes at least, lately: no other thread that held the interpreter's lock makes it longer."""
    item_seconds: float = 0.0
    """How long an item takes, lately; what ``Retry-After`` is measured with."""
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _start: int = _START_DEFAULT

    def observe(self, size: int, items: int, seconds: float) -> None:
        """A run of ``items`` items and ``size`` tokens took ``seconds``."""
        self.runs += 1
        weight = 0.2 if self.runs > 1 else 1.0
        self.quickest = min(seconds, self.quickest * _FADE)
        self.item_seconds += weight * (seconds / items - self.item_seconds)
        if self.runs == 1:
            return  # the first run pays for allocations and caches that no other pays
        self._n = n = self._n * _FORGET + 1
        self._x = x = self._x * _FORGET + size
        self._y = y = self._y * _FORGET + seconds
        self._xx = xx = self._xx * _FORGET + size * size
        self._xy = xy = self._xy * _FORGET + size * seconds
        spread = n * xx - x * x
        if self.runs < _ENOUGH_RUNS or spread < 0.01 * n * xx:
            return  # runs of one size tell nothing about the start
        rate = (n * xy - x * y) / spread
        start = (y - rate * x) / n / rate if rate > 0 else _START_MAX
        self._start = int(min(max(start, _START_MIN), _START_MAX))

    def sizing(self, budget: int, *, pads: bool = True) -> Sizing:
        """How large the next run should be, within ``budget``."""
        target = _STARTS_PER_RUN * self._start
        if self.runs % _PROBE_EVERY == 0:
            target *= 2
        if self._y > 0:
            target = min(target, int(_LONG_RUN_S * self._x / self._y))
        return Sizing(budget, min(budget, max(_TARGET_MIN, target)), self._start, pads)
