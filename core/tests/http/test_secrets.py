"""Keys of the role inference learn what went wrong, and nothing of where files lie on the server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from sie_core import GatedModel, ModelSourceInvalid, ModelSourceNotFound, UnsafeSource
from sie_testing import FaultPoints
from website import Start, key_line
from websockets.asyncio.client import connect

SECRET = "/srv/secret"
KEYS = (key_line("inference", "reader"), key_line("admin", "boss"))
FAILURES = [
    ModelSourceNotFound(f"no such folder: {SECRET}/model"),
    ModelSourceInvalid(f"{SECRET}/model/config.json is truncated"),
    UnsafeSource(f"{SECRET}/model/weights.pt would run code"),
    GatedModel(f"no token in {SECRET}/token"),
    OSError(5, "input/output error", f"{SECRET}/model/model.safetensors"),
    RuntimeError(f"no room in {SECRET}"),
]


def asking(s: Any, key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
@pytest.mark.parametrize("key", ["reader", "boss"])
async def test_failed_loads(listening: Start, failure: Exception, key: str) -> None:
    """F14: of answers at once and later, in every dialect, of models' views and of the feed."""
    async with listening(api_keys=KEYS) as s:
        headers = asking(s, key)
        FaultPoints.of("mini").fail("load", failure, times=1)
        answers: list[httpx.Response] = [
            await s.http.post("/v1/embeddings", json={"model": "mini", "input": "hello"}, headers=headers),
            await s.http.post("/v1/encode/mini", json={"items": [{"text": "hello"}]}, headers=headers),
            await s.http.post("/v2/embed", json={"model": "mini", "texts": ["hello"]}, headers=headers),
        ]
        for path in ("/v1/models/mini", "/v1/models", "/v1/status"):
            answers.append(await s.http.get(path, headers=headers))
        url = s.url.replace("http://", "ws://") + "/ws/status"
        async with connect(url, additional_headers=headers) as socket:
            feed = json.loads(await socket.recv())
    (row,) = [one for one in feed["models"] if one["name"] == "mini"]
    assert answers[0].status_code in (502, 503)
    assert type(failure).__name__ in answers[0].json()["error"]["message"]
    assert row["last_error"]["message"]
    told = [answer.text for answer in answers] + [json.dumps(feed)]
    assert [SECRET in text for text in told] == [key == "boss"] * len(told)


@pytest.mark.parametrize("key", ["reader", "boss"])
async def test_lora_adapters(served: Start, key: str) -> None:
    """F14: neither their sources nor why they can't be loaded."""
    async with served(api_keys=KEYS) as s:
        headers = asking(s, key)
        await s.service.load_lora("adaptable", "good", f"path:{SECRET}/good")
        FaultPoints.of("adaptable").fail("lora_load", ModelSourceInvalid(f"{SECRET}/bad is damaged"), times=1)
        body = {"items": [{"text": "hello"}], "params": {"lora": "bad"}}
        loaded = await s.http.post(
            "/v1/admin/models/adaptable/loras/bad", json={"source": f"path:{SECRET}/bad"}, headers=asking(s, "boss")
        )
        failed = await s.http.post("/v1/encode/adaptable", json=body, headers=headers)
        status = await s.http.get("/v1/status", headers=headers)
    (row,) = [one for one in status.json()["models"] if one["name"] == "adaptable"]
    assert loaded.status_code == failed.status_code == 502
    assert [lora["name"] for lora in row["loras"]] == ["good", "bad"]
    assert (SECRET in failed.text) is (key == "boss")
    assert (SECRET in status.text) is (key == "boss")
    assert [lora["source"] is None for lora in row["loras"]] == [key == "reader"] * 2


@pytest.mark.parametrize("key", ["reader", "boss"])
async def test_engines_that_fail(served: Start, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """F14: what an engine raises is named by its class; the log has the rest."""
    async with served(api_keys=KEYS) as s:
        headers = asking(s, key)
        FaultPoints.of("mini").fail("run", FileNotFoundError(2, "gone", f"{SECRET}/cache"), times=1)
        answer = await s.http.post("/v1/encode/mini", json={"items": [{"text": "hello"}]}, headers=headers)
    assert answer.status_code == 500
    assert "FileNotFoundError" in answer.json()["detail"]["message"]
    assert (SECRET in answer.text) is (key == "boss")
    assert SECRET in caplog.text
