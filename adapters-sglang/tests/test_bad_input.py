"""Bad input, and engines that misbehave: a clear answer to those who asked, and nobody else is touched."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from attrs import evolve
from sie_adapters_sglang import _launch
from sie_adapters_sglang._guard import Guard, Log
from sie_adapters_sglang._ports import take_ports
from sie_adapters_sglang._state import TOKEN, end_orphans, state_folder
from sie_core import Source

GIB, MIB = 1 << 30, 1 << 20
SMALL = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}


@pytest.fixture
def tiny(home: Any, helpers: Any) -> Any:
    helpers.save_model(home.model_folder, width=2048, rows=2048)

    def make(adapter: str = "sglang-generation", *, name: str = "tiny", how: Any = None, **options: Any) -> Any:
        return evolve(home.model(adapter, how=SMALL | (how or {}), **{"max_total_tokens": 4096} | options), name=name)

    return make


# --- what can't be launched is refused before anybody makes room for it ---------------------------------


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such flag": ({"extra_args": ("--enable-metric",)}, "did you mean --enable-metrics"),
    "a wrong value": ({"extra_args": ("--schedule-policy", "none-such")}, "invalid choice"),
    "not for a profile": ({"extra_args": ("--port", "80")}, "a free port is picked"),
    "not for its env": ({"env": {"CUDA_VISIBLE_DEVICES": "3"}}, "the model's `device`"),
    "an unsupported version": ({"version": "0.4.1"}, "SGLang 0.4.1 is not supported"),
    "no such interpreter": ({"python": "no-such-python"}, "no-such-python"),
    "more ranks than devices": ({"tp_size": 4}, "4"),
    "more than the device": ({"max_total_tokens": 2_000_000, "mem_fraction_static": 0.001}, "raise it"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_can_not_be_launched_is_refused_for_good_and_nobody_leaves(
    tiny: Any, front: Any, helpers: Any, what: str
) -> None:
    """The device has room for one of the two."""
    options, why = WRONG[what]
    settings = dict(options)
    env = settings.pop("env", None)
    wrong = tiny(name="wrong", **settings)
    if env is not None:
        wrong = evolve(wrong, options=evolve(wrong.options, env={**wrong.options.env, **env}))
    async with front(tiny(), wrong, devices=[helpers.emulated("emulated:0", 80)]) as server:
        await server.chat()
        before = server.engine().pid
        for _ in range(2):
            refused = await server.chat("wrong")
            assert refused.status_code == 502, refused.text
            assert refused.json()["error"]["permanent"]
            assert why in refused.json()["error"]["message"]
        assert server.engine().pid == before
        assert await server.residency() == "resident"
        assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder.mkdir(), "has no config.json"),
        (lambda folder: folder.write_text("x"), "folder"),
        (lambda folder: None, "folder"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("[]")), "holds no object"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")), "can't be read"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")), "safetensors"),
    ],
    ids=["empty", "a file", "missing", "no object", "no JSON", "no weights"],
)
async def test_a_folder_that_is_no_model(tiny: Any, front: Any, tmp_path: Path, make: Any, why: str) -> None:
    make(tmp_path / "bad")
    bad = evolve(tiny(), source=Source("path", str(tmp_path / "bad")))
    async with front(bad) as server:
        refused = await server.chat()
        assert refused.status_code == 502, refused.text
        assert refused.json()["error"]["permanent"]
        assert why in refused.json()["error"]["message"]
        assert server.booked() == {}


async def test_a_hicache_pool_above_the_host(tiny: Any, front: Any) -> None:
    async with front(tiny("sglang-hicache", hicache_size=1_000_000)) as server:
        refused = await server.chat()
        assert refused.status_code == 502, refused.text
        assert "931322.6 GiB" in refused.text or "host" in refused.text
        assert server.booked() == {}


def check(folder: Path, *models: Any) -> subprocess.CompletedProcess[str]:
    """``sie check`` of models as the configuration file has them."""
    (folder / "sie.yaml").write_text(json.dumps({"models": models}))
    command = [sys.executable, "-m", "sie_core", "check", str(folder / "sie.yaml")]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line_names_an_option_that_does_not_exist(tmp_path: Path) -> None:
    model = {"name": "m", "adapter": "sglang-generation", "source": "path:model", "options": {"mem_fraction": 0.5}}
    done = check(tmp_path, model)
    assert done.returncode == 2
    assert "mem_fraction_static" in done.stdout + done.stderr


def test_the_command_line_says_which_models_can_not_start(tiny: Any, home: Any, tmp_path: Path) -> None:
    """What needs no start to be known: the version, the flags, the files."""

    def written(name: str, source: str = str(home.model_folder), **options: Any) -> dict[str, Any]:
        model = tiny(**options)
        told = {"python": sys.executable, "env": dict(model.options.env), "extra_args": list(model.options.extra_args)}
        return {"name": name, "adapter": model.adapter, "source": f"path:{source}", "options": told}

    good = written("good")
    assert check(tmp_path, good).returncode == 0
    done = check(
        tmp_path,
        good,
        written("old", version="0.4.1"),
        written("flag", extra_args=("--enable-metric",)),
        written("gone", source=str(tmp_path / "gone")),
    )
    assert done.returncode == 1
    assert len(done.stdout.strip().splitlines()) == 3, done.stdout
    for words in ("0.4.1 is not supported", "did you mean --enable-metrics", "'gone'"):
        assert words in done.stdout


# --- ports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["its own", "of its ranks"])
async def test_a_port_that_is_taken_after_it_was_picked(
    tiny: Any, front: Any, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        stolen = thief.getsockname()[1]
        first = list(take_ports(2))
        first[which] = stolen
        answers = iter([tuple(first)])
        monkeypatch.setattr(_launch, "take_ports", lambda count: next(answers, None) or take_ports(count))
        async with front(tiny()) as server:
            assert (await server.chat()).status_code == 200
            assert not server.engine().url.endswith(f":{first[0]}")


# --- engines that misbehave --------------------------------------------------------------------------------


async def test_an_engine_that_takes_connections_and_never_answers(tiny: Any, front: Any) -> None:
    """Its deadline holds, and so does the calling-off of its start."""
    async with front(tiny(how={"deaf": True, "say": "listening"}, start_timeout_s=1.0)) as server:
        begun = time.monotonic()
        failed = await server.chat()
        assert failed.status_code == 502
        assert "was not ready within 1 s" in failed.text
        assert "listening" in failed.text
        assert time.monotonic() - begun < 10
        assert server.booked() == {}
    async with front(tiny(how={"deaf": True})) as server:
        asking = asyncio.create_task(server.chat())
        await server.until("loading")
        begun = time.monotonic()
        await server.act("unload")
        await server.until("unloaded")
        assert time.monotonic() - begun < 10
        assert (await asking).status_code in (502, 503)


async def test_a_request_that_is_never_answered_ends_at_its_deadline(tiny: Any, front: Any, helpers: Any) -> None:
    async with front(evolve(tiny(how={"mute": True}, park=False), deadline_s=1.0)) as server:
        await server.registry.load("tiny")
        late = await server.chat()
        assert late.status_code == 504, late.text
        assert await server.residency() == "resident"


async def test_one_502_fails_one_request(tiny: Any, front: Any) -> None:
    async with front(tiny(how={"fail_once": {"/v1/chat/completions": 502}})) as server:
        failed = await server.chat()
        assert failed.status_code == 500, failed.text
        assert "502" in failed.json()["error"]["message"]
        engine = server.engine()
        assert (await server.chat()).status_code == 200
        assert server.engine() is engine


async def test_half_a_stream_never_looks_whole(tiny: Any, front: Any) -> None:
    async with front(tiny(how={"half": True})) as server:
        answer = await server.chat(stream=True, max_tokens=50)
        assert answer.status_code == 200
        events = [line for line in answer.text.split("\n") if line.startswith("data:")]
        assert "[DONE]" not in answer.text
        assert 'finish_reason":"stop' not in answer.text
        assert "broke off" in json.loads(events[-1].removeprefix("data:"))["error"]["message"]


async def test_a_crash_is_told_its_claims_go_and_the_next_request_restarts(tiny: Any, front: Any) -> None:
    async with front(tiny(how={"dies_in": "/v1/chat/completions"}, park=False)) as server:
        for _ in range(2):
            failed = await server.chat()
            assert failed.status_code == 500
            assert "exit code 9" in failed.text
            async with asyncio.timeout(10):
                while server.booked():
                    await asyncio.sleep(0.005)
        # Twice in a row: it waits, and says how long.
        refused = await server.chat()
        assert refused.status_code == 503, refused.text
        assert "died 2 times in a row" in refused.text
        assert 25 <= int(refused.headers["retry-after"]) <= 30


async def test_chat_never_reaches_an_embedding_engine(tiny: Any, front: Any, helpers: Any) -> None:
    """It would be its end. A model that is not loaded is not loaded for it either."""
    async with front(tiny("sglang-embedding")) as server:
        for _ in range(2):
            for path, body in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
            ):
                refused = await server.http.post(path, json={"model": "tiny", **body})
                assert refused.status_code == 400, refused.text
            assert server.registry.status("tiny").residency in ("unloaded", "resident")
            assert (await server.http.post("/v1/embeddings", json={"model": "tiny", "input": "abc"})).status_code == 200
        seen = helpers.told(server.engine())
        assert seen["requests"] == 3  # a probe, and two embeddings
        assert not {"/v1/chat/completions", "/v1/completions"} & set(seen["calls"])


async def test_dimensions_and_base64(tiny: Any, front: Any) -> None:
    import numpy as np

    async with front(tiny("sglang-embedding", matryoshka=(2, 3))) as server:

        async def vectors(**body: Any) -> Any:
            answer = await server.http.post("/v1/embeddings", json={"model": "tiny", "input": ["abc", "abcde"], **body})
            return answer.status_code, answer.json()

        status, plain = await vectors(encoding_format="float")
        assert status == 200
        assert [len(row["embedding"]) for row in plain["data"]] == [2048, 2048]
        assert plain["usage"]["prompt_tokens"] == 8
        _, coded = await vectors(encoding_format="base64")
        for one, other in zip(plain["data"], coded["data"], strict=True):
            found = np.frombuffer(base64.b64decode(other["embedding"]), dtype="<f4")
            assert found.tobytes() == np.asarray(one["embedding"], dtype="<f4").tobytes()
        _, short = await vectors(dimensions=2, encoding_format="base64")
        assert [len(base64.b64decode(row["embedding"])) for row in short["data"]] == [8, 8]
        for wrong in ({"dimensions": 5}, {"dimensions": 0}, {"encoding_format": "hex"}):
            status, told = await vectors(**wrong)
            assert status == 400, told


# --- logs, folders, orphans --------------------------------------------------------------------------------


def log_of(engine: Any) -> Path:
    found: Path = engine._running.process.home.log
    return found


async def test_an_engine_that_floods_its_log_is_served_and_ended_like_any_other(tiny: Any, front: Any) -> None:
    async with front(tiny(how={"floods": 2})) as server:
        assert (await server.chat()).status_code == 200
        engine = server.engine()
        async with asyncio.timeout(20):
            while not log_of(engine).with_name("engine.log.1").exists():
                await asyncio.sleep(0.01)
        assert (await server.chat()).status_code == 200
        family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        begun = time.monotonic()
        assert (await server.act("unload")).status_code == 200
        assert time.monotonic() - begun < 8
        assert not [process for process in family if process.is_running()]


def test_an_engine_that_never_stops_talking_leaves_its_guard_time_for_other_things() -> None:
    """A turn of listening ends, however much there is to be heard: else the end of its server would go unnoticed."""

    class Endless(Log):
        """Takes what it is given, and the engine has said as much again meanwhile."""

        def __init__(self) -> None:
            self.turns = 0

        def write(self, data: bytes) -> None:
            self.turns += 1
            assert self.turns < 1000, "it listens for ever"
            os.write(writing, b"x" * 1024)

    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        os.write(writing, b"x")
        log = Endless()
        guard = Guard.__new__(Guard)
        guard.log, guard.output, guard.talking = log, reading, True
        guard.read_log()
        assert 0 < log.turns < 100
    finally:
        os.close(reading)
        os.close(writing)


def test_a_log_whose_folder_was_cleared_stays_bounded(tmp_path: Path) -> None:
    """Temporary files that are old are removed on many machines, also while somebody uses them."""
    folder = tmp_path / "engine"
    folder.mkdir()
    log = Log(str(folder / "engine.log"), 1000)
    log.write(b"a" * 900)
    (folder / "engine.log").unlink()
    folder.rmdir()
    for _ in range(10):
        log.write(b"b" * 900)
    assert os.fstat(log._file).st_size <= 1000
    os.close(log._file)


def test_a_number_that_a_foreign_process_has_now_protects_no_orphan(home: Any, start: Any, tmp_path: Path) -> None:
    """The dead server's number is somebody else's now: what it left is an orphan all the same."""
    engine = start(home.model())
    about = log_of(engine).with_name("engine.json")
    told = json.loads(about.read_text())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        told["owner"]["pid"] = stranger.pid
        about.write_text(json.dumps(told))
        assert end_orphans() == ["tiny"]
        assert stranger.poll() is None
        stranger.communicate(b"\n")
    assert not psutil.pid_exists(engine.pid) or psutil.Process(engine.pid).status() == psutil.STATUS_ZOMBIE


def test_a_foreign_session_is_left_alone_though_an_orphans_child_joined_it(tmp_path: Path) -> None:
    """Its leader has the number that stands in the file, and another token: only what carries the token is ended."""
    wait = "import sys; print(flush=True); sys.stdin.read()"

    def began(token: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", wait],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, TOKEN: token},
            start_new_session=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process

    ours, stranger = began("aa01"), began("bb02")
    try:
        folder = state_folder() / "aa01"
        folder.mkdir()
        about = {"token": "aa01", "model": "m", "pid": stranger.pid, "owner": {"pid": 999_999_999, "began": "then"}}
        (folder / "engine.json").write_text(json.dumps(about))
        assert end_orphans() == ["m"]
        assert ours.wait(5) == -15
        assert stranger.poll() is None
    finally:
        for process in (ours, stranger):
            process.kill()
            process.communicate()
