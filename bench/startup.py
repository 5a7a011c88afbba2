"""How long a user waits before anything happens: imports and help, in fresh processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

TRIES = 11
HEAVY = ("torch", "transformers", "starlette", "uvicorn", "opentelemetry", "httpx")
IMPORT = """
import sys, time
start = time.perf_counter()
import sie_core
print(time.perf_counter() - start)
heavy = [name for name in {heavy!r} if name in sys.modules]
sys.exit(f"import sie_core loads {{heavy}}" if heavy else 0)
"""


def startup_s() -> tuple[float, float]:
    """Seconds that ``import sie_core`` and ``sie --help`` take, medians. Raises when either loads something heavy."""
    imports = [float(_run([sys.executable, "-c", IMPORT.format(heavy=HEAVY)])[0]) for _ in range(TRIES)]
    sie = str(Path(sys.executable).with_name("sie"))
    helps = [_run([sie, "--help"])[1] for _ in range(TRIES)]
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", sie, "--help"], capture_output=True, text=True, check=True
    ).stderr
    heavy = [name for name in HEAVY if f"| {name}\n" in shown.replace("|   ", "| ")]
    if heavy:
        raise RuntimeError(f"sie --help loads {heavy}")
    return statistics.median(imports), statistics.median(helps)


def _run(command: list[str]) -> tuple[str, float]:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, time.perf_counter() - started
