"""A process that notes when it is asked to end, on the clock that all processes of a machine share.

The standard library alone: it also runs inside the environment of a real engine, as one more process of its group.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

__all__ = ["note_the_end", "wait"]


def note_the_end(*_: object) -> NoReturn:
    """For SIGTERM: note the time under this process's id in the folder that ``BENCH_ENGINE`` names, and end."""
    folder = json.loads(os.environ.get("BENCH_ENGINE", "{}")).get("signalled")
    if folder:
        Path(folder, str(os.getpid())).write_text(str(time.monotonic()), encoding="utf-8")
    os._exit(0)


def wait() -> NoReturn:
    """Do nothing else."""
    signal.signal(signal.SIGTERM, note_the_end)
    while True:
        signal.pause()


if __name__ == "__main__":
    wait()
