"""A whole server with SGLang engines, through its front door: the command `sie serve` and public clients."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx
import psutil
import pytest
from sie_adapters_sglang._ports import is_free, take_ports
from sie_core import ModelSpec


def as_config(model: ModelSpec, name: str, **more: Any) -> dict[str, Any]:
    """A model as the configuration file has it, without what is default."""
    options = attrs.asdict(model.options)
    defaults = attrs.asdict(type(model.options)())
    changed = {key: value for key, value in options.items() if value != defaults[key]}
    return {"name": name, "adapter": model.adapter, "source": str(model.source), "options": changed, **more}


class Served:
    """``sie serve`` in a process of its own. ``env``: variables on top of the test's."""

    def __init__(self, folder: Path, config: dict[str, Any], *arguments: str, **env: str) -> None:
        self._like = partial(Served, folder, **env), config, arguments
        (self.port,) = take_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        file = folder / "sie.yaml"
        file.write_text(json.dumps(config))
        self._log = (folder / "server.log").open("w")
        everything = {**os.environ, **env}
        command = [sys.executable, "-m", "sie_core", "serve", "--port", str(self.port), "--config", str(file)]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=self._log, stderr=subprocess.STDOUT, env=everything
        )
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120)

    def again(self, *models: dict[str, Any]) -> Served:
        """The next one, in the same folder; with other models, if any are named."""
        make, config, arguments = self._like
        return make({"models": list(models)} if models else config, *arguments)

    def wait_ready(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                if self.http.get("/readyz").status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, Path(self._log.name).read_text()
        raise AssertionError(Path(self._log.name).read_text())

    def ask(self, model: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        """A request that waits as long as the model takes to come."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **body}
        until = time.monotonic() + 200
        while True:
            answer = self.http.post(path, json=body)
            if answer.status_code != 503 or time.monotonic() > until:
                return answer

    def states(self) -> dict[str, str]:
        return {row["name"]: row["residency"] for row in self.http.get("/v1/status").json()["models"]}

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "sglang" in " ".join(child.cmdline())]

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._log.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def make(*models: dict[str, Any], arguments: tuple[str, ...] = (), **settings: Any) -> Served:
        started.append(Served(tmp_path, {"models": list(models), **settings}, *arguments))
        started[-1].wait_ready()
        return started[-1]

    yield make
    for each in started:
        each.close()


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_two_engines_take_turns_on_one_device(home: Any, serve: Any, helpers: Any) -> None:
    """Each holds 48 MiB of a device with 80: the one that is asked wakes, the other one parks."""
    helpers.save_model(home.model_folder, width=2048, rows=4096)
    model = home.model(how={"weights_gb": 1 / 64, "kv_gb": 1 / 32}, max_total_tokens=4096)
    a, b = as_config(model, "a"), as_config(model, "b")
    server = serve(a, b, arguments=("--emulate-device", "80MiB"), memory={"host_cache_bytes": "64MiB"})
    for name in ("a", "b", "a", "b", "b", "a"):
        answer = server.ask(name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 w2 w3 w4 "
        assert answer.json()["model"] == name
        assert server.states()[name] == "resident"
    assert server.states() == {"a": "resident", "b": "parked"}
    status = {row["name"]: row for row in server.http.get("/v1/status").json()["models"]}
    assert status["b"]["host_bytes"] == 16 << 20
    assert len(server.engines()) >= 2


@pytest.mark.slow
def test_a_killed_engine_is_loaded_again_and_a_killed_server_leaves_nothing(home: Any, serve: Any) -> None:
    server = serve(as_config(home.model(), "a"))
    assert server.ask("a").status_code == 200
    running = server.engines()
    leader = next(p for p in running if p.cmdline()[1:3] == ["-m", "sglang.launch_server"])
    leader.kill()
    answer = server.ask("a")
    if answer.status_code == 500:  # asked before the death was known: that request hears of it, the next one loads
        assert "signal 9" in answer.text
        answer = server.ask("a")
    assert answer.status_code == 200, answer.text
    everything = server.engines()
    words = [process.cmdline() for process in everything]
    ports = [int(each[each.index(flag) + 1]) for each in words for flag in ("--port", "--nccl-port")]
    assert ports
    server.process.kill()
    server.process.wait()
    until = time.monotonic() + 5
    while any(runs(process) for process in everything) and time.monotonic() < until:
        os.sched_yield()
    assert not [process for process in everything if runs(process)]
    # The next one finds no port taken, and nobody left behind.
    assert all(map(is_free, (server.port, *ports)))
    again = server.again()
    try:
        again.wait_ready()
        assert again.ask("a").status_code == 200
        assert "an earlier server left" not in again.log()
    finally:
        again.close()


@pytest.mark.slow
def test_chat_with_an_embedding_model_is_refused_and_embedding_goes_on(home: Any, serve: Any) -> None:
    server = serve(as_config(home.model("sglang-embedding"), "e"))
    body = {"model": "e", "input": ["abc", "abcde"], "encoding_format": "float"}
    until = time.monotonic() + 60
    while (answer := server.http.post("/v1/embeddings", json=body)).status_code == 503 and time.monotonic() < until:
        pass
    assert answer.status_code == 200, answer.text
    assert [len(row["embedding"]) for row in answer.json()["data"]] == [8, 8]
    assert server.ask("e").status_code == 400
    assert server.http.post("/v1/embeddings", json=body).status_code == 200


# --- the real one ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_server(real: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("real")
    env = {"SIE_STATE_DIR": str(folder / "state"), "SIE_CACHE_DIR": str(folder / "cache")}
    model = real.model(tool_call_parser="qwen25")
    server = Served(folder, {"models": [as_config(model, "tiny")]}, **env)
    try:
        server.wait_ready()
        assert server.ask("tiny").status_code == 200
        yield server
    finally:
        server.close()


@pytest.mark.slow
def test_the_openai_client_talks_to_the_real_one(real_server: Served) -> None:
    openai = pytest.importorskip("openai")
    server = real_server
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "hello"}]
        settings = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
        more = {"ignore_eos": True, "skip_special_tokens": False}  # weights are random: it may say nothing else
        whole = client.chat.completions.create(**settings, extra_body=more)
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 6
        stream = client.chat.completions.create(**settings, extra_body=more, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text
        assert text == whole.choices[0].message.content


@pytest.mark.slow
def test_the_real_ones_refusals_are_the_clients_to_mend(real: Any, real_server: Served) -> None:
    openai = pytest.importorskip("openai")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=r"(?i)grammar"):
                client.chat.completions.create(**ask, response_format=form, stream=stream)
        if real.grammar:
            answer = client.chat.completions.create(**ask, extra_body={"regex": "[ab]{3}"})
            assert set(answer.choices[0].message.content) <= {"a", "b"}
        assert client.chat.completions.create(**ask).choices
    assert real_server.states() == {"tiny": "resident"}


def listening(processes: list[psutil.Process]) -> set[int]:
    """The ports that these processes listen on."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while any(map(runs, processes)) and time.monotonic() < until:
        psutil.wait_procs(processes, timeout=0.05)
    return not any(map(runs, processes))


def processes_of(server: Served) -> list[psutil.Process]:
    """Its engine's, the first one first."""
    leader = psutil.Process(os.getsid(server.engines()[-1].pid))
    return [leader, *leader.children(recursive=True)]


@pytest.mark.slow
def test_a_real_engine_that_crashes_is_loaded_again(real_server: Served) -> None:
    server, everybody = real_server, processes_of(real_server)
    assert len(everybody) > 2
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        assert json.loads(next(lines))["choices"]
        everybody[0].kill()
        rest = list(lines)
    assert '"error"' in rest[-1] or '"error"' in rest[-2], rest[-2:]
    assert '"finish_reason":"length"' not in "".join(rest)
    assert gone(everybody, 5)
    assert server.ask("tiny").status_code == 200
    assert server.states() == {"tiny": "resident"}
    assert processes_of(server)[0].pid != everybody[0].pid


@pytest.mark.slow
def test_the_server_of_a_real_engine_killed(real_server: Served, home: Any) -> None:
    """First the server alone, then with the guard beside it: then nobody is left to end the engine but the next one."""
    first = real_server
    everything = psutil.Process(first.process.pid).children(recursive=True)
    ports = listening(everything)
    assert len(everything) > 3
    assert all(map(answers, ports))
    assert len(ports) > 1
    first.process.kill()
    first.process.wait()
    assert gone(everything, 25)  # SIGTERM first, and as long as the engine of a living server has
    assert not any(map(answers, ports))

    with closing(first.again()) as second:
        second.wait_ready()
        assert second.ask("tiny").status_code == 200
        assert "an earlier server left" not in second.log()
        everything = processes_of(second)
        guard = psutil.Process(everything[0].ppid())
        guard.suspend()
        second.process.kill()
        second.process.wait()
        guard.kill()
        assert not gone(everything, 0.5)

    with closing(first.again(as_config(home.model(), "tiny"))) as third:
        third.wait_ready()
        assert third.ask("tiny").status_code == 200
        assert f"left the engine of tiny running ({len(everything)} processes)" in third.log()
        assert gone(everything, 0)
