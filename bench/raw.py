"""The raw model (see raw_model.py) in a process of its own that stays up between its turns, as the servers do."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
from attrs import asdict
from load import Load
from workload import texts, windows

WINDOW = 32


class RawProcess:
    """Use it as a context manager."""

    def __init__(self, model: Path) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "TOKENIZERS_PARALLELISM": "false",
            # Without it, a busy neighbour makes the bare model many times slower, and everything else look good.
            "GOMP_SPINCOUNT": "1000",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(model)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> RawProcess:
        self.run(WINDOW, 1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, window: int, seconds: float) -> Load:
        """Encode windows of so many texts, in order of arrival, for so many seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([window, seconds]), file=self._process.stdin, flush=True)
        return Load(**json.loads(self._process.stdout.readline()))

    def rss_bytes(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)


def _serve(folder: str) -> None:
    """Answer one line with one line: [window, seconds] with what a turn showed."""
    from raw_model import RawModel

    model, everything = RawModel(folder), texts()
    for line in sys.stdin:
        size, seconds = json.loads(line)
        batches = list(windows(everything, size))
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
    _serve(sys.argv[1])
