"""``hf:`` sources against a hub on this machine that speaks enough of the real one's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves a folder as ``org/model``; other names stand for other troubles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.ranges: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = request.path.split("?")[0]
        troubles = {"gated": (403, "GatedRepo"), "private": (401, "RepoNotFound"), "broken": (500, "")}
        for name, (status, code) in troubles.items():
            if f"org/{name}" in path:
                return self.send(request, status, b"{}", {"X-Error-Code": code} if code else {}, body)
        if "org/model" not in path:
            return self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/models/org/model"):
            return self.about(request, path, body)
        revision, _, name = path.removeprefix("/org/model/resolve/").partition("/")
        if revision not in ("main", COMMIT):
            return self.send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        file = self.folder / name
        if not file.is_file():
            return self.send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        content = file.read_bytes()
        headers = {"ETag": f'"{len(content)}-{name}"', "X-Repo-Commit": COMMIT}
        if body:
            self.fetched.append(name)
        if body and (span := request.headers.get("Range")):
            self.ranges.append(name)
            first, last = span.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last or len(content)) + 1]
            return self.send(request, 206, content, headers, body)
        return self.send(request, 200, content, headers, body)

    def about(self, request: BaseHTTPRequestHandler, path: str, body: bool) -> None:
        if "/revision/" in path and path.rpartition("/")[2] not in ("main", COMMIT):
            return self.send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        files = [file for file in sorted(self.folder.rglob("*")) if file.is_file()]
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": str(f.relative_to(self.folder)), "size": f.stat().st_size, "oid": "0" * 40}
                for f in files
            ]
            return self.send(request, 200, json.dumps(entries).encode(), {}, body)
        siblings = [{"rfilename": str(file.relative_to(self.folder))} for file in files]
        about = {"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings, "tags": []}
        return self.send(request, 200, json.dumps(about).encode(), {}, body)

    def send(
        self, request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str], body: bool
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)


@pytest.fixture
def hub(make: Any, tiny_bert: Path, copy_of: Any) -> Iterator[Hub]:
    folder = make.modules(copy_of(tiny_bert), dense=6)
    (folder / "artifact.metadata").write_text("{}")
    for extra in ("pytorch_model.bin", "onnx/model.onnx", "own.py", "rust_model.ot", "sparse_linear.pt"):
        (folder / extra).parent.mkdir(exist_ok=True)
        (folder / extra).write_bytes(b"not wanted")
    hub = Hub(folder)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


STEPS = """
import json, sys
from sie_adapters_torch.dense import DenseAdapter
from sie_adapters_torch._lora_files import lora_files
from sie_adapters_torch._source import find_folder
from sie_core import DeviceView, LoadError, ModelSpec
from sie_core.sources import parse_source
answers = []
for step, source in json.loads(sys.argv[1]):
    model = ModelSpec("m", "torch-dense", parse_source(source, None))
    try:
        if step == "reserve":
            view = DeviceView("emulated:0", "emulated", 1 << 40, 1 << 40, 1 << 40)
            answers.append(DenseAdapter().reserve(model, [view]).ranks[0].min_bytes)
        elif step == "describe":
            known = DenseAdapter().describe(model)
            answers.append(known and known.dims["dense"])
        elif step == "lora":
            answers.append(str(lora_files(source).folder))
        else:
            answers.append(str(find_folder(model)))
    except LoadError as error:
        answers.append([type(error).__name__, error.permanent, error.message])
print(json.dumps(answers))
"""


@pytest.fixture
def steps(hub: Hub, tmp_path: Path) -> Any:
    """Take steps in a process of their own: the hub's client reads its settings when it is imported."""

    def run(*steps: tuple[str, str], **settings: str) -> list[Any]:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*", **settings}
        done = subprocess.run(
            [sys.executable, "-c", STEPS, json.dumps(steps)],
            env=environment, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


def test_only_what_is_needed_is_fetched_and_then_kept(steps: Any, hub: Hub, make: Any) -> None:
    before, reserved, folder, after = steps(
        ("describe", "hf:org/model"),
        ("reserve", "hf:org/model"),
        ("load", "hf:org/model"),
        ("describe", "hf:org/model"),
    )
    assert (before, after) == (None, 6)  # describing fetches nothing
    names = {str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file()}
    assert {"config.json", "model.safetensors", "2_Dense/model.safetensors", "tokenizer.json"} <= names
    assert "artifact.metadata" in names  # ColBERT's settings
    unwanted = {"pytorch_model.bin", "onnx/model.onnx", "own.py", "rust_model.ot", "sparse_linear.pt"}
    assert not unwanted & set(hub.fetched)
    from sie_adapters_torch.dense import DenseAdapter

    local = DenseAdapter().reserve(make.spec(hub.folder), []).ranks[0].min_bytes
    assert reserved == local
    hub.fetched.clear()
    again, pinned = steps(("load", "hf:org/model"), ("load", f"hf:org/model@{COMMIT}"))
    assert again == pinned == folder
    assert hub.fetched == []


def test_reserving_reads_the_header_of_the_weights_alone(steps: Any, hub: Hub) -> None:
    (reserved,) = steps(("reserve", "hf:org/model"))
    assert reserved > 0
    assert [name for name in hub.fetched if name.endswith(".safetensors")] == hub.ranges == ["model.safetensors"]


def test_what_is_cached_is_served_without_the_hub(steps: Any, hub: Hub) -> None:
    (folder,) = steps(("load", "hf:org/model"))
    hub.server.shutdown()
    hub.server.server_close()
    asked = (("load", "hf:org/model"), ("reserve", "hf:org/model"))
    assert steps(*asked)[0] == folder
    assert steps(*asked, HF_HUB_OFFLINE="1")[0] == folder


def test_troubles_have_a_type_each(steps: Any) -> None:
    names = ("gated", "private", "nowhere", "broken", "model@no-such-branch")
    found = dict(zip(names, steps(*(("load", f"hf:org/{name}") for name in names)), strict=True))
    assert {name: (kind, permanent) for name, (kind, permanent, _) in found.items()} == {
        "gated": ("GatedModel", True),
        "private": ("ModelSourceNotFound", True),
        "nowhere": ("ModelSourceNotFound", True),
        "broken": ("EngineStartError", False),
        "model@no-such-branch": ("ModelSourceNotFound", True),
    }
    assert "HF_TOKEN" in found["gated"][2]
    assert "revision" in found["model@no-such-branch"][2]


def test_no_hub_and_nothing_cached(steps: Any, hub: Hub) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    ((kind, permanent, message),) = steps(("load", "hf:org/model"))
    assert (kind, permanent) == ("EngineStartError", False)
    ((kind, permanent, message),) = steps(("load", "hf:org/model"), HF_HUB_OFFLINE="1")
    assert (kind, permanent) == ("ModelSourceNotFound", True)
    assert "HF_HUB_OFFLINE" in message


def test_a_model_with_pickles_only(steps: Any, hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    ((kind, permanent, message),) = steps(("reserve", "hf:org/model"))
    assert (kind, permanent) == ("UnsafeSource", True)
    assert "allow_pickle" in message
    assert "pytorch_model.bin" not in hub.fetched


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_lora_adapter(steps: Any, hub: Hub, save_lora: Any, tiny_bert: Path) -> None:
    adapter = Path(save_lora(tiny_bert).removeprefix("path:"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (hub.folder / name).write_bytes((adapter / name).read_bytes())
    (hub.folder / "adapter_model.bin").write_bytes(b"not wanted")
    (folder,) = steps(("lora", "hf:org/model"))
    assert sorted(hub.fetched) == ["adapter_config.json", "adapter_model.safetensors"]
    hub.fetched.clear()
    assert steps(("lora", f"hf:org/model@{COMMIT}")) == [folder]
    assert steps(("lora", "hf:org/model"), HF_HUB_OFFLINE="1") == [folder]
    assert hub.fetched == []
    for name, expected in (("gated", "GatedModel"), ("nowhere", "ModelSourceNotFound"), ("broken", "EngineStartError")):
        assert steps(("lora", f"hf:org/{name}"))[0][0] == expected


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_lora_adapter_with_pickles_only(steps: Any, hub: Hub, save_lora: Any, tiny_bert: Path) -> None:
    adapter = Path(save_lora(tiny_bert).removeprefix("path:"))
    (hub.folder / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    (hub.folder / "adapter_model.bin").write_bytes(b"not wanted")
    ((kind, permanent, message),) = steps(("lora", "hf:org/model"))
    assert (kind, permanent) == ("UnsafeSource", True)
    assert "allow_pickle" in message
    assert "adapter_model.bin" not in hub.fetched
