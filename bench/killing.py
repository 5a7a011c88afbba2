"""A server that is killed with its engine running: how long until the engine's processes are told, and are gone."""

from __future__ import annotations

import signal
import threading
import time

import psutil
from attrs import frozen
from launched import Serving, is_free

__all__ = ["End", "kill"]

_LIMIT_S = 60.0
_POLL_S = 0.002


@frozen
class End:
    """Seconds from the server's end: until the last process was told to end, the last port was free, all were gone."""

    told_s: float
    free_s: float
    gone_s: float
    processes: int
    ports: int


def kill(serving: Serving) -> End:
    """Kill the server, and watch. Raises RuntimeError if something of its engine is left, or was never told."""
    processes, ports = serving.tree(), serving.ports()
    began = time.monotonic()
    serving.server.process.send_signal(signal.SIGKILL)
    serving.server.process.wait()
    free_s = gone_s = None
    pause = threading.Event()
    while free_s is None or gone_s is None:
        now = time.monotonic() - began
        if free_s is None and all(is_free(port) for port in ports):
            free_s = now
        if gone_s is None and not any(_runs(process) for process in processes):
            gone_s = now
        if now > _LIMIT_S:
            raise RuntimeError(f"the server was killed, and {_LIMIT_S:.0f} s later its engine is still there")
        pause.wait(_POLL_S)
    told = [float(file.read_text(encoding="utf-8")) - began for file in serving.signalled.iterdir()]
    wanted = len(processes) if serving.witnesses is None else serving.witnesses
    if len(told) != wanted:
        raise RuntimeError(f"{len(told)} of {wanted} processes were told to end before they were killed")
    return End(max(told), free_s, gone_s, len(processes), len(ports))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
