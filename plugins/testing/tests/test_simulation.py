"""The seeded simulation: the registry stands it, it repeats exactly, and it would notice what it looks for."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from sie_core.residency import Registry, fence
from sie_core.residency.admission import Admission
from sie_core.residency.lifecycle import Lifecycle
from sie_core.residency.parking import Parking
from sie_core.residency.record import Record
from sie_core.residency.tier import HostTier
from sie_testing.simulate import main
from sie_testing.simulation import SCENES, Report, SimulationFailed, interrupt, simulate

SEEDS = int(os.environ.get("SIE_SIMULATION_SEEDS", "500"))
GROUPS = 20
_reports: dict[int, Report] = {}


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_seed_breaks_a_rule(group: int) -> None:
    for seed in range(group, SEEDS, GROUPS):
        _reports[seed] = simulate(seed)


@pytest.mark.skipif(SEEDS < 500, reason="so few seeds need not see everything")
def test_the_seeds_see_every_kind_of_thing() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update((_reports.get(seed) or simulate(seed)).counts)
    rare = [
        "parking->parked", "waking->resident", "waking->parked", "waking->unloading", "parking->unloading",
        "loading->queued", "loading->failed", "loading->quarantined", "quarantined->unloaded", "draining->resident",
        "torn", "killed parked", "killed parking", "killed waking", "killed resident", "killed loading", "lost",
        "make_room True", "make_room False", "device full", "batches", "hangs set",
        "adapters used", "answer LORA_LOADING", "long requests", "clients told to return", "clients served",
    ]  # fmt: skip
    assert [what for what in rare if not seen[what]] == []


def test_a_seed_repeats_to_the_last_step() -> None:
    for seed in (3, 17, 51):
        first, again = simulate(seed), simulate(seed)
        assert first.trace == again.trace
        assert (first.digest, first.looks, first.seconds) == (again.digest, again.looks, again.seconds)


@pytest.mark.parametrize("scene", SCENES)
def test_a_cancellation_at_any_await_of_a_transition_loses_nothing(scene: str) -> None:
    assert interrupt(scene) > 10


# --- it would notice -------------------------------------------------------------------------------


def _fails(seeds: range = range(60)) -> str:
    with pytest.raises(SimulationFailed) as caught:
        for seed in seeds:
            simulate(seed)
    return str(caught.value)


def test_it_notices_a_transition_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lifecycle, "_ended", lambda *_: None)
    with pytest.raises(SimulationFailed, match=r"simulate --scene 'load' --from 0"):
        interrupt("load")


def test_it_notices_a_neighbour_that_leaves_beside_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A3."""
    monkeypatch.setattr(fence, "_sizing", lambda roster: iter(()))
    assert "sizes itself" in _fails(range(150))


def test_it_notices_a_pin_that_a_reload_undoes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4."""
    monkeypatch.setattr(Record, "configure", lambda record, spec: setattr(record, "spec", spec))
    assert "by hand" in _fails()


def test_it_notices_a_model_that_does_not_wait_for_who_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5."""
    monkeypatch.setattr(Record, "stays_until", property(lambda record: record.resident_at + record.spec.min_resident_s))
    assert "was told to return" in _fails(range(150))


def test_it_notices_a_model_that_does_not_stay_as_long_as_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5."""
    monkeypatch.setattr(Record, "stays_until", property(lambda record: record.expected_until))
    assert "of min_resident_s" in _fails()


def test_it_notices_a_request_that_waits_too_long_for_a_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A6."""
    monkeypatch.setattr(Registry, "_will_wake", lambda registry, record: False)
    assert "for a wake of" in _fails(range(150))


def test_it_notices_a_lost_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(life: Lifecycle, record: Any) -> None:
        record.retire = None

    monkeypatch.setattr(Lifecycle, "_settle_down", settle)
    assert "wait" in _fails()


def test_it_notices_bytes_that_are_not_in_the_book(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(park: Parking, record: Any, *_: Any) -> None:
        record.retained = dict.fromkeys(record.devices, 0)
        park._life.roster.ledger.retain(record.name, record.retained)

    monkeypatch.setattr(Parking, "_credit", forgetful)
    assert "booked 0" in _fails()


def test_it_notices_a_plan_that_is_not_unbooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_unbook", lambda *_: None)
    assert "run it again: python -m sie_testing.simulate --from" in _fails()


def test_it_notices_an_overfull_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostTier, "_short", lambda *_: 0)
    assert "tier" in _fails()


# --- the command line ------------------------------------------------------------------------------


def test_the_command_counts_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "4", "--from", "10", "--steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "unloaded->queued" in out
    assert out.splitlines()[-1].startswith("4 runs, ")


def test_the_command_shows_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--from", "10", "--trace"]) == 0
    assert "unloaded -> queued" in capsys.readouterr().out


def test_the_command_plays_a_scene(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--scene", "load"]) == 0
    assert "cancellations" in capsys.readouterr().out


def test_the_command_fails_with_a_seed_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Admission, "_unbook", lambda *_: None)
    assert main(["--seeds", "40", "--keep-going"]) == 1
    assert "run it again" in capsys.readouterr().out
