"""What the tests of the command line share: the `sie` script as a process, and servers with made-up models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

SCRIPT = Path(sys.executable).with_name("sie")

FAKES = """\
models:
  - {name: fast, adapter: fake, options: {dims: 4}}
  - {name: team/slow, adapter: fake, options: {load_s: 1.5, dims: 4}}
  - {name: gone, adapter: fake, options: {fail_load: ModelSourceNotFound}}
  - {name: nobody, adapter: no-such-adapter}
  - {name: free-size, adapter: fake, options: {dims: 8, matryoshka: null, max_length: 5}}
"""


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIE_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **extra}


@pytest.fixture(scope="session")
def sie(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `sie` with arguments, in an empty folder and without any SIE_ variable of ours, until it ends."""
    empty = tmp_path_factory.mktemp("nothing-here")

    def run(
        *arguments: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
        timeout: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *map(str, arguments)],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=_environment(env or {}),
            cwd=cwd or empty,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    """Start `sie` and go on: for processes that are to be disturbed. They are killed at the end of the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path, **options}
        process = subprocess.Popen([SCRIPT, *map(str, arguments)], env=_environment(env or {}), **options)
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def fake_server(start_server: Callable[..., Any]) -> Any:
    """A server with models that need no framework."""
    return start_server(FAKES, command=[str(SCRIPT)])


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Wait for something that another process does: the first true answer, or a failure after some seconds."""

    def wait(look: Callable[[], Any], *, seconds: float = 30.0, what: str = "what was waited for") -> Any:
        pause = threading.Event()
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not happen within {seconds:.0f} s")
            pause.wait(0.02)
        return found

    return wait


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Install a distribution with one plugin module; the environment that finds it."""
    site = tmp_path / "site"

    def install(name: str, source: str, *, plugin: str | None = None, version: str = "1.0") -> dict[str, str]:
        module = name.replace("-", "_")
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[sie]\n{plugin or name} = {module}\n", encoding="utf-8")
        paths = [str(site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    return install


class Server:
    """A server whose output is read from a file, so that it can't fill a pipe."""

    def __init__(
        self, launch: Any, folder: Path, until: Callable[..., Any], config: str, *arguments: Any, env: Any
    ) -> None:
        self.log = folder / "output.txt"
        self._until = until
        (folder / "sie.yaml").write_text(config, encoding="utf-8")
        with self.log.open("wb") as output:
            self.process: subprocess.Popen[bytes] = launch(
                "serve", "--port", 0, *arguments, env=env, stdout=output, stderr=output
            )
        self.url = self.wait_for("SIE is ready at ").split("SIE is ready at ")[1].split()[0]

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, words: str) -> str:
        return str(self._until(lambda: self.text if words in self.text else "", what=f"{words!r}", seconds=60))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def model(self, name: str) -> dict[str, Any]:
        models = httpx.get(f"{self.url}/v1/status").json()["models"]
        return next(dict(model) for model in models if model["name"] == name)

    def encode(self, model: str = "a") -> httpx.Response:
        return httpx.post(f"{self.url}/v1/encode/{model}", json={"items": [{"text": "x"}]}, timeout=60)


@pytest.fixture
def server(launch: Any, tmp_path: Path, until: Callable[..., Any]) -> Callable[..., Server]:
    def start(config: str, *arguments: Any, env: Any = None) -> Server:
        return Server(launch, tmp_path, until, config, *arguments, env=env)

    return start
