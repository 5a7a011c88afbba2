"""Models on the hub: fetched by the client in SGLang's own environment, by no more than is needed."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest
from sie_adapters_sglang import plugin
from sie_adapters_sglang.adapters import GenerationAdapter
from sie_core import EngineStartError, GatedModel, ModelSourceNotFound, ModelSpec, Source, TransitionCancelled

GIB = 1 << 30


@pytest.fixture
def model(home: Any, helpers: Any, tmp_path: Path) -> Any:
    hub = tmp_path / "hub"
    helpers.save_model(hub / "whole")
    helpers.save_model(hub / "about")
    (hub / "about" / "model.safetensors").unlink()

    def make(name: str = "small", revision: str | None = None, **env: str) -> ModelSpec:
        local = home.model(env={"STANDIN_HUB": str(hub), **env})
        return attrs.evolve(local, source=Source("hf", f"org/{name}", revision))

    return make


def test_admission_fetches_no_weights_and_knows_their_size(model: Any, helpers: Any, tmp_path: Path) -> None:
    reserve = plugin.admission_reserve(model(), [helpers.view("cuda:0")])
    assert reserve is not None
    assert reserve.ranks[0].min_bytes > 5_000_000_000
    assert not (tmp_path / "hub" / "fetched").exists()
    assert GenerationAdapter().describe(model()) is None


def test_a_load_fetches_all_of_it(model: Any, start: Any) -> None:
    engine = start(model())
    assert engine.pid
    described = GenerationAdapter().describe(model())
    assert described == engine.capabilities


@pytest.mark.parametrize(
    ("name", "revision", "env", "error"),
    [
        ("gated", None, {}, GatedModel),
        ("gone", None, {}, ModelSourceNotFound),
        ("small", "gone", {}, ModelSourceNotFound),
        ("down", None, {}, EngineStartError),
    ],
)
def test_what_the_hub_says(model: Any, helpers: Any, name: str, revision: Any, env: Any, error: Any) -> None:
    with pytest.raises(error, match="hf:org/"):
        plugin.admission_reserve(model(name, revision, **env), [helpers.view()])


def test_a_download_can_be_called_off(model: Any, start: Any, helpers: Any) -> None:
    ctx = helpers.context()
    threading.Timer(0.3, ctx.cancelled.set).start()
    begun = time.monotonic()
    with pytest.raises(TransitionCancelled):
        start(model("slow"), ctx=ctx)
    with pytest.raises(EngineStartError, match="in time"):
        start(model("slow"), ctx=helpers.context(deadline=time.monotonic() + 0.5))
    assert time.monotonic() - begun < 10


FETCHES = """
import os, sys
from sie_adapters_sglang._hub import fetch
from sie_core import Source
fetch(sys.executable, {}, Source("hf", "org/slow"), "all")
"""


def test_a_download_ends_with_the_server(model: Any) -> None:
    env = {**os.environ, **model("slow").options.env}
    env["PYTHONPATH"] = os.pathsep.join([*sys.path, env["PYTHONPATH"]])
    server = psutil.Popen([sys.executable, "-c", FETCHES], env=env)
    deadline = time.monotonic() + 30
    while not (children := server.children()) and time.monotonic() < deadline:
        os.sched_yield()
    server.kill()
    server.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()
    assert children
    assert not alive
