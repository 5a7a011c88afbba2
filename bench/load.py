"""Load from wrk, which is not the bottleneck: replayed request bodies, CPU seconds of the server beside the rate.

Requests of which there are few a second come from threads here.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen
from contestants import Server
from results import percentile
from workload import write_bodies, write_lines

SCRIPT = Path(__file__).parent / "replay.lua"
_ANSWER_S = 120.0


@frozen
class Load:
    """What one run showed. ``cpu_s_per_text`` is the server's CPU time, wrk's is not in it."""

    texts_per_s: float
    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_text: float


def drive(server: Server, *, clients: int, seconds: float, texts_per_request: int = 1, model: str = "minilm") -> Load:
    """Load a server with embeddings requests for so many seconds. Raises as ``replay``."""
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder, "bodies")
        write_bodies(bodies, model=model, texts_per_request=texts_per_request)
        return _wrk(server, server.url, bodies, clients, seconds, texts_per_request)


def replay(
    server: Server, path: str, bodies: Sequence[str], *, clients: int, seconds: float, accept: str = "application/json"
) -> Load:
    """Load a route of a server for so many seconds, with bodies of one text each.

    Raises RuntimeError when any request fails: a failed one is a fast one.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bodies")
        write_lines(file, bodies)
        return _wrk(server, server.at(path), file, clients, seconds, 1, accept)


def in_turn(
    server: Server, path: str, bodies: Sequence[str], *, clients: int, seconds: float, texts_per_request: int
) -> Load:
    """As ``replay``, for requests so long that those which wrk cuts off at the end would make a difference.

    No client begins another request after ``seconds``; all are waited for, and the time is that of the last.
    """
    waiting, lock, taken = itertools.cycle(bodies), threading.Lock(), list[float]()
    began, before = time.perf_counter(), server.cpu_seconds()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_ANSWER_S)
        with contextlib.closing(connection):
            while time.perf_counter() - began < seconds:
                with lock:
                    body = next(waiting)
                start = time.perf_counter()
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                said = answer.read()
                if answer.status != http.HTTPStatus.OK:
                    raise RuntimeError(f"{server.name}: {said.decode(errors='replace')}")
                taken.append(time.perf_counter() - start)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client) for _ in range(clients)]:
            done.result()
    wall = time.perf_counter() - began
    texts = len(taken) * texts_per_request
    return Load(
        texts_per_s=texts / wall,
        requests_per_s=len(taken) / wall,
        p50_ms=percentile(taken, 50) * 1e3,
        p99_ms=percentile(taken, 99) * 1e3,
        cpu_s_per_text=(server.cpu_seconds() - before) / texts,
    )


def _wrk(
    server: Server, url: str, bodies: Path, clients: int, seconds: float, texts_per_request: int, accept: str = ""
) -> Load:
    result = bodies.with_name("result.json")
    command = ["wrk", "--threads", "1", "--connections", str(clients), "--duration", f"{max(1, seconds):.0f}s"]
    command += ["--timeout", "60s", "--script", str(SCRIPT), url, "--", str(bodies)]
    told = {"BENCH_RESULT": str(result), "BENCH_ACCEPT": accept}
    before = server.cpu_seconds()
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, check=False)
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
