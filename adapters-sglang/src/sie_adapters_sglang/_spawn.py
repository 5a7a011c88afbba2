"""Starts guards, all from one thread that never ends.

A signal that asks to be sent "when the parent dies" is sent when the *thread* that started the child ends. Engines'
worker threads do end, so nothing may be started from them.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["spawn"]

_Job = tuple[Future["subprocess.Popen[bytes]"], Callable[[], "subprocess.Popen[bytes]"]]
_lock = threading.Lock()
_jobs: SimpleQueue[_Job] | None = None


def _run(jobs: SimpleQueue[_Job]) -> None:
    while True:
        future, start = jobs.get()
        try:
            future.set_result(start())
        except BaseException as error:
            future.set_exception(error)


def spawn(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
    """``subprocess.Popen`` on the permanent thread. Raises as it does."""
    global _jobs
    with _lock:
        if _jobs is None:
            _jobs = SimpleQueue()
            threading.Thread(target=_run, args=(_jobs,), name="sie-sglang-spawn", daemon=True).start()
    future: Future[subprocess.Popen[bytes]] = Future()
    _jobs.put((future, lambda: subprocess.Popen(command, **settings)))
    return future.result()
