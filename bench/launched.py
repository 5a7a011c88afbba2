"""Servers with an engine in processes of its own: the stand-in, or the real SGLang on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import contestants
import psutil
from attrs import frozen
from client import Client
from contestants import Server

__all__ = ["Serving", "installed", "is_free", "serving"]

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "adapters-sglang" / "tests" / "support"
VERSION = "0.5.20"
"""What the stand-in passes for."""
_ASK_S = 60.0
_MODULE = "sglang.launch_server"
_LAUNCH = f"import sys; sys.path.insert(0, {str(HERE)!r}); import standin; standin.start()\n"
_ASK = "import importlib.metadata as m; print(m.version('sglang'))"
_TINY = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import tiny; tiny.save_gpt2(pathlib.Path(sys.argv[2]))"
_WITNESS = f"""
import os, runpy, sys
if {_MODULE!r} in sys.orig_argv and os.fork() == 0:
    runpy.run_path({str(HERE / "witness.py")!r}, run_name="__main__")
"""
"""Brings a witness into the process group of a real engine."""


@frozen
class Serving:
    """A server with the model ``chat`` loaded.

    ``signalled``: where ``witnesses`` processes of the engine note when they are asked to end; ``None``: all of them.
    """

    server: Server
    version: str
    signalled: Path
    witnesses: int | None

    def engine(self) -> psutil.Process:
        """The engine's first process."""
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            if process.cmdline()[1:3] == ["-m", _MODULE]:
                return process
        raise RuntimeError("the server has no engine")

    def engine_port(self) -> int:
        """Where the engine answers."""
        command = self.engine().cmdline()
        return int(command[command.index("--port") + 1])

    def server_cpu_s(self) -> float:
        """CPU time of the server's own process: the engine's is not in it."""
        used = psutil.Process(self.server.process.pid).cpu_times()
        return used.user + used.system

    def engine_cpu_s(self) -> float:
        """CPU time of the engine, and of what belongs to it."""
        return sum(used.user + used.system for used in (each.cpu_times() for each in self.tree()))

    def ask(self) -> None:
        """One short answer. Raises URLError."""
        body = json.dumps({"model": "chat", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]})
        url = f"http://127.0.0.1:{self.server.port}/v1/chat/completions"
        request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ASK_S):
            pass

    def tree(self) -> list[psutil.Process]:
        """The processes of the engine, without the guard between it and the server."""
        engine = self.engine()
        return [engine, *engine.children(recursive=True)]

    def ports(self) -> list[int]:
        """All ports that the engine listens on."""
        found = (
            each.laddr.port for one in self.tree() for each in one.net_connections("tcp") if each.status == "LISTEN"
        )
        return sorted(set(found))


def installed(python: Path) -> str:
    """The version of SGLang that an interpreter has. Raises CalledProcessError: none."""
    done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def serving(*, step_s: float = 0.0, python: Path | None = None) -> Iterator[Serving]:
    """Run a server with the stand-in, or with the SGLang that ``python`` has.

    ``step_s``: seconds between two pieces of a stream of the stand-in; 0: as fast as they are read.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("model", "site", "signalled"):
            (folder / each).mkdir()
        if python is None:
            version, options = VERSION, _standin(folder, step_s)
        else:
            version = installed(python)
            options = _real(folder, python, version)
        model = {"name": "chat", "adapter": "sglang-generation", "source": f"path:{folder / 'model'}"}
        config = json.dumps({"models": [{**model, "device": "cpu", "options": options}]})
        more = {"SIE_STATE_DIR": str(folder), "SIE_CACHE_DIR": str(folder)}
        with contestants.sie(folder, config, more=more) as server:
            with closing(Client(server)) as client:
                client.act("chat", "load")
            yield Serving(server, version, folder / "signalled", None if python is None else 1)


def _standin(folder: Path, step_s: float) -> dict[str, Any]:
    site = folder / "site"
    (site / "sglang").mkdir()
    (site / "sglang" / "__init__.py").touch()
    (site / "sglang" / "launch_server.py").write_text(_LAUNCH, encoding="utf-8")
    about = site / f"sglang-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n", encoding="utf-8")
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
    model = folder / "model"
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
    header = json.dumps({"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    how = {"step_s": step_s, "signalled": str(folder / "signalled")}
    return _options(Path(sys.executable), [site], {"BENCH_ENGINE": json.dumps(how)})


def _real(folder: Path, python: Path, version: str) -> dict[str, Any]:
    """A tiny model with random weights, and what SGLang needs where there is no GPU."""
    old = version.startswith("0.5.10")
    shims = [SUPPORT / "shims" / "all", *([SUPPORT / "shims" / "v0510"] if old else [])]
    path = os.pathsep.join(map(str, shims))
    made = [str(python), "-c", _TINY, str(SUPPORT), str(folder / "model")]
    done = subprocess.run(made, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{python} could not make a model: {done.stderr.strip()[-500:]}")
    # Python runs the first sitecustomize.py that it finds, and no other.
    shim = (SUPPORT / "shims" / "all" / "sitecustomize.py").read_text(encoding="utf-8")
    (folder / "site" / "sitecustomize.py").write_text(shim + _WITNESS, encoding="utf-8")
    how = {"BENCH_ENGINE": json.dumps({"signalled": str(folder / "signalled")})}
    options = _options(python, [folder / "site", *shims], how)
    options |= {"attention_backend": "torch_native", "load_format": "dummy", "warmup": False, "max_total_tokens": 4096}
    return options | ({"dtype": "float32", "grammar_backend": "none"} if old else {})


def _options(python: Path, path: list[Path], env: Mapping[str, str]) -> dict[str, Any]:
    return {"python": str(python), "env": {"PYTHONPATH": os.pathsep.join(map(str, path)), **env}}
