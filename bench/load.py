"""Load from wrk, which is not the bottleneck: replayed request bodies, CPU seconds of the server beside the rate."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from attrs import frozen
from contestants import Server
from workload import write_bodies

SCRIPT = Path(__file__).parent / "replay.lua"


@frozen
class Load:
    """What one run showed. ``cpu_s_per_text`` is the server's CPU time, wrk's is not in it."""

    texts_per_s: float
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_text: float


def drive(server: Server, *, clients: int, seconds: float, texts_per_request: int = 1, model: str = "minilm") -> Load:
    """Load a server for so many seconds. Raises RuntimeError when any request fails: a failed one is a fast one."""
    with tempfile.TemporaryDirectory() as folder:
        bodies, result = Path(folder, "bodies"), Path(folder, "result.json")
        write_bodies(bodies, model=model, texts_per_request=texts_per_request)
        command = ["wrk", "--threads", "1", "--connections", str(clients), "--duration", f"{seconds:.0f}s"]
        command += ["--timeout", "60s", "--script", str(SCRIPT), server.url, "--", str(bodies)]
        before = server.cpu_seconds()
        done = subprocess.run(
            command, env={**os.environ, "BENCH_RESULT": str(result)}, capture_output=True, text=True, check=False
        )
        cpu_s = server.cpu_seconds() - before
        if done.returncode or not result.exists():
            raise RuntimeError(f"wrk against {server.name}: {done.stdout}{done.stderr}")
        seen = json.loads(result.read_text(encoding="utf-8"))
    if not seen["requests"]:
        raise RuntimeError(f"{server.name} finished no request in {seconds:.0f} s")
    if seen["errors"]:
        raise RuntimeError(f"{server.name}: {seen['errors']} of {seen['requests']} requests failed")
    texts = seen["requests"] * texts_per_request
    return Load(
        texts_per_s=texts / seen["seconds"],
        requests_per_s=seen["requests"] / seen["seconds"],
        p50_ms=seen["p50_ms"],
        p99_ms=seen["p99_ms"],
        cpu_s_per_text=cpu_s / texts,
    )
