"""One engine's processes, seen from the server: started through a guard, watched, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sie_core import EngineStartError

from sie_adapters_sglang import _guard
from sie_adapters_sglang._spawn import spawn
from sie_adapters_sglang._state import TOKEN, Home, kill_marked

__all__ = ["EngineProcess"]

_LOG_BYTES = 4 * 1024 * 1024
_GUARD_S = 10.0
"""How long a guard may take to say that the engine runs, and to end once the engine has."""
_POLL_S = 0.1


class EngineProcess:
    """Started by its constructor. ``on_end`` is called once, from a thread of its own, when all of it is gone.

    ``home`` says how long it has between SIGTERM and SIGKILL, whoever ends it and however that came about.

    Raises:
        EngineStartError: nothing could be started at all.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        home: Home,
        *,
        secrets: Sequence[str] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.home = home
        self.exit_code: int | None = None
        self.ended = threading.Event()
        self.pid = 0
        self._secrets = tuple(secrets)
        self._on_end = on_end
        self._running = threading.Event()
        self._lock = threading.Lock()
        guard = [
            sys.executable,
            "-I",
            "-S",
            str(Path(_guard.__file__)),
            str(home.log),
            str(_LOG_BYTES),
            str(home.grace_s),
            *command,
        ]
        try:
            self._guard = spawn(
                guard,
                env={**os.environ, **env, TOKEN: home.token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=home.folder,
            )
        except (OSError, ValueError) as error:  # a ValueError: what no variable or argument can hold
            raise EngineStartError(f"the engine's guard could not be started: {error}") from error
        threading.Thread(target=self._listen, name=f"sie-sglang-{self._guard.pid}", daemon=True).start()
        if not self._running.wait(_GUARD_S) or not self.pid:
            self.kill()
            raise EngineStartError(f"{command[0]} could not be started: {self._complaint or 'no answer'}")
        try:
            home.started(self.pid)
        except BaseException:
            self.kill()
            raise

    _complaint = ""

    @property
    def alive(self) -> bool:
        return not self.ended.is_set()

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after ``grace_s`` seconds. True: all of it is gone."""
        self._tell(f"stop {grace_s}\n")
        return self.ended.wait(grace_s + _GUARD_S)

    def end(self) -> None:
        """SIGTERM, and SIGKILL after its grace. Returns when all of it is gone."""
        if not self.stop(self.home.grace_s):
            self.kill()

    def kill(self) -> None:
        """At once, and without the guard's help if need be. Returns when all of it is gone.

        That may take: a large pinned pool is given back within tens of seconds, and until then it holds its memory.
        """
        self._tell("stop 0\n")
        if not self.ended.wait(_GUARD_S):
            self._guard.kill()
            self.ended.wait()

    def log_mark(self) -> tuple[int, int]:
        """Changes whenever the engine says something."""
        try:
            about = self.home.log.stat()
        except OSError:
            return (0, 0)
        return (about.st_ino, about.st_size)

    def log_tail(self, lines: int = 25) -> str:
        """The last lines that the engine said, without its keys."""
        kept: deque[str] = deque(maxlen=lines)
        for line in self.log_lines(64 * 1024):
            for secret in self._secrets:  # before anything is cut: half a key is much of a key
                line = line.replace(secret, "***")
            kept.append(line[:500])
        return "\n".join(kept)

    def log_lines(self, most: int = _LOG_BYTES) -> Iterator[str]:
        """What it said, as it said it, keys and all: of each of the two files the last ``most`` bytes.

        No key is in halves: where the older file ends in one, the newer begins with the rest.
        """
        longest = max(map(len, self._secrets), default=0)
        said = b""
        for path in (self.home.log.with_name(self.home.log.name + ".1"), self.home.log):
            with suppress(OSError), path.open("rb") as file:
                skipped = max(0, path.stat().st_size - most)
                file.seek(skipped)
                data = file.read()
                said = data[longest:] if skipped else said + data
        yield from said.decode(errors="replace").splitlines()

    def _tell(self, line: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            assert self._guard.stdin is not None
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _listen(self) -> None:
        assert self._guard.stdout is not None and self._guard.stderr is not None and self._guard.stdin is not None
        for line in self._guard.stdout:
            said = json.loads(line)
            if "pid" in said:
                self.pid = said["pid"]
                self._running.set()
            if "exit" in said:
                self.exit_code = said["exit"]
        # The guard is gone; without a last word it was killed, and the engine may still be there.
        complaint = self._guard.stderr.read().decode(errors="replace").strip().splitlines()
        self._complaint = complaint[-1] if complaint else ""
        if self.exit_code is None:
            while kill_marked(self.home.token, self.pid):
                time.sleep(_POLL_S)
            self.exit_code = -signal.SIGKILL
        self._guard.wait()
        with self._lock, suppress(OSError):
            self._guard.stdin.close()
        self._guard.stdout.close()
        self._guard.stderr.close()
        self.ended.set()
        self._running.set()
        self._on_end()
