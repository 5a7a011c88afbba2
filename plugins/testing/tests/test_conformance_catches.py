"""The conformance suite fails for adapters that are wrong: each flaw is caught by the test that is there for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import numpy as np, pytest, threading
from attrs import evolve
from sie_core import *
from sie_testing import AdapterConformance, FakeAdapter, FakeEngine, FakeOptions, plugin

class Suite(AdapterConformance):
    @pytest.fixture
    def adapter(self): return self.flawed_adapter()

    @pytest.fixture
    def model(self): return ModelSpec("flawed", "fake", options=FakeOptions(**self.options))

    @pytest.fixture
    def plugin(self): return plugin
"""
SUITE = """
class {name}Engine(FakeEngine):
    {flaw}

class {name}Adapter(FakeAdapter):
    _engine = {name}Engine
    {adapter}

class Test{name}(Suite):
    flawed_adapter = {name}Adapter
    options = dict({options})
"""

FLAWS = {
    "outputs_keep_the_order": ("def run(self, batch): return super().run(batch[::-1])", "", ""),
    "one_finite_output_an_item": ("def run(self, batch): return super().run(batch)[:-1]", "", ""),
    "does_not_depend_on_the_batch": (
        "def run(self, batch):\n"
        "        return [evolve(o, dense=o.dense + np.float32(len(batch))) for o in super().run(batch)]",
        "",
        "",
    ),
    "prepare_is_safe_on_many_threads": (
        "def prepare(self, request):\n"
        "        self.kept = request\n"
        "        threading.Event().wait(0.005)\n"
        "        return super().prepare(self.kept)",
        "",
        "",
    ),
    "item_without_content_is_invalid": (
        "def prepare(self, request):\n        return [Prepared(1, ('x', RequestParams())) for _ in request.items]",
        "",
        "",
    ),
    "too_long_is_refused_or_truncated": (
        "def prepare(self, request):\n"
        "        return super().prepare(evolve(request, params=evolve(request.params, truncate=True)))",
        "",
        "",
    ),
    "cannot_do_is_unsupported": (
        "def _check_params(self, request): pass",
        "",
        "",
    ),
    "probe_answers_the_same": (
        "count = 0\n"
        "    def probe(self, ctx):\n        self.count += 1\n        return bytes([self.count])",
        "",
        "",
    ),
    "woken_engine_shows_that_it_lives": ("def alive(self): pass", "", ""),
    "close_gives_everything_back": ("def close(self, ctx): pass", "", ""),
    "what_it_holds_was_reserved": ("", "", "realised=1.5"),
    "holds_what_it_says_it_retained": ("", "", "freed=0.3"),
    "woken_engine_answers_bit_for_bit": ("", "", "corrupt_restore=True"),
    "options_are_a_typed_attrs_class": ("", "options = dict", ""),
    "progress_goes_forward": (
        "",
        "def load(self, model, ctx, events):\n"
        "        ctx.progress(7.0, 'much')\n        return super().load(model, ctx, events)",
        "",
    ),
    "description_agrees": ("", "def describe(self, model): return Capabilities(max_sequence_length=1)", ""),
    "memory_is_reported_on_the_granted": (
        "def memory(self): return MemoryReport({'elsewhere:0': 5})",
        "",
        "",
    ),
    "finite_output_an_item": (
        "def run(self, batch): return [ScoreOutput(o.tokens, float('inf')) for o in super().run(batch)]",
        "",
        "tasks=('score',)",
    ),
    "output_comes_alone": (
        "def run(self, batch):\n"
        "        return [o if o.sparse is None else evolve(o, dense=o.dense * 2) for o in super().run(batch)]",
        "",
        "outputs=('dense', 'sparse')",
    ),
    "different_requests_share_a_batch": (
        "def run(self, batch):\n"
        "        return super().run([Prepared(b.tokens, (*b.payload[:2], batch[0].payload[2])) for b in batch])",
        "",
        "tasks=('encode', 'score')",
    ),
    "load_that_was_called_off": (
        "",
        "def load(self, model, ctx, events):\n"
        "        if ctx.cancelled.is_set(): raise OSError('torn')\n        return super().load(model, ctx, events)",
        "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pytest says of every flawed adapter, in one run."""
    folder: Path = tmp_path_factory.mktemp("flawed")
    suites = [
        SUITE.format(name=name, flaw=flaw or "pass", adapter=adapter or "pass", options=options)
        for name, (flaw, adapter, options) in FLAWS.items()
    ]
    suites.append(SUITE.format(name="no_probe", flaw="pass", adapter="pass", options="probes=False"))
    (folder / "test_flawed.py").write_text(HEAD + "".join(suites))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rA", "test_flawed.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_caught_by_its_test(flaw: str, outcome: list[str]) -> None:
    mine = [line for line in outcome if f"::Test{flaw}::" in line]
    assert any(line.startswith("FAILED") and flaw in line.rpartition("::")[2] for line in mine), "\n".join(mine)
    assert any(line.startswith("PASSED") for line in mine), "\n".join(mine)


def test_an_engine_that_parks_and_has_no_probe_is_told_so(outcome: list[str]) -> None:
    """A12: its tests passed, and its wakes went unchecked."""
    assert any(line.startswith("SKIPPED") and "no_probeEngine parks and has no probe()" in line for line in outcome)
    assert not any(line.startswith("PASSED") and "Testno_probe::test_the_probe" in line for line in outcome)
