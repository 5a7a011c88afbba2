"""The host pool of a HiCache engine: how large, what to book for it, and the flags that make the engine take just that.

The engine's own rule, given neither a ratio nor a size, is a share of the host: ``(available - 10 GiB) / ranks``, of it
0.8, of that no more than the default ratio times the device's pools. Each rank measures for itself, though, while its
peers pin memory: together they refuse pools that fit and accept pools that do not. So it is decided here, from one
snapshot, and handed over in the way that the installed version honours:

========================  ==========================================================================================
one rank                  ``--hicache-size`` in whole GB (1e9), with 10 GiB left beside it; below 1 GB a ratio
several ranks, 0.5.21 on  ``--hicache-host-memory-fraction``, which they divide before any of them pins
0.5.21, any ranks         the same: it counts the page cache as used, and so takes less once it has read its weights
several ranks, 0.5.20     ``--hicache-size``; it divides by the ranks what the others left, so no more than
                          ``(available - 10 GiB) / (2 × ranks - 1)`` each
before 0.5.20             no rank divides: ``(available - 10 GiB) / ranks`` each. Refused where the pool would not
                          exceed the device's. Every pool of a hybrid model gets the whole size: so a ratio
========================  ==========================================================================================

Where the pool lies in huge pages that were set aside for it, it takes nothing of what is available, which the engine
measures all the same. A draft model's pool is counted by the share of 0.5.21 and later, and by nothing else.

What a profile asks for itself is honoured or refused, never made smaller. Sizes in bytes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from decimal import ROUND_DOWN, Decimal

from attrs import evolve, field, frozen
from sie_core import NeverFits, ResourceExhausted, format_bytes

from sie_adapters_sglang._errors import BadOptions

__all__ = ["HOST_RESERVE", "HostPool", "PoolTerms", "PoolWish", "held_bytes", "size_pool", "told_bytes"]

_log = logging.getLogger("sie.sglang")
GB = 10**9
HOST_RESERVE = 10 * 1024**3
_FRACTION = 0.8
_SLACK = 0.05
"""Of the budget, for page rounding and staging buffers that the engine does not count."""
_DIGITS = Decimal("0.0001")
_TOLD = re.compile(r"\bAllocating\b.*?(\d+\.\d\d) GB host memory")
_NO_HUGE_PAGES = "falling back to plain mmap"
_ROUNDED = 5_000_000
"""What two decimals of a GB may hide."""
_RATIOS = {"cache": 2.0, "buffer_only": 1.2}


@frozen(kw_only=True)
class PoolWish:
    """What the profile says, at most one of them: GB a rank, a multiple of the device's pools, a share of the host."""

    size_gb: int | None = None
    ratio: float | None = None
    fraction: float | None = None
    mode: str = "cache"


@frozen(kw_only=True)
class PoolTerms:
    """What the pool has to do with.

    ``available``: what the host still gives to anybody, one snapshot for all ranks; ``total``: all it has.
    ``device_pools``: bytes of each pool of one rank that gets a mirror (a hybrid model has two or more).
    ``page_bytes``: of one page of KV cache. ``share``: what the ledger gives this engine at most, all ranks together.
    ``reads``: bytes by which ``available`` may fall until the engine looks. ``drafts``: a draft model has pools too.
    ``huge``: free bytes of the huge pages that the pool is made of; 0: it is made of others.
    """

    name: str
    version: tuple[int, ...]
    ranks: int
    available: int
    total: int
    device_pools: tuple[int, ...]
    page_bytes: int = 0
    share: int | None = None
    reads: int = 0
    drafts: bool = False
    huge: int = 0

    @property
    def room(self) -> int:
        """Bytes for all ranks together once the engine's reserve is left alone."""
        return self.available - HOST_RESERVE

    @property
    def device_bytes(self) -> int:
        return sum(self.device_pools)

    @property
    def times(self) -> int:
        """How often a size is taken: before 0.5.20 every pool of a hybrid model gets all of it."""
        return len(self.device_pools) if self.version < (0, 5, 20) else 1

    @property
    def pages(self) -> int:
        """One page more for every pool."""
        return len(self.device_pools) * self.page_bytes

    @property
    def each(self) -> int:
        """The most that one rank may take so that every rank's own check passes."""
        room = self.room - self.reads
        divides = self.version >= (0, 5, 20)
        pinned = self.ranks - 1 if divides and not self.huge else 0  # of its peers, before the last one divides
        return room // (self.ranks + pinned)

    @property
    def ever(self) -> int:
        """Bytes for all ranks together on a host that nobody else uses."""
        return self.total - HOST_RESERVE


@frozen
class HostPool:
    """A pool that fits. ``rank_bytes``: what one rank takes, pages included; ``flags`` for the command line."""

    ranks: int
    rank_bytes: int
    flags: tuple[str, ...]
    figures: Mapping[str, int | float] = field(factory=dict)
    huge: bool = False
    """It lies in huge pages, which nobody else can have."""

    @property
    def nbytes(self) -> int:
        """All ranks together."""
        return self.ranks * self.rank_bytes

    @property
    def booked_bytes(self) -> int:
        """What to book on the host."""
        return 0 if self.huge else self.nbytes


def held_bytes(pool: HostPool, log: str) -> int:
    """What the ranks hold on the host: what was booked, or what the log says where that is more or less."""
    booked = pool.booked_bytes if _NO_HUGE_PAGES not in log else pool.nbytes
    told, hidden = told_bytes(log), pool.ranks * _ROUNDED
    if told is None or not booked:
        return booked
    return min(max(booked, told - hidden), told + hidden)


def told_bytes(log: str) -> int | None:
    """What the engine's log says that its ranks take for their pools, together; ``None``: it says nothing.

    Nothing else tells: ``/server_info`` has no host bytes. In GB with two decimals.
    """
    told = [float(match[1]) for match in _TOLD.finditer(log)]
    return round(sum(told) * GB) if told else None


def size_pool(wish: PoolWish, terms: PoolTerms) -> HostPool | None:
    """Size the pool. ``None``: nothing was asked for, and this host can never hold one.

    Raises:
        BadOptions: the profile asks for what this version does not take, or what can't be booked.
        NeverFits: it asks for more than the host has.
        ResourceExhausted: there is no room for it now.
    """
    asked = [key for key in ("size_gb", "ratio", "fraction") if getattr(wish, key) is not None]
    if len(asked) > 1:
        raise BadOptions(f"model {terms.name!r}: give one of {', '.join(asked)} for its HiCache pool")
    for key in asked:
        if getattr(wish, key) <= 0:  # to the engine a size of 0 means twice the device's pools
            raise BadOptions(f"model {terms.name!r}: HiCache {key} must be more than 0, not {getattr(wish, key)}")
    if terms.drafts:
        _check_drafts(terms, wish)
    if wish.size_gb is not None:
        return _checked(terms, _with_size(terms, wish.size_gb))
    if wish.ratio is not None:
        return _checked(terms, _with_ratio(terms, wish.ratio))
    if terms.version < (0, 5, 21) and wish.fraction is not None:
        raise BadOptions(
            f"model {terms.name!r}: SGLang {_dotted(terms)} does not support hicache_fraction (0.5.21 does): "
            "give a size or a ratio"
        )
    if wish.fraction is not None:
        return _as_fraction(terms, wish, Decimal(str(wish.fraction)))
    return _of_our_choice(terms, wish)


def _check_drafts(terms: PoolTerms, wish: PoolWish) -> None:
    """Its pools come on top of a size and of a ratio, and nothing tells how large they are. Raises BadOptions."""
    if terms.version < (0, 5, 21):
        raise BadOptions(
            f"model {terms.name!r}: the HiCache pools of a draft model can't be booked with SGLang {_dotted(terms)}: "
            "install 0.5.21 or later, or leave out --speculative-algorithm or HiCache"
        )
    if wish.size_gb is not None or wish.ratio is not None:
        raise BadOptions(
            f"model {terms.name!r}: the pools of a draft model come on top of a HiCache size or ratio and can't be "
            "booked: give hicache_fraction, or nothing"
        )


def _dotted(terms: PoolTerms) -> str:
    return ".".join(map(str, terms.version))


# --- what the profile asks for ---------------------------------------------------------------------


def _with_size(terms: PoolTerms, size_gb: int) -> HostPool:
    nbytes = terms.times * size_gb * GB + terms.pages
    return HostPool(terms.ranks, nbytes, ("--hicache-size", str(size_gb)), {"size_gb": size_gb})


def _with_ratio(terms: PoolTerms, ratio: float) -> HostPool:
    nbytes = math.ceil(terms.device_bytes * ratio) + terms.pages
    return HostPool(terms.ranks, nbytes, ("--hicache-ratio", str(ratio)), {"ratio": ratio})


def _checked(terms: PoolTerms, pool: HostPool) -> HostPool:
    """As asked for, or refused."""
    booked = pool.nbytes
    what = f"{' '.join(pool.flags)} of model {terms.name!r} is {format_bytes(booked)} of host memory"
    if terms.ranks > 1:
        what += f" ({terms.ranks} ranks, {format_bytes(pool.rank_bytes)} each)"
    if pool.nbytes + HOST_RESERVE > terms.total:
        raise NeverFits(
            f"{what}, and {format_bytes(HOST_RESERVE)} have to be left of {format_bytes(terms.total)} in all",
            account="host",
            needed=booked + HOST_RESERVE,
            capacity=terms.total,
        )
    pool = _in_huge_pages(terms, pool)
    if terms.share is not None and pool.booked_bytes > terms.share:
        raise ResourceExhausted(f"{what}, and the ledger has {format_bytes(terms.share)} for it", retry_after_s=10.0)
    if pool.rank_bytes > terms.each:
        most = max(0, terms.each)
        raise ResourceExhausted(
            f"{what}: of {format_bytes(terms.available)} available, {format_bytes(HOST_RESERVE)} have to be left, so "
            f"each rank can have {format_bytes(most)}",
            retry_after_s=10.0,
        )
    _check_exceeds(terms, pool)
    return pool


def _in_huge_pages(terms: PoolTerms, pool: HostPool) -> HostPool:
    """The pool in huge pages where enough of them are free: else the engine takes others."""
    return evolve(pool, huge=pool.nbytes <= terms.huge)


def _check_exceeds(terms: PoolTerms, pool: HostPool) -> None:
    """Before 0.5.20 the engine stops at a pool that has no more tokens than the device's."""
    if terms.version >= (0, 5, 20):
        return
    size = pool.figures.get("size_gb")
    small = [one for one in terms.device_pools if size is not None and size * GB + terms.page_bytes <= one]
    if small or pool.figures.get("ratio", 1.0) < 1.0:
        raise ResourceExhausted(
            f"{' '.join(pool.flags)} of model {terms.name!r} would not exceed the device's pool "
            f"({format_bytes(max(terms.device_pools))}), which SGLang {_dotted(terms)} requires: give it more host "
            "memory or fewer tokens (max_total_tokens)",
            retry_after_s=10.0,
        )


# --- what is decided here --------------------------------------------------------------------------


def _wanted(terms: PoolTerms, wish: PoolWish) -> int:
    """What one rank would take by itself, pages not counted."""
    ratio = _RATIOS.get(wish.mode, _RATIOS["cache"])
    budget = int(terms.room // terms.ranks * _FRACTION)
    return min(int(terms.device_bytes * ratio), int(budget * (1 - _SLACK)))


def _given(terms: PoolTerms) -> int:
    """What one rank may take of what the ledger gives."""
    return terms.room if terms.share is None or terms.huge else terms.share // terms.ranks


def _of_our_choice(terms: PoolTerms, wish: PoolWish) -> HostPool | None:
    """No more than the engine would choose if it could see what all its ranks take."""
    try:
        if terms.drafts or terms.version == (0, 5, 21) or (terms.version > (0, 5, 21) and terms.ranks > 1):
            return _share_of_ours(terms, wish)
        return _size_of_ours(terms, wish)
    except ResourceExhausted as error:
        # Nobody's leaving would help where the whole host is too small: then there is no pool, and no refusal.
        least = terms.device_bytes if terms.version < (0, 5, 20) else 0
        if terms.share != 0 and terms.ever // terms.ranks > least + terms.pages:
            raise
        _log.warning("model %r runs without a HiCache pool: %s", terms.name, error.message)
        return None


def _size_of_ours(terms: PoolTerms, wish: PoolWish) -> HostPool:
    """Whole GB a rank, or a ratio: below 1 GB, and where every pool would get the whole size."""
    most = min(_wanted(terms, wish), terms.each - terms.pages, _given(terms) - terms.pages)
    if most >= GB and terms.times == 1:
        return _checked(terms, _with_size(terms, most // GB))
    ratio = Decimal(max(0, most)) / Decimal(max(1, terms.device_bytes))
    ratio = ratio.quantize(_DIGITS, rounding=ROUND_DOWN)
    if ratio <= 0:
        raise _nothing_left(terms, max(0, most), "more than that")
    return _checked(terms, _with_ratio(terms, float(ratio)))


def _share_of_ours(terms: PoolTerms, wish: PoolWish) -> HostPool:
    """The engine divides by the ranks itself, before any of them pins; the budget is what is booked."""
    wanted = math.ceil(_wanted(terms, wish) / (1 - _SLACK)) + terms.pages
    budget = min(int(terms.room // terms.ranks * _FRACTION), wanted, _given(terms))
    fraction = Decimal(terms.ranks * budget) / Decimal(max(1, terms.room))
    return _as_fraction(terms, wish, fraction.quantize(_DIGITS, rounding=ROUND_DOWN))


def _as_fraction(terms: PoolTerms, wish: PoolWish, fraction: Decimal) -> HostPool:
    if fraction > 1:
        raise BadOptions(f"model {terms.name!r}: a HiCache fraction is at most 1, not {fraction}")
    rank_bytes = int(terms.room // terms.ranks * fraction) if terms.room > 0 and fraction > 0 else 0
    left = int((terms.room - terms.reads) // terms.ranks * fraction)
    left = max(0, min(rank_bytes, left))
    # The engine leaves its pages out when it divides, and has to find them in what it left over.
    most = int(terms.device_bytes * _RATIOS.get(wish.mode, _RATIOS["cache"]))
    least = min(most, int(left * (1 - _SLACK))) + terms.pages
    if left <= terms.pages or left < least:
        raise _nothing_left(terms, left, f"{format_bytes(least)}, one page a pool included")
    flags = ("--hicache-host-memory-fraction", str(fraction))
    pool = _in_huge_pages(terms, HostPool(terms.ranks, rank_bytes, flags, {"fraction": float(fraction)}))
    if terms.share is not None and pool.booked_bytes > terms.share:
        raise _nothing_left(terms, terms.share // terms.ranks, format_bytes(rank_bytes))
    return pool


def _nothing_left(terms: PoolTerms, left: int, least: str) -> ResourceExhausted:
    given = "" if terms.share is None else f", of which the ledger gives {format_bytes(terms.share)}"
    return ResourceExhausted(
        f"no host memory is left for the HiCache pool of model {terms.name!r}: {format_bytes(terms.available)} are "
        f"available{given}, {format_bytes(HOST_RESERVE)} have to be left, and each of {terms.ranks} rank(s) "
        f"would get {format_bytes(left)} and not {least}",
        retry_after_s=10.0,
    )
