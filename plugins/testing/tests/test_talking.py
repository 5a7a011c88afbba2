"""Fake engines that generate, and that take LoRA adapters, pass the suites for such engines; flawed ones don't."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from sie_core import Adapter, InferenceError, ModelSpec
from sie_core.memory.device import EmulatedDevice
from sie_testing import FakeAdapter, FakeOptions, FakeStreamAdapter, GenerationConformance, LoraConformance, plugin

MIB = 1 << 20


class TestTalker(GenerationConformance):
    options = FakeOptions(token_s=0.005, context_bytes=MIB, host_bytes=1000, allocate=True)

    @pytest.fixture
    def adapter(self) -> Adapter:
        return FakeStreamAdapter()

    @pytest.fixture
    def model(self) -> ModelSpec:
        return ModelSpec(type(self).__name__, "fake-stream", options=self.options)

    @pytest.fixture
    def plugin(self) -> Any:
        return plugin

    @pytest.fixture
    def missing_model(self) -> ModelSpec:
        return ModelSpec("missing", "fake-stream", options=FakeOptions(fail_load="ModelSourceNotFound"))

    @pytest.fixture
    def long(self) -> Mapping[str, Any]:
        return {"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 4000}

    @pytest.fixture
    def refused(self) -> Mapping[str, Any]:
        return {"refuse": True}

    @pytest.fixture
    def running(self) -> Callable[[Any], int]:
        return lambda engine: int(engine.running)

    @pytest.fixture
    def abort(self) -> Callable[[Any], object]:
        return lambda engine: engine.faults.fail("piece", InferenceError("aborted, as told"), times=2)


class TestTalkerOfOneAtATime(TestTalker):
    options = FakeOptions(token_s=0.005, max_running=1, allocate=True)


class Adaptable(LoraConformance):
    """On a device that counts."""

    options = FakeOptions(weights_bytes=MIB, lora_bytes=4096, max_loras=3, allocate=True)
    made = FakeAdapter

    emulated: EmulatedDevice

    @classmethod
    def setup_class(cls) -> None:
        cls.emulated = EmulatedDevice("emulated:0", 8 * MIB)

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        assert cls.emulated.used() == 0
        cls.emulated.close()

    @pytest.fixture
    def device(self) -> EmulatedDevice:
        return self.emulated

    @pytest.fixture
    def adapter(self) -> Adapter:
        return self.made()

    @pytest.fixture
    def model(self) -> ModelSpec:
        name = "fake" if self.made is FakeAdapter else "fake-stream"
        return ModelSpec(type(self).__name__, name, options=self.options)

    @pytest.fixture
    def plugin(self) -> Any:
        return plugin

    @pytest.fixture
    def sources(self) -> Sequence[str]:
        return ("path:/made/up", "path:/another")

    @pytest.fixture
    def bad_sources(self) -> Sequence[str]:
        return ("path:/it/is/missing",)


class TestAdaptableEncoder(Adaptable):
    pass


class TestAdaptableTalker(Adaptable):
    made = FakeStreamAdapter


class TestAdaptableTalkerThatEncodesOnly(Adaptable):
    made = FakeStreamAdapter
    options = FakeOptions(max_loras=1, lora_bytes=4096, tasks=("encode",), allocate=True)


# --- flaws -----------------------------------------------------------------------------------------

HEAD = """
import json, pytest
from attrs import evolve
from sie_core import *
from sie_testing import FakeOptions, FakeStreamAdapter, FakeStreamEngine, plugin
from test_talking import Adaptable as Lora, TestTalker as Talker

class Ours:
    @pytest.fixture
    def adapter(self): return self.flawed_adapter()
"""
SUITE = """
class {name}Engine(FakeStreamEngine):
    {flaw}

class {name}Adapter(FakeStreamAdapter):
    _engine = {name}Engine

class Test{name}(Ours, {suite}):
    flawed_adapter = made = {name}Adapter
    patience_s = 1.0
"""
SWALLOWS = """async def generate(self, request):
        try:
            return await super().generate(request)
        except InferenceError:
            return {"choices": [{"message": {"content": ""}, "finish_reason": "abort"}], "usage": {}}"""
KEEPS_ON = """async def stream(self, request):
        self.running += 1
        async for piece in super().stream(request): yield piece
        self.running -= 1"""
LOSES = """async def stream(self, request):
        lost = False
        async for piece in super().stream(request):
            if lost: yield piece
            lost = True"""
NO_USAGE = """async def stream(self, request):
        async for piece in super().stream(request):
            if json.loads(piece)["choices"]: yield piece"""
SPLITS = """async def stream(self, request):
        async for piece in super().stream(request):
            yield piece.replace("\\u6f22".encode(), "\\ufffd".encode())"""
MIXES = """async def generate(self, request):
        self.last = request
        import asyncio
        await asyncio.sleep(0.01)
        return await super().generate(self.last)"""
LATE = """async def stream(self, request):
        if request.body.get("refuse"):
            yield b'{"choices": []}'
        async for piece in super().stream(request): yield piece"""
FLAWS = {
    "whole_and_counted": ("Talker", "async def generate(self, request):\n"
                          "        return {**await super().generate(request), 'choices': []}"),
    "pieces_join_to_the_whole_answer": ("Talker", LOSES),
    "last_piece": ("Talker", NO_USAGE),
    "is_one_line_of_valid_text": ("Talker", SPLITS),
    "not_mixed_up": ("Talker", MIXES),
    "refused_before_the_first_piece": ("Talker", LATE),
    "closing_a_stream_ends_its_request": ("Talker", KEEPS_ON),
    "aborted_in_the_engine_never_looks": ("Talker", SWALLOWS),
    "runs_while_it_is_closed_never_looks": ("Talker", SWALLOWS),
    "changes_the_answers_that_name_it": ("Lora", "def _answers_to(self, request):\n"
                                         "        return super()._answers_to(evolve(request, lora=None))"),
    "not_there_is_an_error": ("Lora", "def _check_lora(self, name): pass"),
    "as_many_as_it_says": ("Lora", "max_loras = 3\n    def lora_load(self, name, source, ctx):\n"
                           "        if len(self.loras) > 1: raise LoadError('two are enough')\n"
                           "        super().lora_load(name, source, ctx)"),
    "gone_afterwards": ("Lora", "def lora_unload(self, name, ctx): pass"),
    "leaves_nothing_behind": ("Lora", "def lora_reserve(self, name, source): return DeviceNeed(4096)\n"
                              "    def _check_lora(self, name): pass"),
}  # fmt: skip
CAUGHT_BY = {"last_piece": "pieces_join_to_the_whole_answer"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pytest says of every flawed engine, in one run."""
    folder: Path = tmp_path_factory.mktemp("flawed")
    suites = [SUITE.format(name=name, flaw=flaw, suite=suite) for name, (suite, flaw) in FLAWS.items()]
    (folder / "test_talking.py").write_text(Path(__file__).read_text())
    (folder / "test_flawed.py").write_text(HEAD + "".join(suites))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rA", "test_flawed.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_caught_by_its_test(flaw: str, outcome: list[str]) -> None:
    mine = [line for line in outcome if f"::Test{flaw}::" in line]
    caught = CAUGHT_BY.get(flaw, flaw)
    assert any(line.startswith("FAILED") and caught in line.rpartition("::")[2] for line in mine), "\n".join(outcome)
    assert any(line.startswith("PASSED") for line in mine), "\n".join(mine)
