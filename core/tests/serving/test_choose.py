"""Which items go into a run: the rules, on made-up queues."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sie_core import Prepared
from sie_core.serving._choose import RunCost, Sizing, Slot, choose


@attrs.define(eq=False)
class Waiting:
    passed: int = 0


def queue(*lengths: int) -> list[Slot]:
    return [Slot(Waiting(), 0, Prepared(tokens, None), tokens) for tokens in lengths]


def tokens(slots: list[Slot]) -> list[int]:
    return [slot.tokens for slot in slots]


SMALL = Sizing(budget=4096, target=512, start=16)


def test_everything_goes_together_when_splitting_gains_nothing() -> None:
    assert tokens(choose(queue(10, 12, 11), SMALL)) == [10, 12, 11]


def test_lengths_that_differ_go_separately_the_first_in_line_first() -> None:
    chosen = choose(queue(100, 10, 98, 11, 99, 12), SMALL)
    assert tokens(chosen) == [100, 98, 99]
    assert tokens(choose(queue(10, 100, 98, 11, 99, 12), SMALL)) == [10, 11, 12]


def test_a_dear_start_keeps_different_lengths_together() -> None:
    dear = attrs.evolve(SMALL, start=4096)
    assert tokens(choose(queue(100, 10, 98), dear)) == [100, 10, 98]


def test_an_engine_that_packs_takes_any_length_in_order() -> None:
    packs = attrs.evolve(SMALL, target=120, pads=False)
    assert tokens(choose(queue(100, 10, 98, 5), packs)) == [100, 10, 5]


def test_whoever_was_passed_over_often_goes_whatever_its_length() -> None:
    waiting = queue(10, 400, 11)
    assert tokens(choose(waiting, SMALL)) == [10, 11]
    waiting[1].job.passed = 8
    assert 400 in tokens(choose(waiting, SMALL))


def test_an_item_larger_than_the_budget_runs_alone() -> None:
    assert tokens(choose(queue(9000, 10, 9000), SMALL)) == [9000]


@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=80),
    passed=st.lists(st.integers(0, 12), min_size=80, max_size=80),
    budget=st.integers(1, 4096),
    start=st.integers(16, 8192),
    pads=st.booleans(),
)
def test_rules_that_always_hold(lengths: list[int], passed: list[int], budget: int, start: int, pads: bool) -> None:
    waiting = queue(*lengths)
    for slot, count in zip(waiting, passed, strict=False):
        slot.job.passed = count
    sizing = Sizing(budget, max(1, budget // 2), start, pads)
    chosen = choose(waiting, sizing)
    assert chosen[0] is waiting[0] or waiting[0] in chosen
    assert len({id(slot) for slot in chosen}) == len(chosen)
    assert all(slot in waiting for slot in chosen)
    size = sizing.size(len(chosen), max(tokens(chosen)), sum(tokens(chosen)))
    assert len(chosen) == 1 or size <= budget


@given(lengths=st.lists(st.integers(1, 300), min_size=2, max_size=60))
def test_grouping_never_costs_more_than_one_run_for_all(lengths: list[int]) -> None:
    sizing = Sizing(budget=10**9, target=10**9, start=50)
    waiting, cost = queue(*lengths), 0
    while waiting:
        chosen = choose(waiting, sizing)
        cost += 50 + len(chosen) * max(tokens(chosen))
        waiting = [slot for slot in waiting if slot not in chosen]
    together = 50 + len(lengths) * max(lengths)
    # Lengths are told apart in sixteenths of the longest: that much may be lost on each item.
    assert cost <= together + len(lengths) * (max(lengths) / 16 + 1) + 50


@pytest.mark.parametrize(("start_s", "token_s"), [(0.003, 0.00015), (0.0, 0.001), (0.02, 0.00001)])
def test_the_cost_of_a_start_is_learnt_from_runs(start_s: float, token_s: float) -> None:
    cost = RunCost()
    for size in [30, 500, 120, 60, 300, 30, 450, 200, 90, 30, 500, 250] * 3:
        cost.observe(size, 4, start_s + token_s * size)
    expected = min(max(start_s / token_s, 16), 8192)
    assert cost.sizing(8192).start == pytest.approx(expected, rel=0.05, abs=2)


def test_a_slow_engine_gets_no_run_that_keeps_newcomers_waiting_for_long() -> None:
    cost = RunCost()
    for size in [30, 500, 120, 2000, 300] * 6:
        cost.observe(size, 4, 0.3 + 0.0005 * size)  # a start worth 600 tokens
    assert cost.sizing(100_000).target < 16 * 600


def test_budget_is_never_exceeded_by_the_target() -> None:
    assert RunCost().sizing(100).target == 100
