"""Choosing victims among a thousand models takes microseconds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
from sie_core.memory.ledger import Ledger, Need

MODELS = 1000


def best_of(times: int, call: Callable[[], object]) -> float:
    """Seconds of the fastest run: what else the machine does then counts least."""
    gc.disable()
    try:
        spans = []
        for _ in range(times):
            start = time.perf_counter()
            call()
            spans.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return min(spans)


@pytest.mark.parametrize("pool", [None, "torch"])
def test_victims_among_a_thousand_models(pool: str | None) -> None:
    ledger = Ledger()
    ledger.add_account("gpu", total=10 * MODELS + 30)
    for number in range(MODELS):
        ledger.book(f"m{number}", [Need("gpu", 10, 10, 20, pool)] if pool else [Need("gpu", 10)])
    names = [f"m{number}" for number in range(MODELS)]
    need = [Need("gpu", 150 if pool is None else 120, 10, 20, pool)]

    def choose() -> list[str]:
        shortage = ledger.shortage(need)
        victims = []
        for name in names:
            if shortage.met:
                break
            shortage.remove(name)
            victims.append(name)
        return victims

    chosen = choose()
    assert len(chosen) == 15 if pool is None else 12
    ledger.book("new", need, victims=chosen)
    ledger.release("new")
    assert best_of(50, choose) < 200e-6


def test_asking_every_model_what_it_frees() -> None:
    ledger = Ledger()
    ledger.add_account("gpu", total=10 * MODELS + 30)
    names = [f"m{number}" for number in range(MODELS)]
    for name in names:
        ledger.book(name, [Need("gpu", 10, 10, 20, "torch")])
    assert best_of(20, lambda: [ledger.freed_by(name) for name in names]) < MODELS * 2e-6


def test_evicting_a_whole_pool_is_not_quadratic() -> None:
    ledger = Ledger()
    ledger.add_account("gpu", total=10 * MODELS + 30)
    names = [f"m{number}" for number in range(MODELS)]
    for name in names:
        ledger.book(name, [Need("gpu", 10, 10, 20, "torch")])
    need = [Need("gpu", 10 * MODELS + 30)]
    assert ledger.shortfall(need, without=names) == {}
    assert ledger.shortfall(need, without=names[1:]) == {"gpu": 40}
    assert best_of(5, lambda: ledger.shortfall(need, without=names)) < 0.05
