"""Listings, status, admin and operations."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sie_core import Residency
from sie_core.config import TelemetryConfig
from sie_core.http.views import STATES
from sie_core.plugins import Plugins
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints
from website import MIB, MODELS, TALKERS, Start, key_line, until


async def test_models_in_both_dialects(served: Start) -> None:
    async with served() as s:
        before = (await s.http.get("/v1/models")).json()
        await s.embed()
        await s.embed(model="gone")
        after = (await s.http.get("/v1/models")).json()
    assert before["object"] == "list"
    assert [card["id"] for card in before["data"]] == [card["name"] for card in before["models"]] == [*MODELS, *TALKERS]
    for card in before["data"]:
        assert card.keys() == {"id", "object", "created", "owned_by"}
        assert (card["object"], type(card["created"])) == ("model", int)
    cold = {card["name"]: card for card in before["models"]}
    warm = {card["name"]: card for card in after["models"]}
    seen = [[card[name] for name in ("loaded", "state", "residency")] for card in (cold["mini"], warm["mini"])]
    assert seen == [[False, "available", "unloaded"], [True, "loaded", "resident"]]
    assert warm["mini"]["inputs"] == ["text"]
    assert warm["mini"]["outputs"] == ["dense"]
    assert warm["mini"]["dims"] == {"dense": 8}
    assert warm["mini"]["max_sequence_length"] == 16
    assert warm["mini"]["device_bytes"] > 0
    assert warm["mini"]["last_error"] is None
    assert warm["gone"]["state"] == "failed"
    assert warm["gone"]["last_error"].keys() >= {"code", "message", "attempts", "permanent"}
    assert warm["gone"]["last_error"]["permanent"] is True


def test_every_residency_has_a_public_state() -> None:
    assert set(STATES) == set(Residency)
    assert set(STATES.values()) == {"available", "loading", "loaded", "unloading", "failed"}


@pytest.mark.parametrize("path", ["org/mini", "org%2Fmini", "org%2fmini", "org__mini"])
async def test_one_model_by_any_spelling_of_its_name(served: Start, path: str) -> None:
    async with served() as s:
        response = await s.http.get(f"/v1/models/{path}")
    body = response.json()
    assert (body["id"], body["name"], body["object"]) == ("org/mini", "org/mini", "model")
    assert body["state"] == "available"


async def test_listings_in_msgpack_for_those_who_accept_it(served: Start) -> None:
    headers = {"accept": "application/msgpack", "content-type": "application/msgpack"}
    async with served() as s:
        for path in ("/v1/models", "/v1/models/mini", "/v1/status", "/v1/admin/decisions"):
            response = await s.http.get(path, headers=headers)
            assert response.headers["content-type"] == "application/msgpack"
            assert msgspec.msgpack.decode(response.content)


async def test_status(served: Start) -> None:
    async with served() as s:
        await s.embed()
        await s.http.post("/v1/admin/models/mini/pin")
        body = (await s.http.get("/v1/status")).json()
    assert body["uptime_s"] >= 0
    assert body["version"]
    accounts = {account["account"]: account for account in body["accounts"]}
    assert accounts.keys() == {"host", "emulated:0"}
    for account in body["accounts"]:
        assert account.keys() == {"account", "capacity", "used", "promised", "unrealised", "available", "left_behind"}
        assert all(isinstance(account[name], int) for name in ("capacity", "promised", "unrealised", "available"))
    assert accounts["emulated:0"]["promised"] > 0
    mini = next(model for model in body["models"] if model["name"] == "mini")
    assert (mini["adapter"], mini["residency"], mini["device"]) == ("fake", "resident", "emulated:0")
    assert (mini["pinned"], mini["leases"], mini["queued"], mini["last_error"]) == (True, 0, 0, None)
    assert mini["device_bytes"] == 1024 * 1024


async def test_load_and_unload(served: Start) -> None:
    async with served() as s:
        loaded = await s.http.post("/v1/admin/models/org%2Fmini/load")
        again = await s.http.post("/v1/admin/models/org__mini/load", json={})
        gone = await s.http.post("/v1/admin/models/org/mini/unload", json={"force": False})
        twice = await s.http.post("/v1/admin/models/org/mini/unload")
    assert [r.json()["residency"] for r in (loaded, again, gone, twice)] == [
        *("resident", "resident", "unloaded", "unloaded")
    ]
    assert loaded.json()["name"] == "org/mini"


async def test_a_forced_unload_ends_what_runs_with_an_error(served: Start) -> None:
    async with served() as s:
        latch = FaultPoints.of("mini").hold("run")
        running = asyncio.create_task(s.embed())
        await latch.arrival()
        unloading = asyncio.create_task(s.http.post("/v1/admin/models/mini/unload", json={"force": True}))
        response = await running
        latch.release()
        assert (await unloading).status_code == 200
    assert (response.status_code, response.json()["error"]["code"]) == (503, "RESOURCE_EXHAUSTED")
    assert "unloaded by force" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "1"


async def test_load_waits_no_longer_than_it_is_told_to(served: Start) -> None:
    async with served() as s:
        latch = FaultPoints.of("mini").hold("load")
        asked = asyncio.create_task(s.http.post("/v1/admin/models/mini/load", json={"wait_s": 0.5}))
        await latch.arrival()  # what has not begun by then is called off
        response = await asked
        status = (await s.http.get("/v1/status")).json()["models"][0]
        latch.release()
        await until(lambda: s.registry.status("mini").residency == "resident")
    assert (response.status_code, response.json()["detail"]["code"]) == (503, "MODEL_LOADING")
    assert status["residency"] == "loading"


async def test_loading_what_can_not_be_loaded(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/admin/models/gone/load")
    assert (response.status_code, response.json()["detail"]["code"]) == (502, "MODEL_LOAD_FAILED")


@pytest.mark.parametrize("action", ["park", "wake"])
async def test_without_a_host_tier_there_is_no_parking(served: Start, action: str) -> None:
    async with served() as s:
        response = await s.http.post(f"/v1/admin/models/mini/{action}")
    assert (response.status_code, response.json()["detail"]["code"]) == (501, "UNSUPPORTED")
    assert response.headers["x-should-retry"] == "false"


async def test_pin_and_unpin(served: Start) -> None:
    async with served() as s:
        pinned = (await s.http.post("/v1/admin/models/mini/pin")).json()["pinned"]
        unpinned = (await s.http.post("/v1/admin/models/mini/unpin")).json()["pinned"]
    assert (pinned, unpinned) == (True, False)


@pytest.mark.parametrize("body", [b'{"wait_s":"x"}', b'{"wait_s":-1}', b'{"wait_s":true}', b"[]", b"{"])
async def test_bad_options_of_admin_calls(served: Start, body: bytes) -> None:
    async with served() as s:
        response = await s.http.post(
            "/v1/admin/models/mini/load", content=body, headers={"content-type": "application/json"}
        )
    assert (response.status_code, response.json()["detail"]["code"]) == (400, "INVALID_INPUT")


async def test_a_form_is_no_admin_call(served: Start) -> None:
    async with served() as s:
        response = await s.http.post("/v1/admin/models/mini/unload", data={"force": "true"})
    assert response.status_code == 415


async def test_decisions(served: Start) -> None:
    async with served() as s:
        await s.embed(model="huge")
        await s.http.post("/v1/admin/models/mini/load")
        await s.http.post("/v1/admin/models/mini/unload")
        every = (await s.http.get("/v1/admin/decisions")).json()["decisions"]
        last = (await s.http.get("/v1/admin/decisions?limit=1")).json()["decisions"]
        none = (await s.http.get("/v1/admin/decisions?limit=0")).json()["decisions"]
        bad = await s.http.get("/v1/admin/decisions?limit=x")
    assert every
    assert every[-1:] == last
    assert none == []
    assert bad.status_code == 400
    for one in every:
        assert one.keys() == {
            *("at", "model", "action", "reason", "cause", "needed_bytes", "promised_bytes", "freed_bytes", "victims")
        }


async def test_metrics_count_requests_by_route_and_status(served: Start) -> None:
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(telemetry=telemetry) as s:
        await s.embed()
        await s.encode("org/mini")
        await s.encode("none/such")
        for number in range(3):
            await s.http.get(f"/nowhere/{number}")
        response = await s.http.get("/metrics")
    telemetry.shutdown()
    assert response.headers["content-type"].startswith("text/plain")
    counts = {}
    for line in response.text.splitlines():
        if line.startswith("http_server_request_duration_seconds_count{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            counts[labels["http_route"], labels["http_response_status_code"]] = float(line.split()[-1])
    assert counts == {
        ("/v1/embeddings", "200"): 1,
        ("/v1/encode/{model}", "200"): 1,
        ("/v1/encode/{model}", "404"): 1,
        ("none", "404"): 3,
    }


async def test_metrics_that_are_off_are_not_there(served: Start) -> None:
    async with served() as s:
        response = await s.http.get("/metrics")
    assert response.status_code == 404
    assert "telemetry.prometheus" in response.json()["detail"]["message"]


async def test_health_and_readiness(served: Start) -> None:
    async with served() as s:
        alive = await s.http.get("/healthz")
        ready = await s.http.get("/readyz")
        head = await s.http.head("/healthz")
    assert alive.json() == {"status": "ok"}
    assert ready.json() == {"status": "ready", "problems": []}
    assert head.status_code == 200


# --- routes of plugins -----------------------------------------------------------------------------

PLUGIN = """
from sie_core import ModelLoading, hookimpl
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Route

sie_api = 1


async def hello(request):
    return PlainTextResponse(f"{len(request.app.state.service.models())} models")


async def busy(request):
    raise ModelLoading("not yet", retry_after_s=3)


async def broken(request):
    raise RuntimeError("secret")


async def teapot(request):
    raise HTTPException(418, "short and stout")


async def hijack(request):
    return PlainTextResponse("mine now")


@hookimpl
def register_routes():
    own = [Route(f"/x/{each.__name__}", each) for each in (hello, busy, broken, teapot)]
    return [*own, Route("/healthz", hijack), Route("/v1/embeddings", hijack, methods=["POST"])]
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """An installed distribution whose plugin adds routes."""
    (tmp_path / "routes_for_tests.py").write_text(PLUGIN)
    info = tmp_path / "routes_for_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: routes-for-tests\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sie]\nroutes-for-tests = routes_for_tests\n")
    monkeypatch.syspath_prepend(tmp_path)
    return Plugins.load()


async def test_routes_of_plugins_come_after_the_built_in_ones(served: Start, plugins: Plugins) -> None:
    async with served(plugins=plugins) as s:
        hello = await s.http.get("/x/hello")
        alive = await s.http.get("/healthz")
        embedded = await s.embed()
    assert hello.text == f"{len(MODELS) + len(TALKERS)} models"
    assert alive.json() == {"status": "ok"}
    assert embedded.json()["object"] == "list"


async def test_errors_in_routes_of_plugins_are_rendered_as_ours(served: Start, plugins: Plugins) -> None:
    async with served(plugins=plugins) as s:
        busy = await s.http.get("/x/busy")
        broken = await s.http.get("/x/broken")
        teapot = await s.http.get("/x/teapot")
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "3")
    assert busy.json()["detail"]["code"] == busy.json()["error"]["code"] == "MODEL_LOADING"
    assert (broken.status_code, broken.json()["detail"]["code"]) == (500, "INTERNAL_ERROR")
    assert "secret" not in broken.text
    assert (teapot.status_code, teapot.json()["detail"]["message"]) == (418, "short and stout")


async def test_routes_of_plugins_want_a_key_too(served: Start, plugins: Plugins) -> None:
    async with served(plugins=plugins, api_keys=(key_line("inference", "k"),)) as s:
        without = await s.http.get("/x/hello")
        with_key = await s.http.get("/x/hello", headers={"authorization": "Bearer k"})
    assert (without.status_code, with_key.status_code) == (401, 200)


async def test_what_an_engine_says_of_itself_and_holds_beyond_its_promise(served: Start) -> None:
    telemetry = Telemetry.create(TelemetryConfig(), environ={})

    async def row(s: Any) -> dict[str, Any]:
        models = (await s.http.get("/v1/status")).json()["models"]
        return next(row for row in models if row["name"] == "greedy")

    figures = {"pool_bytes": 4096, "share": 0.25}
    async with served(telemetry=telemetry, tier={"host_cache_bytes": 64 * MIB}) as s:
        telemetry.watch(s.registry)
        assert (await row(s))["figures"] == {}
        assert (await s.encode("greedy")).status_code == 200
        status = await row(s)
        assert (status["figures"], status["overrun_bytes"], status["device_bytes"]) == (figures, 2 * MIB, 6 * MIB)
        metrics = (await s.http.get("/metrics")).text
        assert 'sie_worker_model_figure{figure="share",model="greedy"} 0.25\n' in metrics
        assert 'sie_worker_model_overrun_memory_bytes{model="greedy"} 2.097152e+06\n' in metrics
        told = [one for one in s.registry.decisions() if one.action == "overrun"]
        assert [(one.model, one.promised_bytes) for one in told] == [("greedy", 4 * MIB)]
        await s.registry.unload("greedy")
        status = await row(s)
        assert (status["figures"], status["overrun_bytes"]) == ({}, 0)
    telemetry.shutdown()
