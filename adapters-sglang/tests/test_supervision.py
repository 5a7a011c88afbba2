"""Engines as processes: however the server, the guard or the engine ends, nothing of an engine stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from sie_adapters_sglang import _process, _state
from sie_adapters_sglang._process import EngineProcess
from sie_adapters_sglang._state import TOKEN, Home, end_orphans, state_folder
from sie_adapters_sglang.adapters import GenerationAdapter
from sie_core import EngineStartError, TransitionCancelled

SERVER = """
import json, sys, threading
sys.path[:0] = {path!r}
from conftest import Events, Home, KINDS, context
from pathlib import Path
home = Home(Path({folder!r}))
model = home.model(how=json.loads({how!r}))
engine = KINDS[model.adapter]().load(model, context(), Events())
print(json.dumps([engine.pid, engine.url]), flush=True)
threading.Event().wait()
"""


def family(pid: int) -> list[psutil.Process]:
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def listens(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


class Server:
    """A server in a process of its own, with one engine."""

    def __init__(self, home: Any, **how: Any) -> None:
        code = SERVER.format(path=[str(Path(__file__).parent)], folder=str(home.folder), how=json.dumps(how))
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.pid, self.url = json.loads(self.process.stdout.readline())
        self.engine = family(self.pid)
        self.guard = psutil.Process(psutil.Process(self.pid).ppid())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(home: Any) -> Iterator[Any]:
    made: list[Server] = []

    def make(**how: Any) -> Server:
        made.append(Server(home, **how))
        return made[-1]

    yield make
    for each in made:
        each.kill()
        for process in each.engine:
            if process.is_running():
                process.kill()


def runs(process: psutil.Process) -> bool:
    """One that nobody has collected yet holds nothing any more."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while left := [process for process in processes if runs(process)]:
        if time.monotonic() >= until:
            return False
        psutil.wait_procs(left, timeout=0.02)
    return True


def test_closing_ends_every_process(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"children": 3}))
    processes = family(engine.pid)
    assert len(processes) == 4
    assert {os.getsid(process.pid) for process in processes} == {engine.pid}
    assert os.getsid(0) != engine.pid
    engine.close(helpers.context())
    assert gone(processes, 0)
    assert not listens(engine.url)
    assert list(state_folder().iterdir()) == []
    engine.close(helpers.context())
    assert engine.memory().devices == {"cpu": 0}


def test_what_ignores_sigterm_is_killed(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"stubborn": True}, stop_timeout_s=0.5))
    processes = family(engine.pid)
    begun = time.monotonic()
    engine.close(helpers.context())
    assert 0.5 <= time.monotonic() - begun < 4
    assert gone(processes, 0)


def test_closing_keeps_to_the_cores_deadline(home: Any, start: Any, helpers: Any) -> None:
    engine = start(home.model(how={"stubborn": True}, stop_timeout_s=60))
    processes = family(engine.pid)
    begun = time.monotonic()
    engine.close(helpers.context(deadline=begun + 5))
    assert time.monotonic() - begun < 5
    assert gone(processes, 0)


def test_a_crash_ends_the_rest_and_is_told(home: Any, start: Any, helpers: Any) -> None:
    events = helpers.Events()
    engine = start(home.model(how={"children": 2, "say": "hello"}), events=events)
    leader, *others = family(engine.pid)
    leader.kill()
    assert gone(others, 5)
    deadline = time.monotonic() + 5
    while not events.deaths and time.monotonic() < deadline:
        os.sched_yield()
    assert "signal 9" in events.deaths[0]
    assert "hello" in events.deaths[0]
    assert len(events.deaths) == 1


@pytest.mark.parametrize("how", [{}, {"stubborn": True}, {"floods": 4}], ids=["plain", "stubborn", "floods"])
def test_the_server_killed(server: Any, how: dict[str, Any]) -> None:
    """Within a second every process has its signal; within five nothing is left, not even of those that ignore it."""
    running = server(children=2, **how)
    assert len(running.engine) == 3 + how.get("floods", 0)
    running.kill()
    begun = time.monotonic()
    assert gone([*running.engine, running.guard], 5)
    assert not listens(running.url)
    if not how:
        assert time.monotonic() - begun < 1


# --- the same grace, however it ends -------------------------------------------------------------------


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert what()


def _starting() -> bool:
    """Whether an engine that is being started has its signals in order."""
    return any("standin: tidies" in log.read_text() for log in state_folder().glob("*/engine.log"))


@pytest.mark.parametrize("how", ["called off", "timed out"])
def test_an_engine_that_starts_has_its_grace(home: Any, helpers: Any, tmp_path: Path, how: str) -> None:
    """B10: it takes 0.4 s to end in order, and gets 5. It is never ready."""
    tidy = tmp_path / "tidy"
    limit = 60.0 if how == "called off" else 2.0
    model = home.model(how={"tidies": str(tidy), "start_s": 600}, stop_timeout_s=5.0, start_timeout_s=limit)
    ctx = helpers.context()

    def call_off() -> None:
        _until(_starting)
        ctx.cancelled.set()

    if how == "called off":
        threading.Thread(target=call_off).start()
    with pytest.raises(TransitionCancelled if how == "called off" else EngineStartError):
        GenerationAdapter().load(model, ctx, helpers.Events())
    assert tidy.exists()
    assert list(state_folder().iterdir()) == []


async def test_a_server_that_stops_during_a_start_gives_the_engine_its_grace(
    home: Any, front: Any, tmp_path: Path
) -> None:
    """B10"""
    tidy = tmp_path / "tidy"
    model = home.model(how={"tidies": str(tidy), "start_s": 600}, stop_timeout_s=5.0)
    async with front(model) as server:
        asked = asyncio.create_task(server.chat())
        await asyncio.to_thread(_until, _starting)
        await server.registry.shutdown(20.0)
        assert (await asked).status_code == 503
    assert tidy.exists()


@pytest.mark.parametrize("guarded", [True, False], ids=["with its guard", "without"])
def test_the_engine_of_a_killed_server_has_its_grace(server: Any, tmp_path: Path, guarded: bool) -> None:
    """B10: from the guard, or from the next server, which finds it without one."""
    tidy = tmp_path / "tidy"
    running = server(tidies=str(tidy))
    if guarded:
        running.kill()
    else:
        running.guard.suspend()
        running.process.kill()
        running.process.wait()
        running.guard.kill()
        assert end_orphans() == ["tiny"]
    assert gone(running.engine, 10)
    assert tidy.exists()


def test_the_guard_killed(home: Any, start: Any, helpers: Any) -> None:
    events = helpers.Events()
    engine = start(home.model(how={"children": 2}), events=events)
    processes = family(engine.pid)
    psutil.Process(psutil.Process(engine.pid).ppid()).kill()
    assert gone(processes, 5)
    deadline = time.monotonic() + 5
    while not events.deaths and time.monotonic() < deadline:
        os.sched_yield()
    assert events.deaths


def test_a_guard_that_hangs_keeps_nothing_alive(
    home: Any, start: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(home.model(how={"children": 2}, stop_timeout_s=0.1))
    processes = family(engine.pid)
    psutil.Process(psutil.Process(engine.pid).ppid()).suspend()
    monkeypatch.setattr(_process, "_GUARD_S", 0.2)
    engine.close(helpers.context())
    assert gone(processes, 0)
    assert list(state_folder().iterdir()) == []


SILENT_GUARD = """
import subprocess, sys, time
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, **quiet)
time.sleep(600)
"""


def test_a_guard_that_never_says_a_word_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows the engine's process then, and no other may be taken for it."""
    silent = tmp_path / "guard.py"
    silent.write_text(SILENT_GUARD)
    monkeypatch.setattr(_process, "_guard", SimpleNamespace(__file__=str(silent)))
    monkeypatch.setattr(_process, "_GUARD_S", 1.0)
    group: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, number: group.append(pid))
    home = Home("tiny")
    with pytest.raises(EngineStartError, match="could not be started"):
        EngineProcess([sys.executable, "-c", "pass"], {}, home)
    assert group == []
    assert not [process for process in psutil.process_iter(["environ"]) if marked(process, home.token)]


def marked(process: psutil.Process, token: str) -> bool:
    return bool((process.info["environ"] or {}).get(TOKEN) == token) and runs(process)


def test_what_does_not_end_is_looked_for_again(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = server()
    running.guard.suspend()
    running.process.kill()
    running.process.wait()
    running.guard.kill()
    with monkeypatch.context() as patched:
        patched.setattr(_state, "_GIVE_UP_S", 0.0)
        patched.setattr(psutil.Process, "send_signal", lambda self, number: None)
        assert end_orphans() == []
    assert end_orphans() == ["tiny"]
    assert gone(running.engine, 0)
    assert list(state_folder().iterdir()) == []


def test_orphans_of_a_dead_server_are_ended_and_reported(
    server: Any, home: Any, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Server and guard both killed: nobody is left to end the engine, and the next server does."""
    running = server(children=2, stubborn=True)
    running.guard.suspend()
    running.process.kill()
    running.process.wait()
    running.guard.kill()
    assert running.engine[0].is_running()
    start(home.model())
    assert gone(running.engine, 5)
    assert "tiny" in caplog.text
    assert "3 processes" in caplog.text


def test_orphans_are_ended_before_room_is_asked_for(server: Any, home: Any, helpers: Any) -> None:
    """What they hold is nobody's promise: with it on the device the model might never be let in."""
    running = server(children=2)
    running.guard.suspend()
    running.process.kill()
    running.process.wait()
    running.guard.kill()
    assert not gone(running.engine, 0.2)
    assert GenerationAdapter().reserve(home.model(), [helpers.view()]).ranks
    assert gone(running.engine, 0)


def test_engines_of_a_living_server_are_left_alone(server: Any) -> None:
    running = server(children=1)
    assert end_orphans() == []
    assert all(process.is_running() for process in running.engine)
    assert listens(running.url)


def test_a_process_that_is_not_provably_ours_is_left_alone(tmp_path: Path) -> None:
    """Its id stands in the file that a dead server left behind, and that is no proof."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as stranger:
        folder = state_folder() / "0123"
        folder.mkdir()
        about = {"token": "0123", "model": "m", "pid": stranger.pid, "owner": {"pid": 999_999_999, "began": "then"}}
        (folder / "engine.json").write_text(json.dumps(about))
        assert end_orphans() == []
        assert stranger.poll() is None
        assert not folder.exists()
        assert stranger.stdin is not None
        stranger.stdin.write(b"\n")


def test_the_engine_carries_its_token_and_no_key_on_its_command_line(home: Any, start: Any) -> None:
    engine = start(home.model())
    process = psutil.Process(engine.pid)
    keys = engine._running.keys
    assert process.environ()[TOKEN]
    for each in family(engine.pid):
        words = " ".join(each.cmdline())
        assert keys.api not in words
        assert keys.admin not in words
        assert not {keys.api, keys.admin} & set(each.environ().values())
    folder = state_folder() / process.environ()[TOKEN]
    assert folder.stat().st_mode & 0o077 == 0
    assert not (folder / "keys.yaml").exists()


def test_its_log_is_bounded(home: Any, start: Any) -> None:
    engine = start(home.model(how={"flood_mb": 40}))
    folder = engine._running.process.home.log.parent
    assert sum(file.stat().st_size for file in folder.iterdir()) < 10 << 20
    assert "standin: keys *** ***" in engine._running.process.log_tail()


def test_engines_outlive_the_thread_that_started_them(home: Any, start: Any) -> None:
    import threading

    engines: list[Any] = []
    thread = threading.Thread(target=lambda: engines.append(start(home.model())))
    thread.start()
    thread.join()
    assert not gone([psutil.Process(engines[0].pid)], 0.5)


def test_a_signal_to_the_servers_terminal_does_not_reach_it(server: Any) -> None:
    running = server()
    os.kill(running.guard.pid, signal.SIGINT)
    os.kill(running.guard.pid, signal.SIGTERM)
    assert not gone([*running.engine, running.guard], 0.5)
