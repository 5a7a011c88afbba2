"""``sie load | unload | park | wake | pin | unpin``: what the server should hold."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

from attrs import define, field
from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.client import Client, Remote, model_path
from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.output import print_json, printable, size

__all__ = ["load", "park", "pin", "unload", "unpin", "wake"]

_NO_REMOTE = Remote()
_POLL_S = 0.25
_WAIT_S = 60.0
"""Seconds a load request waits on the server's side before it is repeated: no proxy in between should lose patience."""
_GRACE_S = 5.0

Names = Annotated[tuple[str, ...], Parameter(name="MODEL", negative="", help="Names of models, as in `sie models`.")]


@command("MODEL... [OPTIONS]", "sie load minilm", "sie load minilm reranker --timeout 120")
def load(
    models: Names,
    /,
    *,
    timeout: Annotated[
        float, Parameter(metavar="SECONDS", help="Give up waiting after so many seconds; the server goes on.")
    ] = 600.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Load models and wait until they are resident, showing how far each has come."""
    _several(models, remote, lambda client, model: _load(client, model, timeout))


@command("MODEL... [OPTIONS]", "sie unload minilm", "sie unload minilm --force")
def unload(
    models: Names,
    /,
    *,
    force: Annotated[
        bool, Parameter(negative="", show_default=False, help="Cancel the requests that use the model, don't wait.")
    ] = False,
    timeout: Annotated[
        float, Parameter(metavar="SECONDS", help="Give up waiting after so many seconds; the server goes on.")
    ] = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Unload models: the requests that use them end first, the next request loads them again."""

    def act(client: Client, model: str) -> dict[str, Any]:
        return client.post(model_path("/v1/admin/models", model, "unload"), {"force": force}, timeout_s=timeout)

    _several(models, remote, act)


@command("MODEL... [OPTIONS]", "sie park minilm")
def park(
    models: Names,
    /,
    *,
    timeout: Annotated[
        float, Parameter(metavar="SECONDS", help="Give up waiting after so many seconds; the server goes on.")
    ] = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Park models: the requests that use them end first, then their state moves to host memory, and the device is free.

    The next request wakes a parked model, or `sie wake` does. The server needs a host tier (memory.host_cache_bytes).
    """
    _several(models, remote, lambda client, model: _move(client, model, "park", timeout))


@command("MODEL... [OPTIONS]", "sie wake minilm", "sie wake minilm reranker")
def wake(
    models: Names,
    /,
    *,
    timeout: Annotated[
        float, Parameter(metavar="SECONDS", help="Give up waiting after so many seconds; the server goes on.")
    ] = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Wake parked models, before a request has to. A model that is not parked is loaded."""
    _several(models, remote, lambda client, model: _move(client, model, "wake", timeout))


@command("MODEL... [OPTIONS]", "sie pin minilm")
def pin(models: Names, /, *, remote: Remote = _NO_REMOTE) -> None:
    """Keep models in memory: a pinned model is never evicted. It still unloads on request."""
    _several(models, remote, lambda client, model: _switch(client, model, "pin"))


@command("MODEL... [OPTIONS]", "sie unpin minilm")
def unpin(models: Names, /, *, remote: Remote = _NO_REMOTE) -> None:
    """Let pinned models be evicted again."""
    _several(models, remote, lambda client, model: _switch(client, model, "unpin"))


# --- parts -----------------------------------------------------------------------------------------


def _several(models: tuple[str, ...], remote: Remote, act: Callable[[Client, str], dict[str, Any]]) -> None:
    """Do it for each model in turn. The first that fails ends it, after what was done for the others is shown."""
    if not models:
        raise CommandError(
            "name at least one model", exit_code=Exit.USAGE, code="USAGE", hint="`sie models` lists them"
        )
    done: list[dict[str, Any]] = []
    with Client(remote) as client:
        for model in models:
            row = act(client, model)
            done.append(row)
            if not remote.json:
                print(printable(f"{model}: {_described(row)}"), flush=True)
    if remote.json:
        print_json(done)


def _switch(client: Client, model: str, action: str) -> dict[str, Any]:
    return client.post(model_path("/v1/admin/models", model, action))


def _move(client: Client, model: str, action: str, timeout_s: float) -> dict[str, Any]:
    began = time.monotonic()
    path = model_path("/v1/admin/models", model, action)
    answer = client.post(path, {"wait_s": timeout_s}, timeout_s=timeout_s + _GRACE_S)
    return {**answer, "took_s": round(time.monotonic() - began, 3)}


def _load(client: Client, model: str, timeout_s: float) -> dict[str, Any]:
    """Ask for the load in a thread of its own, and report the model's state until that request is answered."""
    began = time.monotonic()
    report = _Report(model)
    path = model_path("/v1/admin/models", model, "load")
    asked = _Asked(client, model, path, deadline=began + timeout_s)
    threading.Thread(target=asked.run, daemon=True).start()
    try:
        while not asked.done.wait(_POLL_S):
            report.show(_row(client, model))
        report.end()
    except KeyboardInterrupt:
        report.end()
        print("sie: no longer waiting; the server goes on loading", file=sys.stderr)
        raise
    if asked.error is not None:
        raise asked.error
    return {**asked.answer, "took_s": round(time.monotonic() - began, 3)}


@define
class _Asked:
    """A load request that is repeated as long as the server says that it is still at it."""

    client: Client
    model: str
    path: str
    deadline: float
    done: threading.Event = field(factory=threading.Event)
    answer: dict[str, Any] = field(factory=dict)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            while True:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise CommandError(
                        "the model is still loading, and the time is up",
                        code="MODEL_LOADING",
                        hint="`sie ps` shows how far it is; --timeout waits longer",
                    )
                try:
                    # The server gives up a little before this side does, so that it is the one that says why.
                    self.answer = self.client.post(self.path, {"wait_s": min(left, _WAIT_S)}, timeout_s=left + _GRACE_S)
                    return
                except CommandError as error:
                    # A model that failed and will be tried again later is "loading" for requests, not for us.
                    if error.code != "MODEL_LOADING" or _row(self.client, self.model)["residency"] == "failed":
                        raise
                time.sleep(_POLL_S)
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


@define
class _Report:
    """Says on stderr what a model is doing: one line that is redrawn on a terminal, a line a change elsewhere."""

    model: str
    last: str = ""

    def show(self, row: dict[str, Any]) -> None:
        progress = row.get("progress") or {}
        parts = [row.get("residency", "?")]
        if isinstance(progress, dict) and progress.get("fraction") is not None:
            parts += [f"{progress['fraction']:.0%}", progress.get("note") or ""]
        text = printable(f"{self.model}: {' '.join(part for part in parts if part)}")
        if text == self.last:
            return
        self.last = text
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.last and sys.stderr.isatty():
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _row(client: Client, model: str) -> dict[str, Any]:
    """The model's line of the status; made up from its name where the server has none (any more)."""
    for row in client.get("/v1/status").get("models", []):
        if row["name"] == model:
            return dict(row)
    return {"name": model, "residency": "unknown"}


def _described(row: dict[str, Any]) -> str:
    where = row.get("device")
    parts = [row["residency"]]
    if row["residency"] == "resident" and where:
        parts[0] += f" on {', '.join(where) if isinstance(where, list) else where}"
    if row.get("device_bytes"):
        parts.append(size(row["device_bytes"]))
    if row["residency"] == "parked":
        parts.append(f"{size(row.get('host_bytes'))} on the host")
    if row.get("pinned"):
        parts.append("pinned")
    if row.get("took_s") is not None:
        parts.append(f"after {row['took_s']:.1f} s" if row["took_s"] >= 1 else f"after {1000 * row['took_s']:.0f} ms")
    return ", ".join(parts)
