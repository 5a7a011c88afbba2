"""Adapters and hooks that raise or answer oddly: model, plugin and hook are named, and tracebacks are logged once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from installed import install_plugin
from sie_core import BatchRequest, EncodeOutput, ModelSpec, PluginConflict, ScoreOutput, SparseVector
from sie_core.plugins import Plugins
from sie_testing import FakeStreamEngine
from website import MIB, Start

PLUGIN = """
    import attrs, numpy as np
    from sie_core import *
    sie_api = 1

    @attrs.frozen
    class Options:
        pass

    class OddEngine(BatchEngine):
        capabilities = Capabilities(dims={{"dense": 64}}, matryoshka=None)

        def __init__(self, ctx):
            self.devices = tuple(ctx.grant.devices)

        def memory(self):
            return {memory}

        def probe(self, ctx):
            return {probe}

        def prepare(self, request):
            {before_prepare}
            return [Prepared(1, item.text) for item in request.items]

        def run(self, batch):
            {before_run}
            return [EncodeOutput({tokens}, {dense}) for one in batch]

    class OddAdapter(Adapter):
        options = Options

        def __init__(self):
            {made}

        def describe(self, model):
            return {described}

        def load(self, model, ctx, events):
            {load}

    @hookimpl
    def register_adapters(registrar):
        registrar.add("odd", OddAdapter)

    @hookimpl
    def admission_reserve(model, devices):
        if model.adapter == "odd":
            return {reserve}

    @hookimpl
    def host_offload_bytes(engine):
        if isinstance(engine, OddEngine):
            return {announced}

    @hookimpl
    def offload_to_host(engine, ctx):
        if isinstance(engine, OddEngine):
            return {offload}
"""
FINE = {
    "before_prepare": "pass",
    "before_run": "pass",
    "tokens": "1",
    "dense": "np.ones(64, dtype=np.float32)",
    "load": "return OddEngine(ctx)",
    "reserve": "AdmissionReserve((DeviceNeed(1000),))",
    "announced": "1000",
    "memory": "MemoryReport(dict.fromkeys(self.devices, 1000))",
    "probe": "b'always'",
    "made": "pass",
    "described": "None",
    "offload": "HostOffload(1000)",
}


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``odd(load="return 7")``: the plugins, with one of whose parts one is odd."""

    def make(**parts: str) -> Plugins:
        install_plugin(tmp_path, monkeypatch, "oddly", PLUGIN.format(**FINE | parts))
        return Plugins.load(strict=True)

    return make


MODEL = ModelSpec("strange", "odd")

FAILS = {
    "load raises": ({"load": "self.load_nothing()"}, "load of plugin 'oddly' raised AttributeError: ", True),
    "load exits": ({"load": "raise SystemExit(3)"}, "load of plugin 'oddly' raised RuntimeError: ", True),
    "load returns": ({"load": "return 7"}, "load of plugin 'oddly' returned int: return an Engine", False),
    "reserve raises": ({"reserve": "1 / 0"}, "admission_reserve of plugin 'oddly' raised ZeroDivisionError: ", True),
    "reserve exits": (
        {"reserve": "__import__('sys').exit(3)"},
        "admission_reserve of plugin 'oddly' raised SystemExit: 3",
        True,
    ),
    "reserve is a dict": ({"reserve": "{}"}, "admission_reserve of plugin 'oddly' returned dict: return an", False),
    "reserve is empty": ({"reserve": "AdmissionReserve(())"}, "one DeviceNeed for each device, one at least", False),
    "reserve is negative": (
        {"reserve": "AdmissionReserve((DeviceNeed(-5),))"},
        "admission_reserve of plugin 'oddly' returned ranks[0].min_bytes=-5: give bytes as an int, 0 or more",
        False,
    ),
    "reserve is a float": ({"reserve": "AdmissionReserve((DeviceNeed(1.5),))"}, "ranks[0].min_bytes=1.5", False),
    "host bytes are negative": (
        {"reserve": "AdmissionReserve((DeviceNeed(5),), host_load_bytes=-1)"},
        "returned host_load_bytes=-1",
        False,
    ),
    "the adapter exits": ({"made": "raise SystemExit(3)"}, "describe of plugin 'oddly' raised RuntimeError: ", True),
    "description is a dict": ({"described": "{}"}, "describe of plugin 'oddly' returned dict: return Capab", False),
    "memory is a dict": ({"memory": "{}"}, "memory of plugin 'oddly' returned dict: return a MemoryReport", False),
    "memory is negative": (
        {"memory": "MemoryReport({'emulated:0': -1})"},
        "memory of plugin 'oddly' returned devices['emulated:0']=-1",
        False,
    ),
    "probe is a text": ({"probe": "'always'"}, "probe of plugin 'oddly' returned str: return bytes or None", False),
    "announced is a text": (
        {"announced": "'much'"},
        "host_offload_bytes of plugin 'oddly' returned str: return the number of bytes as an int",
        False,
    ),
    "announced is negative": ({"announced": "-1"}, "host_offload_bytes of plugin 'oddly' returned -1", False),
    "announced is True": ({"announced": "True"}, "host_offload_bytes of plugin 'oddly' returned True", False),
}


@pytest.mark.parametrize(("parts", "told", "traced"), FAILS.values(), ids=FAILS)
async def test_a_load_that_a_plugin_spoils_names_it(
    served: Start, odd: Any, caplog: pytest.LogCaptureFixture, parts: dict[str, str], told: str, traced: bool
) -> None:
    """D5, D7: hook and plugin in message and log, and the traceback once, of what was raised."""
    async with served(plugins=odd(**parts), tier={"host_cache_bytes": 64 * MIB}) as s:
        s.registry.apply([MODEL])
        with caplog.at_level(logging.WARNING):
            answer = await s.encode("strange")
        assert answer.status_code == 502
        assert told in answer.json()["detail"]["message"]
        assert "'strange'" in answer.json()["detail"]["message"]
        assert told in caplog.text
        assert [bool(record.exc_info) for record in caplog.records].count(True) == traced


@pytest.mark.parametrize(("model", "point"), [("embedder", "run"), ("chat", "run"), ("chat", "piece")])
async def test_an_engine_that_exits_on_the_event_loop_ends_its_request_only(
    listening: Start, fault_points: Any, model: str, point: str
) -> None:
    """D1: SystemExit in a coroutine of an engine is an error of the request; the server goes on."""
    fault_points(model).fail(point, SystemExit(3), times=1)
    async with listening() as s:
        if model == "embedder":
            path, body = "/v1/embeddings", {"model": model, "input": "x"}
        else:
            path, body = "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "x"}]}
        assert (await s.http.post(path, json=body)).status_code == 500
        assert (await s.http.post(path, json=body)).status_code == 200


async def test_a_park_that_a_plugin_spoils_names_it(served: Start, odd: Any, caplog: pytest.LogCaptureFixture) -> None:
    """D5: the same for a hook that moves; the model is unloaded instead."""
    async with served(plugins=odd(offload="[].pop()"), tier={"host_cache_bytes": 64 * MIB}) as s:
        s.registry.apply([MODEL])
        assert (await s.encode("strange")).status_code == 200
        with caplog.at_level(logging.WARNING):
            await s.http.post("/v1/admin/models/strange/park", json={})
        assert "offload_to_host of plugin 'oddly' raised IndexError: pop from empty list" in caplog.text
        assert "Traceback" in caplog.text


ANSWERS = {
    "too short": ({"dense": "np.ones(10, dtype=np.float32)"}, "dense of shape (10,): it must be (64,)"),
    "a double": ({"dense": "np.ones(64)"}, "dense of dtype float64: it must be float32"),
    "a half": ({"dense": "np.ones(64, dtype=np.float16)"}, "dense of dtype float16: it must be float32"),
    "a matrix": ({"dense": "np.ones((1, 64), dtype=np.float32)"}, "dense of shape (1, 64): it must be (64,)"),
    "a list": ({"dense": "[1.0] * 64"}, "dense of type list: it must be a float32 array"),
    "negative tokens": ({"tokens": "-3"}, "tokens=-3: it must be a whole number, 0 or more"),
    "half a token": ({"tokens": "0.5"}, "tokens=0.5: it must be a whole number, 0 or more"),
}


@pytest.mark.parametrize(("parts", "told"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_that_is_not_what_the_model_states_is_refused(
    served: Start, odd: Any, parts: dict[str, str], told: str
) -> None:
    """D7: model and plugin are named; nothing odd is handed out."""
    async with served(plugins=odd(**parts)) as s:
        s.registry.apply([MODEL])
        answer = await s.encode("strange")
        assert answer.status_code == 500
        message = answer.json()["detail"]["message"]
        assert f"the engine of model 'strange' (plugin 'oddly') answered item 0 of its batch with {told}" in message


METHODS = {
    "run gives None": ({"before_run": "return None"}, "run", "returned NoneType: return a list of outputs"),
    "run gives an array": ({"before_run": "return np.ones((1, 64))"}, "run", "returned ndarray: return a list"),
    "run raises": ({"before_run": "{}['weights']"}, "run", "failed: KeyError: 'weights'"),
    "run exits": ({"before_run": "raise SystemExit(3)"}, "run", "failed: RuntimeError: the call raised SystemExit(3)"),
    "prepare gives None": ({"before_prepare": "return None"}, "prepare", "returned NoneType: return a list"),
    "prepare gives texts": ({"before_prepare": "return ['x']"}, "prepare", "returned items that are not Prepared"),
    "prepare gives half a token": (
        {"before_prepare": "return [Prepared(0.5, None)]"},
        "prepare",
        "returned an item with tokens=0.5: it must be a whole number, 0 or more",
    ),
    "prepare gives too few": ({"before_prepare": "return []"}, "prepare", "returned 0 of 1 items"),
    "prepare raises": ({"before_prepare": "1 / 0"}, "prepare", "failed: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("parts", "method", "told"), METHODS.values(), ids=METHODS)
async def test_an_engine_that_breaks_its_contract_is_named(
    served: Start, odd: Any, parts: dict[str, str], method: str, told: str
) -> None:
    """C6: the method, the model and the plugin, rather than "internal error"."""
    async with served(plugins=odd(**parts)) as s:
        s.registry.apply([MODEL])
        answers = [await s.encode("strange"), await s.embed(model="strange")]
    for answer in answers:
        error = answer.json().get("error") or answer.json()["detail"]
        assert (answer.status_code, error["code"]) == (500, "INFERENCE_ERROR")
        assert f"{method} of the engine of model 'strange' (plugin 'oddly') {told}" in error["message"]


LIST: Any = [1]


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (EncodeOutput(1, sparse=SparseVector(LIST, LIST)), "answered item 0 of its batch with sparse of list"),
        (ScoreOutput(1, 0.5), "answered item 0 of its batch with ScoreOutput: it must be an EncodeOutput"),
    ],
    ids=["lists", "a score"],
)
async def test_odd_answers_of_engines_with_turns_are_named(
    served: Start, monkeypatch: pytest.MonkeyPatch, output: Any, told: str
) -> None:
    """C6, D7: a sibling: what could not even be looked at was an "internal error"."""

    async def answer(self: FakeStreamEngine, request: BatchRequest) -> list[Any]:
        return [output]

    monkeypatch.setattr(FakeStreamEngine, "encode", answer)
    async with served() as s:
        found = await s.embed(model="embedder")
    assert (found.status_code, found.json()["error"]["code"]) == (500, "INFERENCE_ERROR")
    assert told in found.json()["error"]["message"]


async def test_dimensions_that_were_asked_for_are_the_ones_that_count(served: Start, odd: Any) -> None:
    """D7: a shorter vector is right where the request asks for it, and only then."""
    async with served(plugins=odd(dense="np.ones(10, dtype=np.float32)")) as s:
        s.registry.apply([MODEL])
        right = await s.http.post("/v1/embeddings", json={"model": "strange", "input": "x", "dimensions": 10})
        assert right.status_code == 200
        wrong = await s.http.post("/v1/embeddings", json={"model": "strange", "input": "x", "dimensions": 20})
        assert "dense of shape (10,): it must be (20,)" in wrong.json()["error"]["message"]


ROUTES = """
    from sie_core import hookimpl
    sie_api = 1

    @hookimpl
    def register_routes():
        from starlette.responses import PlainTextResponse
        from starlette.routing import Mount, Route

        async def mine(request):
            return PlainTextResponse("mine")

        return [
            Route("/v1/embeddings", mine, methods=["GET", "POST"]),
            Route("/v1/models/{name}/card", mine),
            Route("/healthz/", mine),
            Route("/x/hello", mine),
            Mount("/y", routes=[Route("/hello", mine)]),
        ]
"""


async def test_routes_that_shadow_those_of_the_server_are_refused(
    served: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D4: whatever their methods; the plugin is named and its other routes serve."""
    install_plugin(tmp_path, monkeypatch, "squatter", ROUTES)
    plugins = Plugins.load()
    with caplog.at_level(logging.WARNING, "sie_core.plugins"):
        async with served(plugins=plugins) as s:
            assert (await s.http.get("/v1/embeddings")).status_code == 405
            assert (await s.embed()).status_code == 200
            assert (await s.http.get("/v1/models/mini/card")).status_code == 404
            for path in ("/x/hello", "/y/hello"):
                assert (await s.http.get(path)).text == "mine"
    told = "its routes for /v1/embeddings, /v1/models/{name}/card, /healthz/ are not used"
    assert f"plugin 'squatter': {told}" in caplog.text
    (info,) = [info for info in plugins.info() if info.name == "squatter"]
    assert told in info.reason
    with pytest.raises(PluginConflict, match="/v1/embeddings"):
        async with served(plugins=Plugins.load(strict=True)):
            pass
