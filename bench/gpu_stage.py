"""A server with an LLM engine and encoders on a device that holds the one or the others, and looks at its memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import contestants
import psutil
from attrs import define, field, frozen
from client import Client
from contestants import Server
from gpu_models import CHAT, CHATS, Models
from sie_core import Device

__all__ = ["Asker", "Reply", "Sample", "Stage", "is_running", "until"]

PROMPT = "Tell me of a device that is too small."
_TOKENS = 16
_LOOK_S = 0.1
_LINES = 15
_ROUNDING = 64 * 1024**2
"""An engine tells its figures in hundredths of a GiB."""


@frozen
class Reply:
    """``text``: what a chat came to, or the vector of a text. ``wait``: told to come back later. ``error``: what the
    server said, where it was no answer."""

    seconds: float
    text: str = ""
    wait: bool = False
    error: str = ""


@frozen
class Sample:
    """One look. Bytes of the device: in use by the driver's count, and promised by the ledger."""

    at: float
    used: int
    promised: int
    capacity: int
    resident: tuple[str, ...]


class Asker(Client):
    """One client with one connection. ``timeout_s``: the longest that it waits for an answer."""

    def __init__(self, server: Server, timeout_s: float) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
        self.timeout_s = timeout_s

    def ask(self, model: str) -> Reply:
        """One chat, or one text to encode."""
        if model in CHATS:
            messages = [{"role": "user", "content": PROMPT}]
            body = {"model": model, "messages": messages, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
            path = "/v1/chat/completions"
        else:
            body, path = {"items": [{"text": PROMPT}]}, f"/v1/encode/{model}"
        began = time.perf_counter()
        try:
            status, answer = self._ask("POST", path, json.dumps(body).encode())
        except (OSError, http.client.HTTPException) as error:
            self.close()  # the next request opens another connection
            return Reply(time.perf_counter() - began, error=f"{type(error).__name__}: {error}")
        took = time.perf_counter() - began
        if status == HTTPStatus.OK:
            told = json.loads(answer)
            found = told["choices"][0]["message"]["content"] if model in CHATS else told["items"][0]["dense"]
            return Reply(took, str(found))
        text = answer.decode(errors="replace")
        return Reply(took, wait=status == HTTPStatus.SERVICE_UNAVAILABLE, error=f"{status}: {text[:300]}")

    def answer(self, model: str) -> Reply:
        """One that has come, however often it was put off. Raises RuntimeError."""
        began, pause = time.perf_counter(), threading.Event()
        while (reply := self.ask(model)).wait and time.perf_counter() - began < self.timeout_s:
            pause.wait(0.2)
        if reply.error:
            raise RuntimeError(f"{model}: {reply.error}")
        return Reply(time.perf_counter() - began, reply.text)

    def unload_all(self) -> None:
        """Nothing is loaded then, and nothing parked."""
        for row in self.status()["models"]:
            if row["residency"] != "unloaded":
                self.act(row["name"], "unload")

    def row(self, model: str) -> dict[str, Any]:
        """The model's line of the status."""
        return dict(next(row for row in self.status()["models"] if row["name"] == model))


@define
class Stage:
    """What the drills share. The server is started when it is first asked for, and stays up for the next drill.

    ``device``: as this process sees it. ``wait_s``: the longest that anything is waited for. ``tight``: the server's
    part of the device holds the engine or the encoders; else there is room for all.
    """

    device: Device
    models: Models
    folder: Path
    wait_s: float
    _open: contextlib.ExitStack = field(factory=contextlib.ExitStack)
    _server: Server | None = None
    baseline: int = 0
    """Bytes of the device that were in use before the server was there."""
    promise: int | None = None
    """Bytes that the ledger promises the engine, after a launch has shown what it takes."""
    tight: bool = False

    @property
    def emulated(self) -> bool:
        return self.device.kind == "emulated"

    @property
    def log(self) -> Path:
        return self.folder / "sie.txt"

    def server(self) -> Server:
        if self._server is None:
            self.baseline = 0 if self.emulated else self.used()
            (self.folder / "served").mkdir(exist_ok=True)
            arguments = ["--emulate-device", str(self._room())] if self.emulated else []
            more = {"SIE_STATE_DIR": str(self.folder), "SIE_CACHE_DIR": str(self.folder)}
            self._server = self._open.enter_context(
                contestants.sie(self.folder / "served", json.dumps(self._config()), *arguments, more=more)
            )
        return self._server

    def _config(self) -> dict[str, Any]:
        memory: dict[str, Any] = {"host_cache_bytes": self.models.host, "host_floor": 0}
        if self.tight and not self.emulated:  # what is left of the device is as large as the drills want it
            memory["device_reserve"] = max(0, self.device.total() - self.baseline - self._room())
        return {
            "memory": memory,
            "requests": {"load_wait_s": self.wait_s, "wake_wait_s": self.wait_s, "deadline_s": 2 * self.wait_s},
            "telemetry": {"log_file": str(self.log)},
            "models": [
                {**entry, **({"device": self.device.name} if not self.emulated else {})}
                for entry in (*self.models.chats, *self.models.encoders)
            ],
        }

    def _room(self) -> int:
        if self.tight and self.promise is not None:
            return self.models.room(self.promise)
        return 2 * self.models.room(2 * self.models.assumed + _ROUNDING)

    def measure_promise(self) -> None:
        """Launch the engine until its promise is made of measured figures: the second one is."""
        with self.asker() as asker:
            asker.unload_all()
            asker.act(CHAT, "load")
            asker.act(CHAT, "unload")
            before = self.promised()
            asker.act(CHAT, "load")
            self.promise = self.promised() - before

    def tighten(self) -> None:
        """From now on the server has so much of the device that not everything fits."""
        if self.promise is None:
            self.measure_promise()
        if not self.tight:
            self.drop()
            self.tight = True

    def drop(self) -> None:
        """Stop the server, if there is one."""
        self._server = None
        self._open.close()

    def asker(self) -> contextlib.closing[Asker]:
        return contextlib.closing(Asker(self.server(), self.wait_s))

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])

    # --- the device --------------------------------------------------------------------------------

    def used(self) -> int:
        """Bytes of the device in use by the driver's count. Raises RuntimeError where it does not tell."""
        if not self.emulated:
            found = self.device.used()
            if found is None:
                raise RuntimeError(f"the driver does not tell how much of {self.device.name} is in use")
            return found
        if self._server is None or self._server.process.poll() is not None:
            return 0  # an emulated device is memory of the server
        with self.asker() as asker:
            return self._account(asker.status())["used"] or 0

    def look(self, asker: Asker) -> Sample:
        status = asker.status()
        account = self._account(status)
        used = (account["used"] or 0) if self.emulated else self.used()
        resident = tuple(row["name"] for row in status["models"] if row["residency"] == "resident")
        return Sample(time.monotonic(), used - self.baseline, account["promised"], account["capacity"], resident)

    def promised(self) -> int:
        """Bytes of the device that the ledger has promised to models."""
        with self.asker() as asker:
            return int(self._account(asker.status())["promised"])

    def _account(self, status: dict[str, Any]) -> dict[str, Any]:
        return dict(next(each for each in status["accounts"] if each["account"] == self.device.name))

    @contextlib.contextmanager
    def looking(self) -> Iterator[list[Sample]]:
        """Looks every tenth of a second, by a thread of their own."""
        samples: list[Sample] = []
        done = threading.Event()

        def look() -> None:
            with self.asker() as asker:
                while not done.wait(_LOOK_S):
                    samples.append(self.look(asker))

        thread = threading.Thread(target=look, name="looks", daemon=True)
        thread.start()
        try:
            yield samples
        finally:
            done.set()
            thread.join(self.wait_s)

    # --- the engine's processes --------------------------------------------------------------------

    def engine(self) -> psutil.Process:
        """The first process of the LLM engine. Raises RuntimeError: there is none."""
        for process in psutil.Process(self.server().process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]:
                    return process
        raise RuntimeError("the server has no engine")


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(holds: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until it holds; ``None``: not within ``limit_s``."""
    began, pause = time.monotonic(), threading.Event()
    while not holds():
        if time.monotonic() - began > limit_s:
            return None
        pause.wait(0.01)
    return time.monotonic() - began
