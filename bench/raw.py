"""The raw model (see raw_model.py) in a process of its own that stays up between its turns, as the servers do."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from attrs import asdict
from load import Load

WINDOW = 32


class RawProcess:
    """Use it as a context manager. ``kind``: what the model is, as ``raw_families`` knows it, or dense."""

    def __init__(self, model: Path, kind: str = "dense", *, window: int = WINDOW) -> None:
        self._window = window
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "TOKENIZERS_PARALLELISM": "false",
            # Without it, a busy neighbour makes the bare model many times slower, and everything else look good.
            "GOMP_SPINCOUNT": "1000",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(model), kind],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> RawProcess:
        self.run(self._window, 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, window: int, seconds: float) -> Load:
        """Run windows of so many texts, in order of arrival, for so many seconds."""
        return Load(**self._ask([window, seconds]))

    def figures(self, window: int) -> list[float]:
        """What the model makes of the first window, in a few numbers: others should make the same of it."""
        return [float(number) for number in self._ask([window, 0])]

    def _ask(self, what: list[float]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the raw model's process ended with {self._process.wait()}")
        return json.loads(line)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)


def _serve(folder: str, kind: str) -> None:
    """Answer a line with a line: [window, seconds] with what a turn showed, [window, 0] with figures."""
    from raw_families import FAMILIES

    family = FAMILIES[kind]
    model = family.model(folder)
    for line in sys.stdin:
        size, seconds = json.loads(line)
        batches = list(family.windows(size))
        if not seconds:
            print(json.dumps(family.figures(model.encode(batches[0]))), flush=True)
            continue
        taken: list[float] = []
        start, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            before = time.perf_counter()
            model.encode(batches[len(taken) % len(batches)])
            taken.append(time.perf_counter() - before)
        encoded = len(taken) * size
        wall = time.perf_counter() - start
        load = Load(
            texts_per_s=encoded / wall,
            requests_per_s=len(taken) / wall,
            p50_ms=statistics.median(taken) * 1e3,
            p99_ms=max(taken) * 1e3 if len(taken) < 100 else statistics.quantiles(taken, n=100)[98] * 1e3,
            cpu_s_per_text=(time.process_time() - cpu) / encoded,
        )
        print(json.dumps(asdict(load)), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
