"""What a server knows of its engines, when disk, clock, model folder or free memory are not as they were."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def _link_instead(root: Path, elsewhere: Path) -> None:
    root.symlink_to(elsewhere)


def _link_inside(root: Path, elsewhere: Path) -> None:
    root.mkdir()
    (root / "engines").symlink_to(elsewhere)


def _of_another_user(root: Path, elsewhere: Path) -> None:
    root.mkdir()
    os.chown(root, 12345, 12345)


def _of_another_user_inside(root: Path, elsewhere: Path) -> None:
    (root / "engines").mkdir(parents=True)
    os.chown(root / "engines", 12345, 12345)


def _a_file(root: Path, elsewhere: Path) -> None:
    root.touch()


@pytest.mark.parametrize("prepare", [_link_instead, _link_inside, _of_another_user, _of_another_user_inside, _a_file])
@pytest.mark.parametrize("given", [False, True])
def test_a_state_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path, Path], None], given: bool
) -> None:
    """F11: as root, a ``/tmp/sie-0`` of another user with a link inside was trusted."""
    if "another" in prepare.__name__ and os.geteuid() != 0:
        pytest.skip("only root can make folders of other users")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("SIE_STATE_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("SIE_STATE_DIR", str(tmp_path))
        prepare(tmp_path / "sie", elsewhere)
        with pytest.raises(EngineStartError, match=r"sie/engines can't hold .* SIE_STATE_DIR"):
            state_folder()
    else:
        prepare(tmp_path / f"sie-{os.geteuid()}", elsewhere)
        found = state_folder()
        assert found == tmp_path / "home" / ".local" / "state" / "sie" / "engines"
        assert (found.stat().st_uid, found.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    assert (list(elsewhere.iterdir()), elsewhere.stat().st_mode & 0o777) == ([], 0o755)


def test_the_state_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F11: it is made where it is expected, and found there again."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("SIE_STATE_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    found = state_folder()
    assert found == state_folder() == tmp_path / f"sie-{os.geteuid()}" / "engines"
    assert [folder.stat().st_mode & 0o777 for folder in (found, found.parent)] == [0o700, 0o700]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert state_folder() == tmp_path / "run" / "sie" / "engines"


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
