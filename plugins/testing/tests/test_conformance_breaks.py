"""Sixteen breaks of one adapter, each caught by the test that names it; and hangs, which must not hang pytest."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from honest import ADAPTER_BREAKS, HANGS, MORE_BREAKS, PLUGIN_BREAKS

HERE = Path(__file__).parent / "support"
HEAD = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import pytest
from honest import HonestAdapter, Options, Plugin
from sie_core import ModelSpec
from sie_testing import AdapterConformance

class Suite(AdapterConformance):
    break_, backup = "", False

    @pytest.fixture
    def adapter(self): return HonestAdapter()

    @pytest.fixture
    def model(self): return ModelSpec("broken", "honest", options=Options(self.break_, self.backup))

    @pytest.fixture
    def plugin(self): return Plugin(self.break_)

class TestHonest(Suite): pass
class TestHonestWithBackup(Suite): backup = True
"""
BREAKS = ADAPTER_BREAKS | PLUGIN_BREAKS | MORE_BREAKS
WITH_BACKUP = ("backup not dropped",)

Outcome = dict[str, dict[str, str]]
"""By class and test, what pytest says of it."""


def run(folder: Path, source: str, *options: str) -> tuple[Outcome, str]:
    (folder / "test_broken.py").write_text(HEAD + source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=short", *options]
    done = subprocess.run(
        [*command, "test_broken.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    found: Outcome = defaultdict(dict)
    for line in done.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        name = rest.split(" - ")[0].split("::")
        if verdict in ("PASSED", "FAILED", "ERROR") and len(name) == 3:
            found[name[1]][name[2].removeprefix("test_")] = verdict
    return found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, str]:
    source = "".join(
        f"class Test_{number}(Suite):\n    break_ = {name!r}\n    backup = {name in WITH_BACKUP}\n"
        for number, name in enumerate(BREAKS)
    )
    return run(tmp_path_factory.mktemp("broken"), source)


@pytest.mark.parametrize("name", ["TestHonest", "TestHonestWithBackup"])
def test_an_adapter_that_keeps_its_promises_passes(outcome: tuple[Outcome, str], name: str) -> None:
    """D4: the good one is green, whatever hooks it has."""
    verdicts = outcome[0][name]
    assert {test: verdict for test, verdict in verdicts.items() if verdict != "PASSED"} == {}, outcome[1]
    assert {*BREAKS.values()} - verdicts.keys() <= {"a_dropped_backup_is_let_go_of"}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_caught_by_the_test_that_names_it(outcome: tuple[Outcome, str], name: str) -> None:
    """D4: by that test, and most others pass."""
    verdicts = outcome[0][f"Test_{[*BREAKS].index(name)}"]
    assert verdicts.get(BREAKS[name]) == "FAILED", (verdicts, outcome[1][-4000:])
    failed = [test for test, verdict in verdicts.items() if verdict != "PASSED"]
    assert len(failed) <= 5, failed


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, str]:
    source = "".join(
        f"class Test_{where}(Suite):\n    break_ = 'hangs in {where}'\n    limit_s = 0.3\n" for where in HANGS
    )
    return run(tmp_path_factory.mktemp("hanging"), source, "-k", " or ".join(f"Test_{where}" for where in HANGS))


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_is_a_failure_with_a_name(hanging: tuple[Outcome, str], where: str) -> None:
    """D4: in whatever call; pytest goes on, says where it stands, and ends."""
    outcome, text = hanging
    verdicts = outcome[f"Test_{where}"]
    assert {"FAILED", "ERROR"} & {*verdicts.values()}, text
    assert "hangs: it did not return within 0.3 s" in text
    assert f'options, "{where}")' in text, "where it stands"
    if where != "load":
        assert "PASSED" in verdicts.values()
