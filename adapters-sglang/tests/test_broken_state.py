"""What a server knows of its engines, when disk, clock, model folder or free memory are not as they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from sie_adapters_sglang import _state
from sie_adapters_sglang._control import Control
from sie_adapters_sglang._state import end_orphans, state_folder
from sie_core import EngineStartError


def children() -> set[int]:
    """The guards that run."""
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells only by the clock when one began")
def test_a_clock_that_is_set_makes_no_orphans(home: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells when a process began by the clock as it is now: an hour later than it said before."""
    engine = start(home.model())
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: began(self) + 3600)
    assert end_orphans() == []
    assert psutil.Process(engine.pid).is_running()
    assert engine.memory().devices["cpu"]


def test_a_state_folder_that_can_not_be_made_is_named(
    home: Any, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SIE_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(EngineStartError, match=r"file/sie/engines can't hold .* SIE_STATE_DIR"):
        start(home.model())


@pytest.mark.parametrize("writes", [0, 1])
def test_a_disk_that_fills_up_while_an_engine_starts(
    home: Any, start: Any, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Its first file, or the one that says which process it is: that process must not stay behind."""
    real, left = Path.write_text, [writes]

    def write_text(path: Path, text: str, **more: Any) -> int:
        if path.name.startswith("engine.json"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, os.strerror(28), str(path))
        return real(path, text, **more)

    before = children()
    with monkeypatch.context() as patched:
        patched.setattr(_state.Path, "write_text", write_text)
        with pytest.raises(EngineStartError, match="No space left"):
            start(home.model())
    assert children() <= before
    assert list(state_folder().iterdir()) == []


def test_a_model_folder_that_goes_away_while_its_engine_starts(
    home: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine says of its memory can't be kept then. It must not run on with nobody to close it."""
    asked = Control.memory_usage

    def memory_usage(self: Control) -> Any:
        (home.model_folder / "config.json").unlink(missing_ok=True)
        return asked(self)

    monkeypatch.setattr(Control, "memory_usage", memory_usage)
    before = children()
    with pytest.raises(FileNotFoundError):
        start(home.model())
    assert children() <= before
    assert list(state_folder().iterdir()) == []


@pytest.mark.parametrize("env", [{"A": "nul \0"}, {"A=B": "c"}])
def test_a_variable_that_no_environment_can_hold(home: Any, start: Any, env: dict[str, str]) -> None:
    with pytest.raises(EngineStartError, match="could not be started"):
        start(home.model(env=env))
    assert list(state_folder().iterdir()) == []


async def test_an_engine_that_says_it_holds_less_than_nothing_is_booked_by_its_files(front: Any, home: Any) -> None:
    """It tells how much less was free after its load, and meanwhile somebody else gave more back."""
    async with front(home.model(how={"weights_gb": -0.06, "kv_gb": 1 / 64}, max_total_tokens=4096)) as server:
        for _ in range(2):
            assert (await server.chat()).status_code == 200
            assert server.engine().usage.weights == server.engine().plan.checkpoint.weight_bytes() > 0
            assert (await server.act("unload")).status_code == 200
