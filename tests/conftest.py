"""What the tests across packages share: a real server, started as a user would start it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

SERVER_PYTHON = os.environ.get("SIE_SERVER_PYTHON", sys.executable)
"""Clients may want other versions than the server, which is then installed elsewhere."""
START_S = 120.0
STOP_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningServer:
    """A ``sie serve`` in a process of its own; ``url`` answers once the object exists."""

    def __init__(
        self, command: Sequence[str], cwd: Path, *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log or cwd / "server.txt"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _wait_until_ready(self) -> None:
        pause = threading.Event()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.output()}")
            try:
                if httpx.get(f"{self.url}/readyz", timeout=5).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            pause.wait(0.1)
        pytest.fail(f"the server was not ready within {START_S:.0f} s:\n{self.output()}")

    def load(self, model: str) -> None:
        """Load a model and wait for it, so that no test depends on how long that takes."""
        answer = httpx.post(f"{self.url}/v1/admin/models/{model}/load", timeout=START_S)
        assert answer.status_code == httpx.codes.OK, answer.text

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> int:
        """Ask it to stop, as a service manager would. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not stop within {STOP_S:.0f} s:\n{self.output()}")


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., RunningServer]]:
    """Start servers that end with the test session: ``start_server(config_text, *arguments, command=…)``."""
    running: list[RunningServer] = []

    def start(
        config: str | None = None,
        *arguments: str,
        command: Sequence[str] = (SERVER_PYTHON, "-m", "sie_core"),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RunningServer:
        folder = cwd or tmp_path_factory.mktemp("server")
        if config is not None:
            (folder / "sie.yaml").write_text(config, encoding="utf-8")
        running.append(RunningServer([*command, "serve", *arguments], folder, env=env))
        return running[-1]

    yield start
    for server in running:
        server.stop()
