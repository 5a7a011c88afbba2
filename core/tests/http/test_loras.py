"""LoRA adapters over HTTP: load, select, unload; every refusal says what there is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sie_core import RequestParams
from sie_testing import FaultPoints, expected_vector
from website import Start, key_line, until

PATH = "/v1/admin/models/adaptable/loras"


def loras(body: dict[str, Any]) -> dict[str, bool]:
    return {lora["name"]: lora["loaded"] for lora in body["loras"]}


async def test_an_adapter_is_loaded_selected_and_unloaded(served: Start) -> None:
    async with served() as s:
        plain = (await s.encode("adaptable")).json()
        loaded = await s.http.post(f"{PATH}/billing", json={"source": "path:/loras/billing"})
        assert loaded.status_code == 200, loaded.text
        assert loras(loaded.json()) == {"billing": True}
        want = expected_vector("hello", params=RequestParams(lora="billing")).tolist()
        for params in ({"lora": "billing"}, {"options": {"lora": "billing"}}):
            got = (await s.encode("adaptable", params=params)).json()
            assert got["items"][0]["dense"]["values"] == pytest.approx(want)
        openai = await s.embed(model="adaptable", lora="billing")
        assert openai.json()["data"][0]["embedding"] == pytest.approx(want)
        assert (await s.encode("adaptable")).json()["items"] == plain["items"]
        status = (await s.http.get("/v1/status")).json()
        assert next(model for model in status["models"] if model["name"] == "adaptable")["loras"] == [
            {
                "name": "billing", "source": "path:/loras/billing", "loaded": True, "device_bytes": 1024, "in_use": 0,
                "last_error": None,
            }
        ]  # fmt: skip
        gone = await s.http.delete(f"{PATH}/billing")
        assert gone.status_code == 200
        assert loras(gone.json()) == {}
        refused = await s.encode("adaptable", params={"lora": "billing"})
        assert refused.status_code == 400
        assert "no LoRA adapter 'billing'" in refused.json()["detail"]["message"]


@pytest.mark.parametrize(
    ("name", "body", "status", "message"),
    [
        ("billing", {"source": "billing"}, 400, "not a model source"),
        ("billing", {"source": "path:loras/billing"}, 400, "absolute path"),
        ("billing", {"source": "path:/" + "x" * 50_000}, 400, "has 50006 characters; 4096 at most"),
        ("billing", {"source": 7}, 400, "'source' must be a text"),
        ("billing", {}, 400, "has no LoRA adapter 'billing'"),
        ("billing", {"sorce": "path:/x"}, 400, "'sorce' is no field here; there is source and wait_s"),
        ("bill ing", {"source": "path:/x"}, 400, "holds ' '"),
        ("", {"source": "path:/x"}, 400, "it is empty"),
        ("a/loras/b", {"source": "path:/x"}, 404, "'adaptable/loras/a' is not configured"),  # C5
        ("a/loras", {"source": "path:/x"}, 400, "has a part 'loras'"),  # C5
        ("billing", {"source": "path:/missing"}, 502, "made up to be missing"),
    ],
)
async def test_bad_requests_to_load_one(
    served: Start, name: str, body: dict[str, Any], status: int, message: str
) -> None:
    async with served() as s:
        answer = await s.http.post(f"{PATH}/{name}", json=body)
        assert answer.status_code == status, answer.text
        assert message in answer.json()["detail"]["message"]
        assert (await s.encode("adaptable")).status_code == 200


async def test_models_that_take_none_and_names_that_are_no_text(served: Start) -> None:
    async with served() as s:
        answer = await s.http.post("/v1/admin/models/mini/loras/billing", json={"source": "path:/x"})
        assert answer.status_code == 400
        assert "takes no LoRA adapters" in answer.json()["detail"]["message"]
        assert (await s.http.get("/v1/status")).json()["models"][0]["loras"] == []
        wrong = await s.http.put("/v1/admin/models/mini/loras/billing")
        assert (wrong.status_code, set(wrong.headers["allow"].split(", "))) == (405, {"DELETE", "POST"})
        both = await s.encode("adaptable", params={"lora": "a", "options": {"lora": "b"}})
        assert (both.status_code, "'b'" in both.json()["detail"]["message"]) == (400, True)
        for bad in (7, "", ["billing"]):
            assert (await s.encode("adaptable", params={"lora": bad})).status_code == 400
            assert (await s.embed(model="adaptable", lora=bad)).status_code == 400
        assert (await s.http.delete(f"{PATH}/nobody")).status_code == 400
        assert (await s.http.delete("/v1/admin/models/nobody/loras/x")).status_code == 404
        assert (await s.http.delete(f"{PATH}/nobody?wait_s=soon")).status_code == 400


async def test_a_request_that_comes_too_early_is_told_when_to_come_back(served: Start) -> None:
    async with served(load_wait_s=0.2) as s:
        await s.encode("adaptable")
        latch = FaultPoints.of("adaptable").hold("lora_load")
        early = await s.http.post(f"{PATH}/billing", json={"source": "path:/loras/billing"})
        assert early.status_code == 503
        assert early.json()["detail"]["code"] == "LORA_LOADING"
        assert 1 <= int(early.headers["retry-after"]) <= 120
        selecting = asyncio.create_task(s.encode("adaptable", params={"lora": "billing"}))
        await asyncio.sleep(0)
        latch.release()
        assert (await selecting).status_code == 200
        await until(lambda: s.registry.status("adaptable").leases == 0)


async def test_only_an_admin_may_load_one(served: Start) -> None:
    async with served(api_keys=(key_line("inference", "secret"),)) as s:
        headers = {"authorization": "Bearer secret"}
        assert (await s.http.post(f"{PATH}/x", json={"source": "path:/x"}, headers=headers)).status_code == 403
        assert (await s.http.delete(f"{PATH}/x", headers=headers)).status_code == 403
