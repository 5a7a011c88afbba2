"""The guard: a small process between the server and an engine. Run as a script, with nothing but the standard library.

It starts the engine in a session of its own and ends all of it when its input closes, which is what happens when the
server dies, however it dies. It keeps the engine's log within bounds, and adopts (on Linux) what the engine's processes
leave behind, so that a scheduler whose parent died is ended with the rest.

Its arguments: the log, its bytes at most, the seconds between SIGTERM and SIGKILL where nobody says otherwise, and the
engine's command line. Spoken to by lines: ``stop SECONDS`` ends the engine with so long between them. It says, a JSON
object a line: ``{"pid": P}`` when the engine runs, ``{"exit": CODE}`` when all of it is gone (negative: the signal).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_SET_CHILD_SUBREAPER = 36


class Log:
    """The last of what the engine said: one file, and the one before it."""

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit, self._size = path, limit, 0
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # neither a full disk nor a folder that was cleared must end the engine
            if self._size + len(data) > self._limit and self._size:
                self._turn()
            self._size += len(data)
            os.write(self._file, data)

    def _turn(self) -> None:
        self._size = 0
        try:
            os.replace(self._path, self._path + ".1")  # noqa: PTH105 - text all the way
            before, self._file = self._file, self._open()
            os.close(before)
        except OSError:  # it has no name any more, and must not grow for ever
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)


def adopt() -> None:
    """Make orphans of our descendants our children. Elsewhere than on Linux they go to init."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def descendants() -> list[int]:
    found, new = [], children_of(os.getpid())
    while new:
        found += new
        new = [child for pid in new for child in children_of(pid)]
    return found


class Guard:
    """One engine from its start to the end of its last process."""

    def __init__(self, command: list[str], log: Log, grace_s: float) -> None:
        self.log = log
        self.grace_s = grace_s
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        assert self.child.stdout is not None
        self.output = self.child.stdout.fileno()
        os.set_blocking(self.output, False)
        self.kill_at: float | None = None
        self.killed = False
        self.stopping = False
        self.exit: int | None = None
        self.talking = True

    def say(self, **what: int) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(what).encode() + b"\n")

    def signal_all(self, number: int) -> None:
        """The engine's process group, and whatever left it."""
        with contextlib.suppress(OSError):
            os.killpg(self.child.pid, number)
        for pid in descendants():
            with contextlib.suppress(OSError):
                if os.getpgid(pid) != self.child.pid:
                    os.kill(pid, number)

    def stop(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        self.kill_at = until if self.kill_at is None else min(self.kill_at, until)
        if not self.stopping:
            self.stopping = True
            self.signal_all(signal.SIGTERM)

    def reap(self) -> bool:
        """Collect the dead. True once nothing of the engine is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                break
            if pid == self.child.pid:
                self.exit = os.waitstatus_to_exitcode(status)
                self.stop(self.grace_s if self.kill_at is None else max(0.0, self.kill_at - time.monotonic()))
        return False

    def read_log(self, most: int = 16) -> None:
        """At most so much at a time: an engine that never stops talking must not keep its end from being noticed."""
        for _ in range(most):
            if not self.talking:
                return
            try:
                data = os.read(self.output, 65536)
            except BlockingIOError:
                return
            self.talking = bool(data)
            if data:
                self.log.write(data)

    def obey(self, buffer: bytearray) -> bool:
        """Read commands. False: the server is gone."""
        data = os.read(0, 4096)
        buffer += data
        while b"\n" in buffer:
            line, _, rest = bytes(buffer).partition(b"\n")
            buffer[:] = rest
            self.stop(float(line.split()[1]))
        return bool(data)

    def run(self, wake: int) -> None:
        self.say(pid=self.child.pid)
        listening, buffer = True, bytearray()
        while not self.reap():
            wanted = [wake, *([0] if listening else []), *([self.output] if self.talking else [])]
            wait = None if self.kill_at is None else max(0.02, self.kill_at - time.monotonic())
            ready = select.select(wanted, [], [], 0.1 if self.killed else wait)[0]
            if wake in ready:
                os.read(wake, 4096)
            if self.output in ready:
                self.read_log()
            if 0 in ready and not self.obey(buffer):
                listening = False
                self.stop(self.grace_s)
            if self.kill_at is not None and time.monotonic() >= self.kill_at:
                self.killed = True
                self.signal_all(signal.SIGKILL)
        with contextlib.suppress(OSError):  # where orphans can't be adopted, they may still be in the group
            os.killpg(self.child.pid, signal.SIGKILL)
        self.read_log(64)
        self.say(exit=self.exit if self.exit is not None else -signal.SIGKILL)


def main() -> None:
    log, limit, grace, *command = sys.argv[1:]
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    os.set_blocking(readable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # the server says when; its end is the end of the input
    adopt()
    Guard(command, Log(log, int(limit)), float(grace)).run(readable)


if __name__ == "__main__":
    main()
