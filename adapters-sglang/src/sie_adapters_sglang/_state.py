"""What is kept on disk of running engines, so that the next server finds those that a dead one left behind.

A folder for each engine, readable by its owner only: ``engine.json`` (who started it), its log, and while it starts the
file with its keys. An engine carries a random token in its environment: that, and nothing less, proves that a process
is ours.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from attrs import asdict, frozen
from sie_core import EngineStartError

__all__ = ["GRACE_S", "TOKEN", "Home", "end_orphans", "kill_marked", "state_folder"]

log = logging.getLogger(__name__)

TOKEN = "SIE_ENGINE_TOKEN"
"""The variable that marks a process as an engine's."""
GRACE_S = 20.0
"""Between SIGTERM and SIGKILL, unless a model says otherwise."""
_LOOK_S = 0.05
_GIVE_UP_S = 22.0
"""Less than the core waits for what a model needs."""
_lock = threading.Lock()
_told: dict[str, float] = {}
"""By token, when an engine that was left behind was told to end."""


def state_folder() -> Path:
    """``$SIE_STATE_DIR``, else a folder of the user's own: for this run, among the temporary files, or at home. It is
    made if it is not there.

    Raises:
        EngineStartError: none of them is this user's, or it can't be made.
    """
    given = os.environ.get("SIE_STATE_DIR")
    if given:
        roots = [Path(given) / "sie"]
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        roots = [Path(runtime) / "sie"] if runtime else []
        roots.append(Path(tempfile.gettempdir()) / f"sie-{os.geteuid()}")
        with contextlib.suppress(RuntimeError):  # a user without a home
            roots.append(Path.home() / ".local" / "state" / "sie")
    for root in roots[:-1]:
        with contextlib.suppress(OSError):
            return _own(root)
    with _kept_in(roots[-1] / "engines"):
        return _own(roots[-1])


def _own(root: Path) -> Path:
    """The folder for engines in ``root``, both of them this user's alone.

    Raises:
        OSError: one of them is a link or somebody else's, who could otherwise read and choose what is in it.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder in (root, root / "engines"):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder, or a link", str(folder))
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
        folder.chmod(0o700)
    return root / "engines"


@contextlib.contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """A disk that is full or not to be written: says which folder it was, and what to do."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise EngineStartError(
            f"{folder} can't hold the files of an engine: {why}; SIE_STATE_DIR names another folder"
        ) from error


def _began(pid: int) -> str:
    """When a process began, told so that setting the clock does not change it; the boot goes with it.

    Raises:
        psutil.Error: there is no such process.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"
    except (OSError, IndexError):
        return str(round(psutil.Process(pid).create_time(), 1))


@frozen
class _Owner:
    """The server that started an engine: a process id means something only with the moment the process began."""

    pid: int
    began: str

    @classmethod
    def this(cls) -> _Owner:
        return cls(os.getpid(), _began(os.getpid()))

    def alive(self) -> bool:
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE and _began(self.pid) == self.began
        except psutil.Error:
            return False


class Home:
    """The folder of one engine. ``token`` goes into its environment. Raises EngineStartError: the disk says no."""

    def __init__(self, model: str, grace_s: float = GRACE_S) -> None:
        self.token = secrets.token_hex(16)
        self.folder = state_folder() / self.token
        self.grace_s = grace_s
        self._about = {"token": self.token, "model": model, "owner": asdict(_Owner.this()), "grace_s": grace_s}
        try:
            with _kept_in(self.folder):
                self.folder.mkdir(mode=0o700)
            self._write(0)
        except EngineStartError:
            self.forget()
            raise

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    def started(self, pid: int) -> None:
        """The engine's first process, which leads its session. Raises EngineStartError."""
        self._write(pid)

    def secret(self, name: str, content: str) -> Path:
        """A file that its owner alone may read. Raises EngineStartError."""
        path = self.folder / name
        with _kept_in(self.folder), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(content)
        return path

    def forget(self) -> None:
        """The engine is gone, all of it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, pid: int) -> None:
        fresh = self.folder / "engine.json.new"
        with _kept_in(self.folder):
            fresh.write_text(json.dumps({**self._about, "pid": pid}))
            fresh.replace(self.folder / "engine.json")


def end_orphans() -> list[str]:
    """End what dead servers of this user left running, and forget it. Returns the models whose engines were ended."""
    with _lock:
        ended = []
        for folder, about in _left_behind():
            left = _processes_of(about["token"], about["pid"])
            if left:
                log.warning(
                    "an earlier server left the engine of %s running (%d processes): ending it",
                    about["model"],
                    len(left),
                )
                if not _end(str(about["token"]), about["pid"], about.get("grace_s")):
                    continue  # it is looked for again, as long as it is there
                ended.append(str(about["model"]))
            shutil.rmtree(folder, ignore_errors=True)
        return ended


def _left_behind() -> Iterator[tuple[Path, dict[str, object]]]:
    for folder in sorted(state_folder().iterdir()):
        try:
            about = json.loads((folder / "engine.json").read_text())
            owner, token = _Owner(**about["owner"]), str(about["token"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if token == folder.name and not owner.alive():
            yield folder, about


def _processes_of(token: object, leader: object) -> list[psutil.Process]:
    """Processes that carry the token, and the others of a session that one of them belongs to.

    Processes that rename themselves may overwrite what the system shows of their environment.
    """
    found: dict[int, psutil.Process] = {}
    marked: set[int] = set()
    sessions: dict[int, int] = {}
    for process in psutil.process_iter(["uids", "environ", "status"]):
        with contextlib.suppress(OSError, psutil.Error):
            if process.info["uids"] is None or process.info["uids"].real != os.getuid():
                continue
            if process.info["status"] == psutil.STATUS_ZOMBIE:
                continue
            sessions[process.pid] = os.getsid(process.pid)
            found[process.pid] = process
            if (process.info["environ"] or {}).get(TOKEN) == token:
                marked.add(process.pid)
    proven = {sessions[pid] for pid in marked if sessions[pid] == leader}
    marked |= {pid for pid, session in sessions.items() if session in proven}
    return [found[pid] for pid in sorted(marked)]


def kill_marked(token: str, leader: int) -> bool:
    """SIGKILL what is left of an engine that has lost its guard. False: nothing is."""
    left = _processes_of(token, leader)
    for process in left:
        with contextlib.suppress(OSError, psutil.Error):
            process.kill()
    return bool(left)


def _end(token: str, leader: object, grace: object) -> bool:
    """Whether nothing of it is left. It has the same grace as from a living server, over several calls if need be."""
    grace_s = float(grace) if isinstance(grace, int | float) else GRACE_S
    until = time.monotonic() + _GIVE_UP_S
    while left := _processes_of(token, leader):
        now = time.monotonic()
        late = now - _told.get(token, now) >= grace_s
        if token not in _told or late:
            for process in left:
                with contextlib.suppress(OSError, psutil.Error):
                    # not to whoever has its number by now
                    process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        _told.setdefault(token, now)
        if now > until:
            log.error("processes %s of an engine that was left behind don't end", [process.pid for process in left])
            return False
        time.sleep(_LOOK_S)
    _told.pop(token, None)
    return True
