"""The error table: statuses, codes, Retry-After and x-should-retry, in each dialect and in msgpack."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import msgspec
import pytest
import sie_core.errors as tree
from sie_core import (
    BodyTooLarge,
    ConfigError,
    ConfigProblem,
    DeadlineExceeded,
    DeviceOutOfMemory,
    EngineDied,
    EngineStartError,
    Forbidden,
    GatedModel,
    HookTimeout,
    InferenceError,
    InputTooLong,
    InvalidInput,
    LedgerError,
    LoraLoading,
    ModelLoadFailed,
    ModelLoading,
    ModelNotFound,
    NeverFits,
    NonFiniteOutput,
    QueueFull,
    RequestError,
    ResourceExhausted,
    ShuttingDown,
    SieError,
    TransitionCancelled,
    Unauthorized,
    Unsupported,
)
from sie_core.http.errors import RULES, Dialect, render, rule_for
from sie_testing import FaultPoints
from website import Served, Start, key_line, until


def leaves() -> list[type[SieError]]:
    found = [cls for _, cls in inspect.getmembers(tree, inspect.isclass) if issubclass(cls, SieError)]
    return [cls for cls in found if not any(other is not cls and issubclass(other, cls) for other in found)]


def test_no_error_is_left_to_the_rule_of_its_ancestor() -> None:
    assert len(leaves()) > 25
    assert [cls.__name__ for cls in leaves() if cls not in RULES] == []


class OfAPlugin(QueueFull):
    """An error that a plugin derives from ours."""


def test_an_error_of_a_plugin_goes_by_its_nearest_ancestor() -> None:
    assert rule_for(OfAPlugin) == rule_for(QueueFull)
    assert rule_for(ValueError) is None


TABLE: list[tuple[SieError, int, int, str, str | None, bool]] = [
    # error, native status, OpenAI status, code, Retry-After, may be retried
    (InvalidInput("x"), 400, 400, "INVALID_INPUT", None, False),
    (InputTooLong(tokens=9, limit=8), 400, 400, "INPUT_TOO_LONG", None, False),
    (Unsupported("x"), 400, 400, "INVALID_INPUT", None, False),
    (RequestError("x"), 400, 400, "INVALID_INPUT", None, False),
    (Unauthorized("x"), 401, 401, "UNAUTHORIZED", None, False),
    (Forbidden("x"), 403, 403, "FORBIDDEN", None, False),
    (ModelNotFound("x"), 404, 404, "MODEL_NOT_FOUND", None, False),
    (BodyTooLarge("x", limit=1), 413, 413, "BODY_TOO_LARGE", None, False),
    (QueueFull("x", retry_after_s=3.2), 503, 429, "QUEUE_FULL", "4", True),
    (LoraLoading("x", retry_after_s=2), 503, 503, "LORA_LOADING", "2", True),
    (ModelLoading("x", retry_after_s=7.5), 503, 503, "MODEL_LOADING", "8", True),
    (ResourceExhausted("x", retry_after_s=5), 503, 503, "RESOURCE_EXHAUSTED", "5", True),
    (ShuttingDown("x", retry_after_s=5), 503, 503, "SHUTTING_DOWN", "5", True),
    (DeadlineExceeded("x"), 504, 504, "DEADLINE_EXCEEDED", None, True),
    (
        ModelLoadFailed("m", error_class="GatedModel", reason="x", permanent=True, attempts=2),
        *(502, 502, "MODEL_LOAD_FAILED", None, False),
    ),
    (GatedModel("x"), 502, 502, "MODEL_LOAD_FAILED", None, False),
    (EngineStartError("x"), 502, 502, "MODEL_LOAD_FAILED", None, False),
    (NeverFits("x", account="cpu", needed=2, capacity=1), 502, 502, "MODEL_LOAD_FAILED", None, False),
    (DeviceOutOfMemory("x"), 503, 503, "RESOURCE_EXHAUSTED", "5", True),
    (InferenceError("x"), 500, 500, "INFERENCE_ERROR", None, False),
    (NonFiniteOutput([1, 2]), 500, 500, "INFERENCE_ERROR", None, False),
    (EngineDied("x"), 500, 500, "INFERENCE_ERROR", None, True),
    (HookTimeout("load", model="m", seconds=1.0), 503, 503, "RESOURCE_EXHAUSTED", "5", True),
    (TransitionCancelled("x"), 503, 503, "MODEL_LOADING", "5", True),
]


@pytest.mark.parametrize(
    ("error", "native", "openai", "code", "retry_after", "retry"), TABLE, ids=lambda v: type(v).__name__
)
def test_the_table(error: SieError, native: int, openai: int, code: str, retry_after: str | None, retry: bool) -> None:
    for dialect, status in ((Dialect.NATIVE, native), (Dialect.OPENAI, openai), (Dialect.BOTH, native)):
        reply = render(error, dialect)
        headers = {name.decode(): value.decode() for name, value in reply.headers}
        assert reply.status == status
        assert headers.get("retry-after") == retry_after
        assert headers.get("x-should-retry") == (None if retry else "false")
        body = msgspec.json.decode(reply.body)
        shapes = {Dialect.NATIVE: {"detail"}, Dialect.OPENAI: {"error"}, Dialect.BOTH: {"detail", "error"}}
        assert body.keys() == shapes[dialect]
        for shape in body.values():
            assert shape["code"] == code
            assert shape["message"]
        if "error" in body:
            assert body["error"].keys() >= {"message", "type", "param", "code"}


def test_errors_of_an_item_are_made_alike() -> None:
    """D8: message first, then what it is about; and the old form of InputTooLong."""
    for kind in (InvalidInput, InputTooLong, Unsupported):
        error = kind("not this one", index=3, param="text")
        assert (error.message, error.index, error.param) == ("not this one", 3, "text")
    old = InputTooLong(tokens=9, limit=8, index=1)
    assert (old.tokens, old.limit, old.index) == (9, 8, 1)
    assert old.message.startswith("the text has 9 tokens and the model takes 8: ")
    assert InputTooLong().message.startswith("the text is too long for the model: ")


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (119.2, "120"), (9999.0, "120")])
def test_retry_after_is_a_whole_number_from_1_to_120(seconds: float, header: str) -> None:
    headers = dict(render(ModelLoading("x", retry_after_s=seconds), Dialect.NATIVE).headers)
    assert headers[b"retry-after"].decode() == header


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_retry_after_of_no_number_is_the_longest(seconds: float) -> None:
    assert dict(render(ModelLoading("x", retry_after_s=seconds), Dialect.NATIVE).headers)[b"retry-after"] == b"120"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the secret of the house"),
        LedgerError("the secret of the house"),
        ConfigError([ConfigProblem("the secret of the house")]),
    ],
)
def test_the_inside_is_logged_and_not_told(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        reply = render(error, Dialect.NATIVE)
    detail = msgspec.json.decode(reply.body)["detail"]
    assert (reply.status, detail["code"]) == (500, "INTERNAL_ERROR")
    assert b"secret" not in reply.body
    assert "secret" in caplog.text
    number = detail["message"].split()[2].rstrip(";")
    assert number in caplog.text


def test_texts_that_are_no_unicode_are_told_as_far_as_they_are() -> None:
    error = ModelLoadFailed("m\udcff", error_class="X", reason="no file \udc80.bin", permanent=True, attempts=1)
    reply = render(error, Dialect.NATIVE)
    assert msgspec.json.decode(reply.body)["detail"]["message"].endswith("no file ?.bin")


def test_what_an_engine_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = InferenceError("the engine failed")
    error.__cause__ = RuntimeError("illegal memory access")
    with caplog.at_level(logging.ERROR):
        render(error, Dialect.NATIVE)
    assert "illegal memory access" in caplog.text


@pytest.mark.parametrize("accept", ["application/msgpack", "application/x-msgpack", "application/msgpack, text/html"])
async def test_errors_are_json_whatever_the_request_accepts(served: Start, accept: str) -> None:
    """C13: public clients of either wire look for an error's fields in JSON."""
    headers = {"accept": accept, "content-type": "application/msgpack"}
    async with served() as s:
        native = await s.http.post("/v1/encode/mini", content=msgspec.msgpack.encode({"items": []}), headers=headers)
        shared = await s.http.get("/v1/models/none", headers=headers)
        openai = await s.http.post("/v1/embeddings", content=b"", headers=headers)
        failed = await s.http.post(
            "/v1/encode/gone", content=msgspec.msgpack.encode({"items": [{"text": "a"}]}), headers=headers
        )
        admin = await s.http.post("/v1/admin/models/none/load", headers=headers)
        lost = await s.http.get("/none", headers=headers)
    for answer in (native, shared, openai, failed, admin, lost):
        assert answer.headers["content-type"] == "application/json"
    assert native.json()["detail"]["code"] == "INVALID_INPUT"
    assert (failed.status_code, failed.json()["detail"]["code"]) == (502, "MODEL_LOAD_FAILED")
    assert shared.json().keys() == lost.json().keys() == {"detail", "error"}
    assert openai.json()["error"]["code"] == "INVALID_INPUT"


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "shapes"),
    [
        ("GET", "/nowhere", 404, "NOT_FOUND", {"detail", "error"}),
        ("GET", "/v1/models/", 404, "MODEL_NOT_FOUND", {"detail", "error"}),
        ("GET", "/v1/models/none", 404, "MODEL_NOT_FOUND", {"detail", "error"}),
        ("DELETE", "/v1/models/mini", 405, "METHOD_NOT_ALLOWED", {"detail", "error"}),
        ("GET", "/v1/embeddings", 405, "METHOD_NOT_ALLOWED", {"error"}),
        ("GET", "/v1/encode/mini", 405, "METHOD_NOT_ALLOWED", {"detail"}),
        ("POST", "/v1/status", 405, "METHOD_NOT_ALLOWED", {"detail"}),
        ("POST", "/v1/embeddings/", 404, "NOT_FOUND", {"error"}),
        ("POST", "/v1/chat/nothing", 404, "NOT_FOUND", {"error"}),
        ("GET", "/v1/admin/models/mini/load", 405, "METHOD_NOT_ALLOWED", {"detail"}),
        ("POST", "/v1/admin/models/mini/explode", 404, "NOT_FOUND", {"detail"}),
        ("POST", "/v1/admin/models/none/load", 404, "MODEL_NOT_FOUND", {"detail"}),
        ("GET", "/ws/status", 404, "NOT_FOUND", {"detail"}),
    ],
)
async def test_unknown_paths_and_methods(
    served: Start, method: str, path: str, status: int, code: str, shapes: set[str]
) -> None:
    async with served() as s:
        response = await s.http.request(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-should-retry"] == "false"
    body = response.json()
    assert body.keys() == shapes
    assert {shape["code"] for shape in body.values()} == {code}
    if status == 405:
        assert response.headers["allow"]


async def test_load_failures_say_whether_to_hope(served: Start) -> None:
    async with served() as s:
        permanent = await s.embed(model="gone")
        again = await s.encode("gone")
        transient = await s.encode("flaky")
        cooling = await s.encode("flaky")
        too_large = await s.encode("huge")
    assert permanent.status_code == again.status_code == transient.status_code == too_large.status_code == 502
    for response in (permanent, again, transient, too_large):
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
    error = permanent.json()["error"]
    assert (error["code"], error["error_class"]) == ("MODEL_LOAD_FAILED", "ModelSourceNotFound")
    assert (error["permanent"], error["attempts"]) == (True, 1)
    assert transient.json()["detail"]["permanent"] is False
    assert too_large.json()["detail"]["error_class"] == "NeverFits"
    assert cooling.status_code == 503
    assert 1 <= int(cooling.headers["retry-after"]) <= 60
    assert "x-should-retry" not in cooling.headers


_LOG = "the end of its log:\n  File /srv/models/loader.py, line 7"


async def test_the_details_of_a_load_failure_are_for_those_who_run_the_server(
    served: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(api_keys=(key_line("inference", "in-key"), key_line("admin", "root-key"))) as s:
        FaultPoints.of("mini").fail("load", EngineStartError("no engine came").explained(_LOG), times=1)
        told = {}
        for key in ("in-key", "root-key"):
            s.http.headers["authorization"] = f"Bearer {key}"
            failed = await s.embed()
            assert ("no engine came" in failed.text) is (key == "root-key")
            assert "EngineStartError" in failed.json()["error"]["message"]
            card = (await s.http.get("/v1/models/mini")).json()
            status = (await s.http.get("/v1/status")).json()
            row = next(row for row in status["models"] if row["name"] == "mini")
            told[key] = [failed.json()["error"], card["last_error"], row["last_error"]]
            assert ("loader.py" in failed.text + str(card) + str(status)) is (key == "root-key")
    assert [shown.get("details") for shown in told["in-key"]] == [None, None, None]
    assert [shown.get("details") for shown in told["root-key"]] == [_LOG, _LOG, _LOG]
    assert _LOG in caplog.text


@pytest.mark.parametrize("key", ["in-key", "root-key"])
async def test_so_are_the_details_of_an_engines_death(
    served: Start, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(api_keys=(key_line("inference", "in-key"), key_line("admin", "root-key"))) as s:
        s.http.headers["authorization"] = f"Bearer {key}"
        await s.service.load("slow")
        engine = s.engine("slow")
        body = {"model": "slow", "prompt": "a " * 100, "stream": True}
        asking = asyncio.create_task(s.http.post("/v1/completions", json=body))
        await until(lambda: engine.emitted)
        engine.die("it fell over", _LOG)
        broken = await asking
        whole = broken.text
    assert (broken.status_code, "[DONE]" in whole) == (200, False)
    assert "the engine of model 'slow' died" in whole
    assert ("it fell over" in whole) is (key == "root-key")
    assert ("loader.py" in whole) is (key == "root-key")
    assert _LOG in caplog.text


async def _fill(s: Served) -> list[asyncio.Task[Any]]:
    """One request runs (until its latch is released), one waits."""
    assert (await s.embed()).status_code == 200
    latch = FaultPoints.of("mini").hold("run", times=1)
    tasks = [asyncio.create_task(s.embed())]
    await latch.arrival()
    tasks.append(asyncio.create_task(s.embed()))
    await until(lambda: s.registry.status("mini").leases == 2)
    return tasks


async def test_a_full_queue_is_429_for_openai_and_503_for_native_clients(served: Start) -> None:
    async with served(queue=1) as s:
        waiting = await _fill(s)
        openai, native = await s.embed(), await s.encode()
        FaultPoints.of("mini").reset()
        answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (openai.status_code, openai.json()["error"]["code"]) == (429, "QUEUE_FULL")
    assert (native.status_code, native.json()["detail"]["code"]) == (503, "QUEUE_FULL")
    for response in (openai, native):
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert "x-should-retry" not in response.headers


async def test_a_model_that_takes_long_to_load_is_a_503(served: Start) -> None:
    async with served(load_wait_s=0.05) as s:
        latch = FaultPoints.of("mini").hold("load")
        response = await s.embed()
        latch.release()
        await until(lambda: s.registry.status("mini").residency == "resident")
        after = await s.embed()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "MODEL_LOADING")
    assert response.headers["retry-after"]
    assert after.status_code == 200


async def test_an_engine_that_breaks_is_a_500_and_the_next_request_is_served(served: Start) -> None:
    async with served() as s:
        FaultPoints.of("mini").fail("run", RuntimeError("out of luck"), times=1)
        broken = await s.embed()
        after = await s.embed()
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "INFERENCE_ERROR")
    assert after.status_code == 200


async def test_a_stopping_server_says_so(served: Start) -> None:
    async with served() as s:
        assert (await s.http.get("/readyz")).status_code == 200
        s.service.begin_shutdown()
        response = await s.embed()
        ready = await s.http.get("/readyz")
        alive = await s.http.get("/healthz")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "SHUTTING_DOWN")
    assert ready.status_code == 503
    assert ready.json()["problems"]
    assert alive.status_code == 200
