"""Plans with victims: who owes what to whom, and that nobody else can have it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sie_core.errors import LedgerError
from sie_core.memory.ledger import Ledger, Need


@pytest.fixture
def ledger() -> Ledger:
    """A full device: ``a`` 40, ``b`` 30 and ``c`` 30 of 100 bytes."""
    ledger = Ledger()
    ledger.add_account("gpu", total=100)
    for owner, nbytes in (("a", 40), ("b", 30), ("c", 30)):
        ledger.book(owner, [Need("gpu", nbytes)])
        ledger.realise(owner, "gpu", nbytes)
        ledger.settle(owner)
    return ledger


@pytest.fixture(autouse=True)
def _checked(ledger: Ledger):  # type: ignore[no-untyped-def]
    yield
    ledger.check()


def test_what_is_missing_becomes_a_lien_on_the_victims(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 35)], victims=["b", "c"])
    assert ledger.lien("new") == {"gpu": 35}
    assert (ledger.owes("b"), ledger.owes("c"), ledger.owes("a")) == ({"gpu": 30}, {"gpu": 5}, {})


def test_charges_and_liens_add_up_to_what_is_not_available(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 35)], victims=["b", "c"])
    [gpu] = ledger.accounts()
    assert (gpu.charged, gpu.liens, gpu.available) == (100, 35, -35)
    assert gpu.available == gpu.capacity - gpu.foreign - gpu.charged - gpu.liens
    claim = ledger.claims()[-1]
    assert (claim.owner, claim.charge, claim.lien) == ("new", 0, 35)
    assert ledger.deficit("gpu") == 0, "what victims owe is no deficit"


def test_only_what_is_missing_is_owed(ledger: Ledger) -> None:
    ledger.release("b")
    ledger.book("new", [Need("gpu", 35)], victims=["c"])
    assert ledger.lien("new") == {"gpu": 5}
    ledger.release("c")
    assert (ledger.lien("new"), ledger.available("gpu")) == ({}, 25)


def test_victims_that_hold_too_little_are_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="missing"):
        ledger.book("new", [Need("gpu", 61)], victims=["b", "c"])
    assert ledger.holding("new") == {} and ledger.available("gpu") == 0
    with pytest.raises(LedgerError, match="missing"):
        ledger.book("new", [Need("gpu", 1)], victims=["nobody"])


def test_nobody_else_can_have_what_a_lien_waits_for(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 65)], victims=["a", "b"])
    ledger.release("a")
    assert ledger.lien("new") == {"gpu": 25}
    for thief in (1, 40):
        assert ledger.shortfall([Need("gpu", thief)]) == {"gpu": thief}
        with pytest.raises(LedgerError):
            ledger.book("thief", [Need("gpu", thief)])
    assert not ledger.grow("c", "gpu", 1)
    ledger.release("b")
    assert (ledger.lien("new"), ledger.available("gpu")) == ({}, 5)
    ledger.book("thief", [Need("gpu", 5)])


def test_a_second_plan_gets_only_the_rest_of_a_victim(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 35)], victims=["a"])
    assert ledger.freed_by("a") == {"gpu": 5}
    assert ledger.shortfall([Need("gpu", 5)], without=["a"]) == {}
    with pytest.raises(LedgerError):
        ledger.book("second", [Need("gpu", 6)], victims=["a"])
    ledger.book("second", [Need("gpu", 5)], victims=["a"])
    ledger.release("a")
    assert ledger.lien("new") == ledger.lien("second") == {}


def test_a_victims_bytes_pay_the_plan_that_named_it_even_if_another_is_older(ledger: Ledger) -> None:
    ledger.book("old", [Need("gpu", 30)], victims=["b"])
    ledger.book("young", [Need("gpu", 30)], victims=["c"])
    ledger.release("c")
    assert (ledger.lien("old"), ledger.lien("young")) == ({"gpu": 30}, {})


def test_what_a_victim_frees_beyond_goes_to_the_oldest(ledger: Ledger) -> None:
    ledger.book("old", [Need("gpu", 20)], victims=["b"])
    ledger.book("middle", [Need("gpu", 25)], victims=["c"])
    ledger.book("young", [Need("gpu", 10)], victims=["a"])
    ledger.release("a")
    assert (ledger.lien("young"), ledger.lien("old"), ledger.lien("middle")) == ({}, {}, {"gpu": 15})


def test_a_victim_of_two_plans_pays_each_what_it_owes() -> None:
    ledger = Ledger()
    ledger.add_account("gpu", total=100)
    for owner, nbytes in (("v", 40), ("w", 30), ("u", 30)):
        ledger.book(owner, [Need("gpu", nbytes)])
    ledger.book("old", [Need("gpu", 50)], victims=["w", "v"])
    ledger.book("young", [Need("gpu", 30)], victims=["v", "u"])
    assert ledger.owes("v") == {"gpu": 40}
    ledger.release("v")
    assert (ledger.lien("old"), ledger.lien("young")) == ({"gpu": 30}, {"gpu": 10})
    ledger.check()


def test_what_is_over_goes_to_the_victims_own_plan_before_an_older_one() -> None:
    ledger = Ledger()
    ledger.add_account("gpu", total=100)
    for owner, nbytes in (("v", 50), ("w", 20), ("u", 30)):
        ledger.book(owner, [Need("gpu", nbytes)])
    ledger.book("old", [Need("gpu", 20)], victims=["w"])
    ledger.book("young", [Need("gpu", 40)], victims=["u", "v"])
    assert ledger.owes("v") == {"gpu": 10}
    ledger.release("v")
    assert (ledger.lien("young"), ledger.lien("old")) == ({}, {"gpu": 10})
    ledger.check()


def test_bytes_from_elsewhere_let_off_who_was_named_last(ledger: Ledger) -> None:
    ledger.release("a")
    ledger.book("other", [Need("gpu", 35)])
    ledger.book("new", [Need("gpu", 45)], victims=["b", "c"])
    assert (ledger.owes("b"), ledger.owes("c")) == ({"gpu": 30}, {"gpu": 10})
    ledger.release("other")
    assert (ledger.owes("b"), ledger.owes("c")) == ({"gpu": 5}, {})


def test_other_bytes_pay_the_oldest_lien_first(ledger: Ledger) -> None:
    ledger.book("old", [Need("gpu", 20)], victims=["b"])
    ledger.book("young", [Need("gpu", 20)], victims=["c"])
    ledger.release("a")
    assert (ledger.lien("old"), ledger.lien("young"), ledger.available("gpu")) == ({}, {}, 0)


def test_a_fall_of_foreign_memory_pays_the_oldest_lien(ledger: Ledger) -> None:
    ledger.release("a")
    ledger.observe("gpu", 100)  # somebody else has a's 40
    ledger.book("old", [Need("gpu", 30)], victims=["b"])
    ledger.book("young", [Need("gpu", 30)], victims=["c"])
    ledger.observe("gpu", 60)
    assert (ledger.lien("old"), ledger.lien("young")) == ({}, {"gpu": 20})
    assert ledger.owes("b") == {}, "it need not go any more"


def test_an_overrun_that_goes_pays_too(ledger: Ledger) -> None:
    ledger.release("a")
    ledger.realise("b", "gpu", 70)
    ledger.book("new", [Need("gpu", 20)], victims=["c"])
    ledger.realise("b", "gpu", 30)
    assert ledger.lien("new") == {}


def test_cancelling_a_plan_gives_its_bytes_back_to_the_others(ledger: Ledger) -> None:
    ledger.book("first", [Need("gpu", 30)], victims=["b", "c"])
    ledger.book("second", [Need("gpu", 20)], victims=["c"])
    ledger.release("b")
    assert ledger.lien("first") == {}
    ledger.release("first")
    assert (ledger.lien("second"), ledger.available("gpu")) == ({}, 10)


def test_cancelling_a_plan_frees_its_victims(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 35)], victims=["b", "c"])
    assert ledger.release("new") == {"gpu": 35}
    assert ledger.owes("b") == ledger.owes("c") == {} and ledger.available("gpu") == 0
    ledger.book("next", [Need("gpu", 30)], victims=["b"])


def test_foreign_memory_that_takes_a_victims_bytes_leaves_the_lien_unbacked(ledger: Ledger) -> None:
    """The needer has to plan again: nothing pretends that the bytes are there."""
    ledger.book("new", [Need("gpu", 30)], victims=["b"])
    ledger.observe("gpu", 110)
    ledger.release("b")
    assert (ledger.lien("new"), ledger.unbacked("new"), ledger.deficit("gpu")) == ({"gpu": 10}, {"gpu": 10}, 10)
    ledger.observe("gpu", 70)
    assert (ledger.lien("new"), ledger.deficit("gpu")) == ({}, 0)


def test_a_deficit_has_to_be_freed_too(ledger: Ledger) -> None:
    ledger.observe("gpu", 110)
    assert ledger.shortfall([Need("gpu", 25)], without=["b"]) == {"gpu": 5}
    ledger.book("new", [Need("gpu", 25)], victims=["b", "c"])
    assert (ledger.lien("new"), ledger.deficit("gpu")) == ({"gpu": 25}, 10)
    ledger.release("b")
    assert (ledger.lien("new"), ledger.deficit("gpu")) == ({"gpu": 5}, 0)


def test_a_victim_that_parks_pays_what_it_gave_up(ledger: Ledger) -> None:
    ledger.book("new", [Need("gpu", 30)], victims=["b"])
    ledger.retain("b", {"gpu": 4})
    assert (ledger.lien("new"), ledger.unbacked("new")) == ({"gpu": 4}, {"gpu": 4})
    assert ledger.owes("b") == {}, "it has given what it could"


def test_a_needer_can_be_looked_past(ledger: Ledger) -> None:
    """What another plan would lack if this one were cancelled."""
    ledger.book("new", [Need("gpu", 35)], victims=["b", "c"])
    assert ledger.freed_by("new") == {"gpu": 0}
    assert ledger.shortfall([Need("gpu", 60)], without=["new", "b", "c"]) == {}
    assert ledger.shortfall([Need("gpu", 61)], without=["c", "b", "new"]) == {"gpu": 1}


def test_liens_stand_on_parent_and_child() -> None:
    ledger = Ledger()
    ledger.add_account("host", total=100)
    ledger.add_account("cpu", total=60, parent="host")
    ledger.book("a", [Need("cpu", 50)])
    ledger.book("copy", [Need("host", 45)])
    ledger.book("new", [Need("cpu", 30)], victims=["a"])
    assert ledger.lien("new") == {"cpu": 20, "host": 25}
    assert ledger.owes("a") == {"cpu": 20, "host": 25}
    ledger.check()
    ledger.release("copy")
    assert ledger.lien("new") == {"cpu": 20}, "the host's bytes pay the host's lien, not the device's"
    ledger.release("a")
    assert ledger.lien("new") == {}
    ledger.check()


def test_two_encoders_are_never_both_booked_on_a_device_for_one() -> None:
    """A device of 128 MiB and encoders of 87 (scenario 9): the second is paid only when the first has gone."""
    mib = 2**20
    ledger = Ledger()
    ledger.add_account("emulated:0", total=128 * mib)
    names = ["one", "two", "three"]
    ledger.book(names[0], [Need("emulated:0", 87 * mib)])
    for gone, come in pairwise(names):
        ledger.book(come, [Need("emulated:0", 87 * mib)], victims=[gone])
        [account] = ledger.accounts()
        assert account.charged <= account.capacity and ledger.lien(come)
        ledger.release(gone)
        [account] = ledger.accounts()
        assert (account.charged, account.liens, ledger.lien(come)) == (87 * mib, 0, {})
        ledger.check()
