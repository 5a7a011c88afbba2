"""The host pools that are chosen, built by the installed release's own code."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from sie_adapters_sglang._flags import version_key
from sie_adapters_sglang._hicache import HOST_RESERVE, HostPool, PoolTerms, PoolWish, size_pool
from sie_core import ResourceExhausted

GB, GIB = 10**9, 2**30
TOKEN, PAGE = 128 * 1024, 64


def chosen(version: tuple[int, ...]) -> list[tuple[PoolTerms, PoolWish, HostPool]]:
    """Pools of one to eight ranks, small and large, on hosts with little and with much memory; and asked for."""
    found = []
    wishes = (PoolWish(), PoolWish(size_gb=5), PoolWish(ratio=1.5))
    for ranks in (1, 2, 4, 8):
        for available in (HOST_RESERVE + GB, 56 * GIB, 200 * GIB, 860 * GB):
            for tokens in (2_000, 40_000, 400_000):
                for wish in wishes:
                    terms = PoolTerms(
                        name="chat",
                        version=version,
                        ranks=ranks,
                        available=available,
                        total=8192 * GIB,
                        device_pools=(tokens * TOKEN,),
                        page_bytes=PAGE * TOKEN,
                        reads=2 * GB if version == (0, 5, 21) and available > 56 * GIB else 0,
                    )
                    try:
                        pool = size_pool(wish, terms)
                    except ResourceExhausted:
                        continue
                    assert pool is not None
                    found.append((terms, wish, pool))
    return found


def played(real: Any, helpers: Any, cases: list[dict[str, Any]]) -> list[Any]:
    script = [real.python, str(helpers.support / "host_pools.py"), json.dumps(cases)]
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, **real.model().options.env})
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("POOLS"))
    found: list[Any] = json.loads(line.removeprefix("POOLS"))
    return found


@pytest.mark.slow
def test_every_pool_that_is_chosen_passes_the_releases_own_check(real: Any, helpers: Any) -> None:
    """B3, B4, B5, B6: rank after rank, and they take what is booked and no more.

    0.5.21 finds less than was there: it has read its weights by then, which count as used.
    """
    pools = chosen(version_key(real.version)[:3])
    assert len(pools) > 60
    cases = [
        {
            "ranks": terms.ranks,
            "sees": terms.available - terms.reads,
            "tokens": terms.device_pools[0] // TOKEN,
            "token_bytes": TOKEN,
            "page": PAGE,
            "flags": pool.flags,
        }
        for terms, _, pool in pools
    ]
    for (terms, wish, pool), case, took in zip(pools, cases, played(real, helpers, cases), strict=True):
        assert isinstance(took, list), (took, case, wish)
        assert sum(took) <= pool.booked_bytes, case
        assert sum(took) <= terms.available - HOST_RESERVE
        if pool.flags[0] != "--hicache-host-memory-fraction":
            assert sum(took) >= pool.booked_bytes - terms.ranks * 2 * PAGE * TOKEN, case


@pytest.mark.slow
def test_what_is_refused_would_be_refused_by_the_release(real: Any, helpers: Any) -> None:
    """B5: the largest size that several ranks may have, and a GB more: the last rank is the one that fails."""
    version = version_key(real.version)[:3]
    cases = []
    for ranks in (1, 2, 4):
        terms = PoolTerms(
            name="chat",
            version=version,
            ranks=ranks,
            available=860 * GB,
            total=8192 * GIB,
            device_pools=(40_000 * TOKEN,),
            page_bytes=PAGE * TOKEN,
        )
        most = max(size for size in range(6, 860) if _fits(terms, size))
        same = {"ranks": ranks, "sees": 860 * GB, "tokens": 40_000, "token_bytes": TOKEN, "page": PAGE}
        cases += [{**same, "flags": ["--hicache-size", str(size)]} for size in (most, most + 1)]
    outcomes = played(real, helpers, cases)
    assert [isinstance(took, list) for took in outcomes] == [True, False] * 3, outcomes


def _fits(terms: PoolTerms, size_gb: int) -> bool:
    try:
        size_pool(PoolWish(size_gb=size_gb), terms)
    except ResourceExhausted:
        return False
    return True
