"""How a server ends: what runs may finish, what waits is sent away, nothing hangs it for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

STUCK = """
import time
from sie_core import hookimpl
sie_api = 1

@hookimpl
def on_shutdown():
    print("STUCK", flush=True)
    while True:
        time.sleep(3600)
"""

FAREWELL = """
from sie_core import hookimpl
sie_api = 1

@hookimpl
def on_residency_changed(event):
    print("CHANGED", event.model, event.after, flush=True)

@hookimpl
def on_shutdown():
    print("FAREWELL", flush=True)
"""

SLOW = "models: [{name: a, adapter: fake, options: {run_s: 3}}, {name: b, adapter: fake}]\n"

UNSTOPPABLE = """
import threading
from attrs import frozen
from sie_core import Adapter, AdmissionReserve, DeviceNeed, hookimpl
sie_api = 1

@frozen
class Options:
    pass

class Unstoppable(Adapter):
    options = Options
    def load(self, model, ctx, events):
        print("LOADING", flush=True)
        threading.Event().wait()

@hookimpl
def register_adapters(registrar):
    registrar.add("unstoppable", Unstoppable)

@hookimpl
def admission_reserve(model, devices):
    return AdmissionReserve(ranks=(DeviceNeed(1),)) if model.adapter == "unstoppable" else None
"""


THREADLESS = """
import threading, _thread
from sie_core import hookimpl
sie_api = 1

def refused(*args, **kwargs):
    raise RuntimeError("can't start new thread")

@hookimpl
def on_residency_changed(event):
    if event.after == "resident":
        threading._start_new_thread = _thread.start_new_thread = refused
        print("NO MORE THREADS", flush=True)
"""


def test_what_runs_finishes_and_hooks_come_last(
    server: Callable[..., Any], until: Callable[..., Any], distribution: Callable[..., Any]
) -> None:
    one = server("models: [{name: a, adapter: fake, options: {run_s: 1.5}}]\n", env=distribution("farewell", FAREWELL))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.encode)
        until(lambda: one.model("a")["leases"] == 1)
        one.terminate()
        assert running.result().status_code == 200
    assert one.process.wait(30) == 0
    said = one.text
    assert 0 < said.index("CHANGED a unloaded") < said.index("FAREWELL")
    assert said.count("FAREWELL") == 1
    assert "Traceback" not in said


def test_under_load_every_request_is_answered_or_turned_away(server: Callable[..., Any]) -> None:
    one = server("models: [{name: a, adapter: fake, options: {run_s: 0.02}}]\n")
    assert one.encode().status_code == 200
    answers: Counter[Any] = Counter()
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=30) as client:
            while not over.is_set():
                try:
                    reply = client.post(f"{one.url}/v1/encode/a", json={"items": [{"text": "x"}]})
                    answers[reply.status_code] += 1
                except httpx.ConnectError:
                    over.set()  # nobody listens any more
                except httpx.TransportError as error:
                    # A connection that was idle may be closed just as the next request goes out on it.
                    answers[type(error).__name__] += 1

    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(ask) for _ in range(16)]
        while answers[200] < 200:
            over.wait(0.05)
        one.terminate()
        for client in clients:
            client.result()
    assert one.process.wait(30) == 0
    assert answers[200] >= 200
    assert set(answers) <= {200, 503, "RemoteProtocolError", "ReadError", "WriteError"}
    assert sum(answers[kind] for kind in answers if isinstance(kind, str)) <= 16
    assert "Traceback" not in one.text


def test_while_loading_the_load_is_called_off(server: Callable[..., Any], until: Callable[..., Any]) -> None:
    one = server("models: [{name: a, adapter: fake, options: {load_s: 300}}]\n")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.encode)
        until(lambda: one.model("a")["residency"] == "loading")
        began = time.monotonic()
        one.terminate()
        reply = waiting.result()
    assert reply.status_code == 503
    assert one.process.wait(30) == 0
    assert time.monotonic() - began < 10


def test_an_idle_connection_and_a_watcher_hold_nothing(server: Callable[..., Any]) -> None:
    from websockets.sync.client import connect

    one = server("models: [{name: a, adapter: fake}]\n")
    with httpx.Client() as idle, connect(one.url.replace("http", "ws") + "/ws/status") as watcher:
        assert idle.get(f"{one.url}/healthz").status_code == 200
        assert watcher.recv()
        began = time.monotonic()
        one.terminate()
        assert one.process.wait(30) == 0
    assert time.monotonic() - began < 10


def test_requests_that_outlast_their_time_are_cut(server: Callable[..., Any], until: Callable[..., Any]) -> None:
    one = server("models: [{name: a, adapter: fake, options: {run_s: 8}}]\n", "--drain-s", "0.5")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(one.encode)
        until(lambda: one.model("a")["leases"] == 1)
        one.terminate()
        reply = running.result()
    assert reply.status_code == 503
    assert one.process.wait(30) == 0


def test_a_stuck_hook_does_not_keep_the_process(server: Callable[..., Any], distribution: Callable[..., Any]) -> None:
    one = server("models: [{name: a, adapter: fake, pinned: true}]\n", "--drain-s", 0, env=distribution("stuck", STUCK))
    one.wait_for("loading -> resident")
    one.terminate()
    assert one.process.wait(40) == 0
    assert "on_shutdown" in one.text
    assert "'stuck'" in one.text


def test_a_load_that_never_returns_does_not_keep_the_process(
    server: Callable[..., Any], distribution: Callable[..., Any]
) -> None:
    one = server(
        "models: [{name: a, adapter: unstoppable, pinned: true}]\n",
        "--drain-s",
        0,
        env=distribution("unstoppable", UNSTOPPABLE),
    )
    one.wait_for("LOADING")
    one.terminate()
    assert one.process.wait(40) == 1
    assert "leaving without having closed: a" in one.text


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    server: Callable[..., Any], distribution: Callable[..., Any], second: signal.Signals
) -> None:
    one = server("models: [{name: a, adapter: fake}]\n", env=distribution("stuck", STUCK))
    one.terminate()
    one.wait_for("STUCK")
    one.process.send_signal(second)
    began = time.monotonic()
    assert one.process.wait(30) == 1
    assert time.monotonic() - began < 5
    assert "leaving at once" in one.text


def test_no_process_is_left_behind(server: Callable[..., Any]) -> None:
    one = server("models: [{name: a, adapter: fake}]\n", "--emulate-device", "16MiB")
    assert one.encode().status_code == 200
    children = psutil.Process(one.process.pid).children(recursive=True)
    one.terminate()
    assert one.process.wait(30) == 0
    assert not [child for child in children if child.is_running()]


def test_a_server_ends_well_while_a_model_is_leaving_its_configuration(
    server: Callable[..., Any], tmp_path: Path, until: Callable[..., Any]
) -> None:
    """F5: the end of a server that had a busy model removed was a failure."""
    one = server(SLOW)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(one.encode)
        until(lambda: one.model("a")["leases"])
        (tmp_path / "fresh.yaml").write_text("models: [{name: b, adapter: fake}]\n", encoding="utf-8")
        (tmp_path / "fresh.yaml").rename(tmp_path / "sie.yaml")
        one.process.send_signal(signal.SIGHUP)
        until(lambda: one.model("a")["leaving"])
        one.terminate()
        assert asking.result().status_code == 200
    assert one.process.wait(60) == 0, one.text


MODELS = "models: [{name: mini, adapter: fake, options: {dims: 4}}]\n"


def test_a_configuration_that_is_never_written_holds_up_nothing(server: Callable[..., Any], tmp_path: Path) -> None:
    """F12: a FIFO in its place blocked this reload, all later ones, and the end."""
    one = server(MODELS)
    config = tmp_path / "sie.yaml"
    config.unlink()
    os.mkfifo(config)
    one.process.send_signal(signal.SIGHUP)
    one.wait_for("not a regular file")
    config.unlink()
    config.write_text(MODELS + "server: {drain_s: 5}\n", encoding="utf-8")
    one.process.send_signal(signal.SIGHUP)
    one.wait_for("no model changed")
    one.terminate()
    assert one.process.wait(30) == 0


def test_the_end_needs_no_new_thread(server: Callable[..., Any], distribution: Callable[..., Any]) -> None:
    """F12: where no thread could start any more, SIGTERM was lost."""
    one = server(MODELS, env=distribution("threadless", THREADLESS))
    httpx.post(f"{one.url}/v1/admin/models/mini/load", timeout=30)
    one.wait_for("NO MORE THREADS")
    one.terminate()
    one.process.wait(40)
    assert "SIGTERM: stopping" in one.text
