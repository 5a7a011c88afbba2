"""Any sequence of bookings, releases and observations keeps the book right; a plain model of the rules says so."""

from __future__ import annotations

from collections.abc import Collection

import hypothesis.strategies as st
import pytest
from attrs import define, field
from hypothesis import Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from sie_core.errors import LedgerError
from sie_core.memory.ledger import Ledger, Need

PARENTS = {"host": (), "gpu": (), "cpu": ("host",)}
TOTALS = {"host": 400, "gpu": 120, "cpu": 300}
RESERVES = {"host": 20, "gpu": 7, "cpu": 0}
PERMITS = {"host": 1, "gpu": 2, "cpu": 1}

accounts = st.sampled_from(sorted(TOTALS))
sizes = st.integers(0, 60)


@define
class Line:
    """A claim as the model has it."""

    need: Need
    realised: int | None = None
    retained: int | None = None


@define
class Book:
    """The rules of the design, written down as plainly as possible and with no thought of speed."""

    lines: dict[str, dict[str, Line]] = field(factory=dict)

    def charge(self, account: str, without: Collection[str] = (), plus: Collection[Need] = ()) -> int:
        lines = [
            line
            for owner, held in self.lines.items()
            if owner not in without
            for line in held.values()
            if account == line.need.account or account in PARENTS[line.need.account]
        ]
        lines += [Line(need) for need in plus if account == need.account or account in PARENTS[need.account]]
        total = 0
        pools: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            if line.retained is not None:
                total += line.retained
            elif line.need.pool is None:
                total += max(line.need.promised, line.realised or 0)
            else:
                total += max(line.need.static, line.realised or 0)
                pools.setdefault((line.need.account, line.need.pool), []).append(line)
        for (on, _), members in pools.items():
            headrooms = sorted((line.need.headroom for line in members), reverse=True)
            total += max(line.need.context for line in members) + sum(headrooms[: PERMITS[on]])
        return total


@st.composite
def needs(draw: st.DrawFn) -> tuple[Need, ...]:
    names = draw(st.lists(accounts, min_size=1, max_size=2, unique=True))
    return tuple(
        Need(name, draw(sizes), draw(st.integers(0, 12)), draw(st.integers(0, 25)), draw(st.sampled_from([None, "p"])))
        for name in names
    )


class LedgerMachine(RuleBasedStateMachine):
    """Owners come and go; some plans name victims, the driver's figures jump about."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model = Book()
        self.count = 0

    @initialize()
    def open(self) -> None:
        for name in TOTALS:
            parent = PARENTS[name][0] if PARENTS[name] else None
            self.ledger.add_account(
                name, total=TOTALS[name], reserve=RESERVES[name], parent=parent, permits=PERMITS[name]
            )

    # --- booking -----------------------------------------------------------------------------------

    @rule(target=owners, wanted=needs(), victims=st.lists(owners, max_size=4))
    def book(self, wanted: tuple[Need, ...], victims: list[str]) -> object:
        ledger, owner = self.ledger, f"m{self.count}"
        self.count += 1
        before = ledger.accounts()
        short = ledger.shortfall(wanted, without=victims)
        if short:
            with pytest.raises(LedgerError):
                ledger.book(owner, wanted, victims=victims)
            assert ledger.accounts() == before, "a refused booking changed something"
            return multiple()
        ledger.book(owner, wanted, victims=victims)
        for was, now in zip(before, ledger.accounts(), strict=True):
            assert now.deficit <= was.deficit, "a booking took what was not there"
        assert not ledger.unbacked(owner)
        self.model.lines[owner] = {need.account: Line(need) for need in wanted}
        return owner

    @rule(target=owners, wanted=needs(), candidates=st.lists(owners, unique=True))
    def plan(self, wanted: tuple[Need, ...], candidates: list[str]) -> object:
        """As the planner does: victims one by one, until it fits."""
        shortage = self.ledger.shortage(wanted)
        victims = []
        for name in candidates:
            if shortage.met or name not in self.model.lines:
                continue
            shortage.remove(name)
            victims.append(name)
            assert shortage.short() == self.ledger.shortfall(wanted, without=victims)
        return self.book(wanted, victims) if shortage.met else multiple()

    @rule(owner=consumes(owners))
    def release(self, owner: str) -> None:
        if owner not in self.model.lines:
            return
        quiet = not any(state.liens for state in self.ledger.accounts())
        held, freed = self.ledger.holding(owner), dict(self.ledger.freed_by(owner))
        before = {state.account: state.charged for state in self.ledger.accounts()}
        went = self.ledger.release(owner)
        del self.model.lines[owner]
        if quiet:
            assert went == held
            after = {state.account: state.charged for state in self.ledger.accounts()}
            assert {name: before[name] - after[name] for name in freed} == freed
        assert not self.ledger.holding(owner) and not self.ledger.lien(owner) and not self.ledger.owes(owner)

    @rule(owner=owners, more=sizes, account=accounts)
    def grow(self, owner: str, more: int, account: str) -> None:
        line = self.model.lines.get(owner, {}).get(account)
        if line is None:
            return
        room = self.ledger.available(account)
        grown = self.ledger.grow(owner, account, more)
        assert grown == (more <= room and line.retained is None)
        if grown:
            need = line.need
            line.need = Need(account, need.static + more, need.context, need.headroom, need.pool)

    # --- park and wake -----------------------------------------------------------------------------

    @rule(owner=owners, share=st.integers(0, 3))
    def park(self, owner: str, share: int) -> None:
        held = self.model.lines.get(owner)
        if held is None:
            return
        retained = {account: line.need.static * share // 4 for account, line in held.items()}
        before = self.ledger.accounts()
        try:
            self.ledger.retain(owner, retained)
        except LedgerError:
            assert self.ledger.lien(owner), "only what it still waits for is not an engine's to keep"
            assert self.ledger.accounts() == before
            return
        for account, nbytes in retained.items():
            held[account].retained = nbytes
        assert not self.ledger.lien(owner)

    @rule(owner=owners, victims=st.lists(owners, max_size=3))
    def wake(self, owner: str, victims: list[str]) -> None:
        held = self.model.lines.get(owner)
        victims = [name for name in victims if name != owner]
        if held is None or any(line.retained is None for line in held.values()):
            return
        wanted = [line.need for line in held.values()]
        if self.ledger.shortfall(wanted, without=victims, owner=owner):
            with pytest.raises(LedgerError):
                self.ledger.book(owner, wanted, victims=victims)
            return
        self.ledger.book(owner, wanted, victims=victims)
        for line in held.values():
            line.realised = line.realised if line.realised is not None else line.retained
            line.retained = None

    # --- what the driver says ----------------------------------------------------------------------

    @rule(owner=owners, account=accounts, nbytes=st.one_of(st.none(), st.integers(0, 90)))
    def realise(self, owner: str, account: str, nbytes: int | None) -> None:
        line = self.model.lines.get(owner, {}).get(account)
        if line is not None:
            self.ledger.realise(owner, account, nbytes)
            line.realised = nbytes

    @rule(owner=owners)
    def settle(self, owner: str) -> None:
        if owner in self.model.lines:
            self.ledger.settle(owner)

    @rule(used=st.one_of(st.none(), st.integers(0, 150)))
    def observe(self, used: int | None) -> None:
        before = self.ledger.deficit("gpu")
        foreign = next(state.foreign for state in self.ledger.accounts() if state.account == "gpu")
        self.ledger.observe("gpu", used)
        now = next(state.foreign for state in self.ledger.accounts() if state.account == "gpu")
        assert self.ledger.deficit("gpu") - before <= max(0, now - foreign)

    @rule(available=st.integers(0, 420))
    def observe_host(self, available: int) -> None:
        self.ledger.observe_available("host", available)

    @rule(account=accounts, end=st.booleans())
    def transition(self, account: str, end: bool) -> None:
        self.ledger.begin_transition(account)
        if end:
            self.ledger.end_transition(account)

    # --- what must hold ----------------------------------------------------------------------------

    @invariant()
    def the_book_is_right(self) -> None:
        self.ledger.check()

    @invariant()
    def the_figures_add_up(self) -> None:
        for state in self.ledger.accounts():
            assert state.charged + state.liens == self.model.charge(state.account)
            own = state.capacity - state.foreign - state.charged - state.liens
            assert state.available <= own
            if state.parent is None:
                assert state.available == own
            assert not (state.liens and own > 0), "somebody else could book what a lien waits for"

    @invariant()
    def shortfall_is_exact(self) -> None:
        states = {state.account: state for state in self.ledger.accounts()}
        if any(state.liens for state in states.values()):
            return
        gone = sorted(self.model.lines)[::2]
        for wanted in ((Need("gpu", 90, 5, 9, "p"),), (Need("cpu", 250), Need("host", 150)), (Need("gpu", 100),)):
            expected = {}
            for name in {level for need in wanted for level in (need.account, *PARENTS[need.account])}:
                over = self.model.charge(name, gone, wanted) + states[name].foreign - states[name].capacity
                if over > 0:
                    expected[name] = over
            assert self.ledger.shortfall(wanted, without=gone) == expected

    def teardown(self) -> None:
        for owner in list(self.model.lines):
            self.ledger.release(owner)
            self.ledger.check()
        assert not self.ledger.claims()
        for state in self.ledger.accounts():
            assert (state.charged, state.liens, state.promised, state.realised) == (0, 0, 0, 0)


LedgerMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
TestLedger = LedgerMachine.TestCase
