"""What an account has, what a claim counts for, and what the driver's figures do to it."""

from __future__ import annotations

import pytest
from sie_core.errors import LedgerError
from sie_core.memory.ledger import AccountState, Ledger, Need


@pytest.fixture
def ledger() -> Ledger:
    """A device of 100 bytes, 10 of them in reserve."""
    ledger = Ledger()
    ledger.add_account("gpu", total=100, reserve=10)
    return ledger


def state(ledger: Ledger, account: str = "gpu") -> AccountState:
    ledger.check()
    return next(state for state in ledger.accounts() if state.account == account)


def resident(ledger: Ledger, owner: str, nbytes: int, account: str = "gpu") -> None:
    """An engine that was promised ``nbytes`` and holds them."""
    ledger.book(owner, [Need(account, nbytes)])
    ledger.realise(owner, account, nbytes)
    ledger.settle(owner)


# --- charges -----------------------------------------------------------------------------------------


def test_an_empty_account_gives_out_all_but_its_reserve(ledger: Ledger) -> None:
    assert ledger.available("gpu") == state(ledger, "gpu").capacity == 90


def test_a_booking_is_charged_in_full_before_a_byte_is_taken(ledger: Ledger) -> None:
    ledger.book("a", [Need("gpu", 30, context=5, headroom=15)])
    assert ledger.available("gpu") == 40
    assert ledger.holding("a") == {"gpu": 50}
    assert (state(ledger).promised, state(ledger).realised, state(ledger).unrealised) == (50, 0, 50)


def test_the_unrealised_promise_is_nobody_elses(ledger: Ledger) -> None:
    """The bug of other servers: a resident engine's headroom is free memory until the moment it is needed."""
    ledger.book("a", [Need("gpu", 30, headroom=40)])
    ledger.realise("a", "gpu", 30)
    ledger.settle("a")
    ledger.observe("gpu", 30)
    assert ledger.shortfall([Need("gpu", 30)]) == {"gpu": 10}


def test_an_engine_that_takes_more_than_promised_is_charged_for_it(ledger: Ledger) -> None:
    resident(ledger, "a", 50)
    ledger.realise("a", "gpu", 70)
    assert ledger.available("gpu") == 20
    assert ledger.holding("a") == {"gpu": 70}
    ledger.realise("a", "gpu", 40)
    assert ledger.available("gpu") == 40, "the promise stands when it holds less"


def test_an_overrun_past_the_capacity_is_a_deficit_and_no_broken_invariant(ledger: Ledger) -> None:
    resident(ledger, "a", 50)
    ledger.realise("a", "gpu", 120)
    assert (ledger.deficit("gpu"), ledger.available("gpu"), state(ledger).deficit) == (30, -30, 30)
    assert ledger.shortfall([Need("gpu", 10)]) == {"gpu": 40}


def test_purposes_are_claims_of_their_own(ledger: Ledger) -> None:
    ledger.book("a", [Need("gpu", 20)])
    ledger.book("a", [Need("gpu", 7)], purpose="load_staging")
    assert ledger.holding("a") == {"gpu": 27}
    assert [(claim.purpose, claim.charge) for claim in ledger.claims()] == [("engine", 20), ("load_staging", 7)]
    assert ledger.release("a", purpose="load_staging") == {"gpu": 7}
    assert ledger.release("a") == {"gpu": 20}
    assert ledger.claims() == [] and ledger.available("gpu") == 90


def test_releasing_what_nobody_holds_frees_nothing(ledger: Ledger) -> None:
    assert ledger.release("nobody") == {}
    resident(ledger, "a", 20)
    assert ledger.release("a", purpose="backup") == {}
    assert ledger.holding("a") == {"gpu": 20}


def test_growing_takes_only_what_is_available(ledger: Ledger) -> None:
    resident(ledger, "a", 50)
    assert not ledger.grow("a", "gpu", 41)
    assert ledger.grow("a", "gpu", 40)
    assert ledger.available("gpu") == 0


def test_what_never_fits_is_told_from_what_does_not_fit_now(ledger: Ledger) -> None:
    resident(ledger, "a", 80)
    assert ledger.impossible([Need("gpu", 80, context=5, headroom=5)]) is None
    assert ledger.shortfall([Need("gpu", 80, context=5, headroom=5)]) == {"gpu": 80}
    assert ledger.impossible([Need("gpu", 80, context=5, headroom=6)]) == ("gpu", 91, 90)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ledger: ledger.book("a", [Need("gpu", 1)]),
        lambda ledger: ledger.book("b", [Need("gpu", 1), Need("gpu", 2)]),
        lambda ledger: ledger.book("b", [Need("gpu", -1)]),
        lambda ledger: ledger.book("b", [Need("tpu", 1)]),
        lambda ledger: ledger.book("b", [Need("gpu", 81)]),
        lambda ledger: ledger.book("b", [Need("gpu", 81)], victims=["b"]),
        lambda ledger: ledger.book("b", [Need("gpu", 1)], victims=["b"]),
        lambda ledger: ledger.realise("b", "gpu", 1),
        lambda ledger: ledger.realise("a", "gpu", -1),
        lambda ledger: ledger.realise("a", "gpu", 1, "backup"),
        lambda ledger: ledger.grow("a", "gpu", -1),
        lambda ledger: ledger.retain("a", {"gpu": -1}),
        lambda ledger: ledger.settle("b"),
        lambda ledger: ledger.end_transition("gpu"),
        lambda ledger: ledger.available("tpu"),
        lambda ledger: ledger.add_account("gpu", total=1),
        lambda ledger: ledger.add_account("cpu", total=1, parent="host"),
        lambda ledger: ledger.add_account("cpu", total=1, permits=0),
    ],
)
def test_a_broken_rule_raises_and_changes_nothing(ledger: Ledger, wrong) -> None:  # type: ignore[no-untyped-def]
    resident(ledger, "a", 10)
    before = ledger.accounts(), ledger.claims()
    with pytest.raises(LedgerError):
        wrong(ledger)
    ledger.check()
    assert (ledger.accounts(), ledger.claims()) == before


# --- foreign memory ----------------------------------------------------------------------------------


def test_what_others_hold_is_what_is_used_less_what_we_do(ledger: Ledger) -> None:
    resident(ledger, "a", 30)
    ledger.observe("gpu", 55)
    assert (state(ledger).foreign, state(ledger).used, ledger.available("gpu")) == (25, 55, 35)


def test_a_rise_binds_at_once_and_a_fall_once_it_is_quiet(ledger: Ledger) -> None:
    ledger.begin_transition("gpu")
    ledger.observe("gpu", 40)
    assert ledger.available("gpu") == 50
    ledger.observe("gpu", 10)
    assert ledger.available("gpu") == 50, "a load is running: the fall may be its doing"
    ledger.end_transition("gpu")
    ledger.observe("gpu", 10)
    assert ledger.available("gpu") == 80


def test_two_transitions_have_to_end_both(ledger: Ledger) -> None:
    ledger.observe("gpu", 40)
    ledger.begin_transition("gpu")
    ledger.begin_transition("gpu")
    ledger.end_transition("gpu")
    ledger.observe("gpu", 0)
    assert state(ledger).foreign == 40


def test_what_a_load_takes_is_not_foreign(ledger: Ledger) -> None:
    ledger.book("a", [Need("gpu", 50)])
    ledger.begin_transition("gpu")
    ledger.observe("gpu", 35)  # on its way up, nobody has told the ledger yet
    assert state(ledger).foreign == 0
    ledger.observe("gpu", 62)
    assert state(ledger).foreign == 12, "more than the promise can't be the load's"
    ledger.realise("a", "gpu", 62)
    ledger.settle("a")
    ledger.end_transition("gpu")
    ledger.observe("gpu", 62)
    assert (state(ledger).foreign, ledger.available("gpu")) == (0, 28)


def test_a_plan_that_waits_does_not_hide_a_fall(ledger: Ledger) -> None:
    """Nothing was taken yet for a claim in transit: a fall must not be counted down by its promise."""
    ledger.observe("gpu", 40)
    ledger.book("a", [Need("gpu", 50)])
    ledger.observe("gpu", 30)
    assert state(ledger).foreign == 30


def test_headroom_is_not_taken_for_held_when_nobody_can_tell(ledger: Ledger) -> None:
    ledger.book("a", [Need("gpu", 30, context=5, headroom=20)])
    ledger.settle("a")
    ledger.observe("gpu", 35)
    assert state(ledger).foreign == 0
    ledger.observe("gpu", 45)
    assert state(ledger).foreign == 10


def test_an_unknown_figure_changes_nothing(ledger: Ledger) -> None:
    ledger.observe("gpu", 40)
    ledger.observe("gpu", None)
    assert (state(ledger).foreign, state(ledger).used) == (40, 40)


def test_foreign_memory_over_the_limit_is_a_reported_deficit(ledger: Ledger) -> None:
    resident(ledger, "a", 80)
    ledger.observe("gpu", 100)
    assert (ledger.deficit("gpu"), ledger.available("gpu")) == (10, -10)
    ledger.release("a")
    assert ledger.deficit("gpu") == 0


# --- host and parents --------------------------------------------------------------------------------


@pytest.fixture
def host() -> Ledger:
    """A host of 1,000 bytes with a floor of 100; the CPU is a device in it."""
    ledger = Ledger()
    ledger.add_account("host", total=1000, reserve=100)
    ledger.add_account("cpu", total=1000, parent="host")
    ledger.observe_available("host", 800)
    return ledger


def test_the_hosts_capacity_is_what_is_there_plus_what_we_hold_less_the_floor(host: Ledger) -> None:
    assert state(host, "host").capacity == 700
    resident(host, "a", 200, "host")
    host.observe_available("host", 600)
    assert (state(host, "host").capacity, host.available("host")) == (700, 500)


def test_a_fall_of_the_host_binds_at_once_and_a_rise_once_it_is_quiet(host: Ledger) -> None:
    host.begin_transition("cpu")  # runs on the host too
    host.observe_available("host", 500)
    assert state(host, "host").capacity == 400
    host.observe_available("host", 900)
    assert state(host, "host").capacity == 400
    host.end_transition("cpu")
    host.observe_available("host", 900)
    assert state(host, "host").capacity == 800


def test_what_a_load_takes_of_the_host_is_not_a_fall(host: Ledger) -> None:
    host.book("a", [Need("cpu", 300)])
    host.begin_transition("cpu")
    host.observe_available("host", 500)
    assert (state(host, "host").capacity, host.deficit("host")) == (700, 0)
    host.observe_available("host", 450)
    assert state(host, "host").capacity == 650


def test_a_plan_that_waits_does_not_raise_the_hosts_capacity(host: Ledger) -> None:
    host.book("a", [Need("host", 300)])
    host.observe_available("host", 800)
    assert state(host, "host").capacity == 700


def test_the_capacity_never_exceeds_the_empty_host(host: Ledger) -> None:
    resident(host, "a", 200, "host")
    host.observe_available("host", 1000)
    assert state(host, "host").capacity == 900


def test_a_charge_on_the_cpu_is_a_charge_on_the_host(host: Ledger) -> None:
    resident(host, "a", 300, "cpu")
    assert state(host, "host").charged == state(host, "cpu").charged == 300
    assert host.holding("a") == {"cpu": 300}
    assert dict(host.freed_by("a")) == {"cpu": 300, "host": 300}
    assert host.release("a") == {"cpu": 300}
    assert state(host, "host").charged == 0


def test_the_cpu_has_no_more_than_the_host(host: Ledger) -> None:
    resident(host, "parked", 650, "host")
    assert (host.available("cpu"), host.available("host")) == (50, 50)
    assert host.shortfall([Need("cpu", 80)]) == {"host": 30}
    assert host.shortfall([Need("cpu", 80)], without=["parked"]) == {}
    assert host.impossible([Need("cpu", 950)]) == ("host", 950, 900)
    assert host.impossible([Need("cpu", 500), Need("host", 500)]) == ("host", 1000, 900)


# --- park --------------------------------------------------------------------------------------------


def test_a_parked_engine_counts_for_what_it_kept(ledger: Ledger) -> None:
    resident(ledger, "a", 60)
    ledger.retain("a", {"gpu": 5})
    assert (ledger.available("gpu"), ledger.holding("a")) == (85, {"gpu": 5})
    ledger.observe("gpu", 5)
    assert state(ledger).foreign == 0


def test_a_wake_needs_the_promise_less_what_was_kept(ledger: Ledger) -> None:
    resident(ledger, "a", 60)
    ledger.retain("a", {"gpu": 5})
    resident(ledger, "b", 40)
    wake = [Need("gpu", 60)]
    assert ledger.shortfall(wake, owner="a") == {"gpu": 10}
    ledger.book("a", wake, victims=["b"])
    assert ledger.lien("a") == {"gpu": 10}
    ledger.release("b")
    assert (ledger.lien("a"), ledger.available("gpu")) == ({}, 30)


def test_a_wake_that_is_cancelled_leaves_the_engine_parked(ledger: Ledger) -> None:
    resident(ledger, "a", 60)
    ledger.retain("a", {"gpu": 5})
    resident(ledger, "b", 40)
    ledger.book("a", [Need("gpu", 60)], victims=["b"])
    ledger.retain("a", {"gpu": 5})
    assert (ledger.lien("a"), ledger.holding("a"), ledger.owes("b")) == ({}, {"gpu": 5}, {})
    assert ledger.available("gpu") == 45


def test_a_cancelled_wake_waits_for_nothing_even_when_others_took_its_bytes(ledger: Ledger) -> None:
    resident(ledger, "a", 60)
    ledger.retain("a", {"gpu": 5})
    resident(ledger, "b", 40)
    ledger.book("a", [Need("gpu", 60)], victims=["b"])
    ledger.observe("gpu", 200)
    ledger.retain("a", {"gpu": 5})
    assert (ledger.lien("a"), ledger.owes("b"), state(ledger).liens) == ({}, {}, 0)


def test_a_parked_engine_that_takes_more_again_is_an_overrun(ledger: Ledger) -> None:
    resident(ledger, "a", 60)
    ledger.retain("a", {"gpu": 5})
    resident(ledger, "b", 85)
    ledger.retain("a", {"gpu": 8})
    assert (ledger.deficit("gpu"), ledger.holding("a"), state(ledger).deficit) == (3, {"gpu": 8}, 3)


def test_an_engine_cant_keep_what_it_was_never_given(ledger: Ledger) -> None:
    resident(ledger, "b", 80)
    ledger.book("a", [Need("gpu", 60)], victims=["b"])
    with pytest.raises(LedgerError, match="waits"):
        ledger.retain("a", {"gpu": 20})
    assert ledger.lien("a") == {"gpu": 50}
