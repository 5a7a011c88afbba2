"""Engines of one process share a context, and the headroom of those that may run at the same time."""

from __future__ import annotations

import pytest
from sie_core.errors import LedgerError
from sie_core.memory.ledger import Ledger, Need


def pooled(static: int, headroom: int = 0, context: int = 10) -> list[Need]:
    return [Need("gpu", static, context, headroom, pool="torch")]


def opened(total: int = 200, permits: int = 1) -> Ledger:
    ledger = Ledger()
    ledger.add_account("gpu", total=total, permits=permits)
    return ledger


@pytest.mark.parametrize(("permits", "charge"), [(1, 10 + 60 + 9), (2, 10 + 60 + 9 + 7), (3, 10 + 60 + 9 + 7 + 4)])
def test_the_context_counts_once_and_the_k_largest_headrooms(permits: int, charge: int) -> None:
    ledger = opened(permits=permits)
    for owner, headroom in (("a", 4), ("b", 9), ("c", 7)):
        ledger.book(owner, pooled(20, headroom))
    assert ledger.available("gpu") == 200 - charge
    ledger.check()


def test_what_a_newcomer_needs_is_what_it_adds() -> None:
    ledger = opened(total=60)
    ledger.book("a", pooled(20, headroom=9))
    assert ledger.shortfall(pooled(21, headroom=9)) == {}
    assert ledger.shortfall(pooled(22, headroom=9)) == {"gpu": 1}
    assert ledger.shortfall(pooled(20, headroom=11)) == {"gpu": 1}
    assert ledger.shortfall(pooled(20, headroom=9, context=12)) == {"gpu": 1}
    assert ledger.shortfall([Need("gpu", 22)]) == {"gpu": 1}


def test_the_largest_context_counts() -> None:
    ledger = opened()
    ledger.book("a", pooled(1, context=10))
    ledger.book("b", pooled(1, context=30))
    assert ledger.available("gpu") == 200 - 2 - 30
    assert ledger.freed_by("b") == {"gpu": 21}
    assert ledger.release("b") == {"gpu": 21}


def test_leaving_frees_the_headroom_only_of_who_needed_most() -> None:
    ledger = opened()
    for owner, headroom in (("a", 4), ("b", 9), ("c", 9)):
        ledger.book(owner, pooled(20, headroom))
    assert [ledger.freed_by(owner)["gpu"] for owner in "abc"] == [20, 20, 20]
    assert ledger.shortfall([Need("gpu", 121 + 45)], without=["b", "c"]) == {}
    assert ledger.shortfall([Need("gpu", 121 + 46)], without=["b", "c"]) == {"gpu": 1}
    ledger.release("b")
    assert ledger.freed_by("c") == ledger.holding("c") == {"gpu": 25}
    assert ledger.release("c") == {"gpu": 25}
    assert ledger.release("a") == {"gpu": 34}, "the last one takes the context along"
    assert ledger.available("gpu") == 200


def test_weights_that_outgrew_their_promise_count() -> None:
    ledger = opened()
    ledger.book("a", pooled(20, 5))
    ledger.realise("a", "gpu", 26)
    assert ledger.available("gpu") == 200 - 26 - 10 - 5


def test_the_processs_own_figure_is_not_foreign() -> None:
    """Context and activations show in the driver's figure and in no engine's."""
    ledger = opened()
    for owner in "ab":
        ledger.book(owner, pooled(20, headroom=8))
        ledger.realise(owner, "gpu", 20)
        ledger.settle(owner)
    ledger.realise_pool("gpu", "torch", 40 + 10 + 6)
    ledger.observe("gpu", 56 + 3)
    [gpu] = ledger.accounts()
    assert (gpu.foreign, gpu.charged, gpu.realised) == (3, 58, 56)
    ledger.realise_pool("gpu", "torch", 65)
    ledger.check()
    assert ledger.accounts()[0].charged == 65, "the process took more than all its engines were promised"
    ledger.realise_pool("gpu", "torch", None)
    assert ledger.accounts()[0].charged == 58
    ledger.realise_pool("gpu", "no such pool", 5)
    ledger.check()


def test_without_that_figure_the_context_is_known_to_be_taken() -> None:
    ledger = opened()
    ledger.book("a", pooled(20, headroom=8))
    ledger.realise("a", "gpu", 20)
    ledger.settle("a")
    ledger.observe("gpu", 30)
    assert ledger.accounts()[0].foreign == 0
    ledger.observe("gpu", 35)
    assert ledger.accounts()[0].foreign == 5, "headroom is never taken for granted"
    ledger.check()


def test_a_parked_member_needs_no_headroom() -> None:
    ledger = opened()
    ledger.book("a", pooled(20, headroom=9))
    ledger.book("b", pooled(20, headroom=4))
    ledger.retain("a", {"gpu": 0})
    assert ledger.available("gpu") == 200 - 20 - 10 - 4
    assert ledger.shortfall(pooled(150, headroom=20), owner="a") == {}
    ledger.book("a", pooled(20, headroom=9))
    assert ledger.available("gpu") == 200 - 40 - 10 - 9
    ledger.check()


def test_nobody_is_in_a_pool_twice() -> None:
    ledger = opened()
    ledger.book("a", pooled(20))
    with pytest.raises(LedgerError, match="member"):
        ledger.book("a", pooled(20), purpose="draft")


# --- liens on members --------------------------------------------------------------------------------


def test_a_lien_relies_on_what_its_victims_free_together() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(20, headroom=30))
    ledger.book("b", pooled(20, headroom=30))
    alone = [Need("gpu", 100)]
    assert sum(ledger.freed_by(owner)["gpu"] for owner in "ab") == 40
    assert ledger.shortfall(alone, without=["a"]) == {"gpu": 60}
    assert ledger.shortfall(alone, without=["a", "b"]) == {}
    ledger.book("new", alone, victims=["a", "b"])
    ledger.check()
    assert (ledger.lien("new"), ledger.unbacked("new")) == ({"gpu": 80}, {})
    ledger.release("a")
    ledger.check()
    assert (ledger.lien("new"), ledger.unbacked("new")) == ({"gpu": 60}, {})
    ledger.release("b")
    assert ledger.lien("new") == {}


def test_who_joins_a_pool_makes_up_for_what_others_relied_on() -> None:
    """Once it has joined, the victim's leaving frees neither the context nor the headroom."""
    ledger = opened(total=100)
    ledger.book("victim", pooled(20, headroom=30))
    ledger.book("idle", [Need("gpu", 40)])
    ledger.book("new", [Need("gpu", 60)], victims=["victim"])
    joiner = pooled(5, headroom=30)
    assert ledger.shortfall(joiner) == {"gpu": 45}, "5 of its own and the 40 that the lien relies on"
    with pytest.raises(LedgerError):
        ledger.book("joiner", [Need("gpu", 5, 10, 30, pool="torch")])
    with pytest.raises(LedgerError):
        ledger.book("joiner", pooled(6, headroom=30), victims=["idle"])
    ledger.release("idle")
    assert ledger.lien("new") == {"gpu": 20}
    ledger.check()


def test_a_joiner_with_victims_takes_the_debt_over() -> None:
    ledger = opened(total=100)
    ledger.book("victim", pooled(20, headroom=30))
    ledger.book("idle", [Need("gpu", 40)])
    ledger.book("new", [Need("gpu", 60)], victims=["victim"])
    ledger.book("joiner", pooled(0, headroom=30), victims=["idle"])
    ledger.check()
    assert (ledger.lien("new"), ledger.lien("joiner")) == ({"gpu": 20}, {"gpu": 40})
    ledger.release("victim")
    ledger.check()
    assert (ledger.lien("new"), ledger.lien("joiner")) == ({}, {"gpu": 40})
    ledger.release("idle")
    assert ledger.lien("joiner") == {} and ledger.available("gpu") == 0
    ledger.check()


def test_two_plans_never_count_the_same_headroom() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(20, headroom=50))
    ledger.book("b", pooled(20, headroom=10))
    ledger.book("first", [Need("gpu", 60)], victims=["a"])
    assert ledger.lien("first") == {"gpu": 60}
    assert (ledger.freed_by("a"), ledger.freed_by("b")) == ({"gpu": 0}, {"gpu": 20})
    assert ledger.shortfall([Need("gpu", 21)], without=["a", "b"]) == {"gpu": 1}
    ledger.book("second", [Need("gpu", 20)], victims=["b"])
    ledger.check()
    ledger.release("b")
    assert (ledger.lien("first"), ledger.lien("second")) == ({"gpu": 60}, {})
    ledger.release("a")
    assert ledger.lien("first") == {} and ledger.available("gpu") == 20
    ledger.check()


def test_a_member_that_one_plan_relies_on_is_nothing_to_another() -> None:
    ledger = opened(total=120)
    ledger.book("a", pooled(20, headroom=50))
    ledger.book("b", pooled(20, headroom=10, context=30))
    ledger.book("first", [Need("gpu", 60)], victims=["a"])
    ledger.check()
    ledger.book("second", [Need("gpu", 40)], victims=["a", "b"])
    ledger.check()
    assert (ledger.lien("second"), ledger.unbacked("second")) == ({"gpu": 40}, {})
    ledger.release("b")
    ledger.check()
    assert (ledger.lien("first"), ledger.lien("second")) == ({"gpu": 60}, {})


def test_the_planner_is_told_when_the_pools_share_decides() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(20, headroom=30))
    ledger.book("b", pooled(20, headroom=30))
    shortage = ledger.shortage([Need("gpu", 100)])
    assert not shortage.met and not shortage.remove("a")
    assert shortage.remove("b") and shortage.met and shortage.short() == {}
    with pytest.raises(KeyError):
        shortage.remove("nobody")


def test_what_the_process_has_beyond_its_promises_goes_with_the_last_member() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(20, headroom=10))
    ledger.realise_pool("gpu", "torch", 55)
    assert (ledger.available("gpu"), ledger.freed_by("a")) == (45, {"gpu": 55})
    assert ledger.shortfall([Need("gpu", 100)], without=["a"]) == {}
    ledger.retain("a", {"gpu": 0})
    ledger.check()
    assert ledger.available("gpu") == 100
    ledger.book("a", pooled(20, headroom=10))
    assert ledger.available("gpu") == 60, "until the driver says so again"


def test_a_cancelled_plan_leaves_the_pool_as_it_was() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(20, headroom=50))
    before = ledger.accounts()
    ledger.book("new", [Need("gpu", 90)], victims=["a"])
    ledger.release("new")
    assert ledger.accounts() == before and ledger.freed_by("a") == {"gpu": 80}
    ledger.check()


def test_needer_and_victims_may_share_a_pool() -> None:
    ledger = opened(total=100)
    ledger.book("a", pooled(40, headroom=10))
    ledger.book("b", pooled(35, headroom=5))
    ledger.book("new", pooled(40, headroom=10), victims=["a"])
    assert ledger.lien("new") == {"gpu": 35}
    ledger.release("a")
    assert ledger.lien("new") == {} and ledger.available("gpu") == 5
    ledger.check()


def test_room_of_a_pool_that_a_needer_waits_for_is_waited_for_by_those_who_came_after_it() -> None:
    """The second needs the pool's headroom as much as the first, which has booked it and waits for its victim."""
    ledger = Ledger()
    ledger.add_account("cuda:0", total=100)
    ledger.book("victim", [Need("cuda:0", static=60)])
    ledger.settle("victim")
    ledger.book("first", [Need("cuda:0", static=30, headroom=40, pool="p")], victims=["victim"])
    assert ledger.lien("first") == {"cuda:0": 30}
    assert not ledger.relies_on_unpaid("first")
    ledger.book("other", [Need("cuda:0", static=0)])
    ledger.check()
    ledger.release("other")

    ledger.book("second", [Need("cuda:0", static=0, headroom=40, pool="p")])
    assert ledger.lien("second") == {}
    assert ledger.relies_on_unpaid("second")
    ledger.release("first")
    ledger.check()
    assert ledger.available("cuda:0") == 0
    assert sum(ledger.lien("second").values()) == 0, "there was room for it without the first"

    ledger.release("second")
    ledger.book("large", [Need("cuda:0", static=40)])
    ledger.book("first", [Need("cuda:0", static=10, headroom=40, pool="p")], victims=["victim"])
    ledger.book("second", [Need("cuda:0", static=0, headroom=40, pool="p")])
    ledger.release("first")
    ledger.check()
    assert ledger.lien("second") == {"cuda:0": 40}
    assert not ledger.relies_on_unpaid("second")
    ledger.release("victim")
    ledger.check()
    assert ledger.lien("second") == {}
