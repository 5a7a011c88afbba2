"""After an engine crashed: ``last_error`` says how, until another one is there, and refuses nobody for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from described import problems, schema
from sie_core import EngineStartError, ModelSpec
from sie_testing import FakeOptions, FaultPoints
from website import Served, Start, key_line, until

LOG = "the end of its log:\n  File /srv/models/kernel.py, line 7"
CRASH = {"code": "INFERENCE_ERROR", "error_class": "EngineDied", "message": "exit code 9"}
FIRST = {**CRASH, "attempts": 1, "permanent": False, "details": LOG}
SECOND = {**FIRST, "attempts": 2}


async def generate(s: Served) -> int:
    return (await s.http.post("/v1/completions", json={"model": "chat", "prompt": "hi", "max_tokens": 2})).status_code


async def shown(s: Served) -> tuple[str, Any]:
    """The residency and the last error, which every listing has to tell alike."""
    card = (await s.http.get("/v1/models/chat")).json()
    cards = (await s.http.get("/v1/models")).json()["models"]
    rows = (await s.http.get("/v1/status")).json()["models"]
    row = next(row for row in rows if row["name"] == "chat")
    listed = next(card for card in cards if card["name"] == "chat")
    assert card["last_error"] == listed["last_error"] == row["last_error"]
    assert problems(card, schema("Model")) == problems(row, schema("ModelStatus")) == []
    return row["residency"], row["last_error"]


async def crash(s: Served) -> None:
    s.engine("chat").die("exit code 9", LOG)
    await until(lambda: s.registry.status("chat").residency in ("unloaded", "failed"))


async def test_the_first_crash_is_shown_until_the_next_engine_is_there(served: Start) -> None:
    async with served() as s:
        assert await generate(s) == 200
        assert await shown(s) == ("resident", None)
        await crash(s)
        assert await shown(s) == ("unloaded", FIRST)
        assert (await s.http.get("/v1/models/chat")).json()["state"] == "available"
        told = (await s.http.get("/v1/admin/models/chat/explain")).json()["explanation"]
        assert "Its engine died: exit code 9. It will be tried again." in told
        latch = FaultPoints.of("chat").hold("load", times=1)
        asking = asyncio.create_task(generate(s))
        await latch.arrival()
        assert await shown(s) == ("loading", FIRST)
        latch.release()
        assert await asking == 200
        assert await shown(s) == ("resident", None)


@pytest.mark.parametrize(("key", "details"), [("reader", None), ("boss", LOG)])
async def test_its_details_are_for_those_who_run_the_server(served: Start, key: str, details: str | None) -> None:
    async with served(api_keys=(key_line("inference", "reader"), key_line("admin", "boss"))) as s:
        s.http.headers["authorization"] = f"Bearer {key}"
        assert await generate(s) == 200
        await crash(s)
        _, error = await shown(s)
        said = "exit code 9" if details else "its engine died"
        assert {**error, "details": error.get("details")} == {**FIRST, "message": said, "details": details}


async def test_the_second_in_a_row_is_counted_and_shown_while_the_next_one_loads(served: Start) -> None:
    async with served() as s:
        for _ in range(2):
            assert await generate(s) == 200
            await crash(s)
        assert await shown(s) == ("failed", SECOND)
        assert await generate(s) == 503
        told = (await s.http.get("/v1/admin/models/chat/explain")).json()["explanation"]
        assert "Its engine died, 2 times in a row: exit code 9. It will be tried again." in told
        latch = FaultPoints.of("chat").hold("load", times=1)
        loading = asyncio.create_task(s.http.post("/v1/admin/models/chat/load"))
        await latch.arrival()
        assert await shown(s) == ("loading", SECOND)
        latch.release()
        assert (await loading).json()["last_error"] is None
        assert await shown(s) == ("resident", None)


async def test_a_load_that_fails_after_it_is_shown_instead(served: Start) -> None:
    async with served() as s:
        assert await generate(s) == 200
        await crash(s)
        FaultPoints.of("chat").fail("load", EngineStartError("no engine came"), times=1)
        assert await generate(s) == 502
        residency, error = await shown(s)
        assert (residency, error["error_class"], error["attempts"]) == ("failed", "EngineStartError", 1)
        await s.http.post("/v1/admin/models/chat/unload")
        assert await shown(s) == ("unloaded", FIRST), "no engine came after the one that died"


async def test_one_that_dies_while_it_is_loaded_is_no_engine_that_is_there(served: Start) -> None:
    async with served() as s:
        latch = FaultPoints.of("chat").hold("memory", times=1)
        loading = asyncio.create_task(s.http.post("/v1/admin/models/chat/load"))
        await latch.arrival()
        seat = s.registry._roster.records["chat"].seat
        assert seat is not None
        engine: Any = seat.engine
        engine.die("exit code 9", LOG)
        await until(lambda: seat.dead)
        FaultPoints.of("chat").fail("load", EngineStartError("no engine came"), times=1)
        latch.release()
        await loading
        await s.http.post("/v1/admin/models/chat/unload")
        assert await shown(s) == ("unloaded", FIRST)


async def test_a_parked_engine_that_dies_is_shown_and_counts_for_nothing(served: Start) -> None:
    async with served(tier={"host_cache_bytes": 1 << 26}) as s:
        for _ in range(3):
            assert await generate(s) == 200
            engine = s.engine("chat")
            assert (await s.http.post("/v1/admin/models/chat/park")).json()["residency"] == "parked"
            engine.die("exit code 9", LOG)
            await until(lambda: s.registry.status("chat").residency == "unloaded")
            assert await shown(s) == ("unloaded", FIRST)


async def test_another_configuration_knows_nothing_of_it(served: Start) -> None:
    async with served() as s:
        assert await generate(s) == 200
        await crash(s)
        s.registry.apply([ModelSpec("chat", "fake-stream", options=FakeOptions(), idle_evict_s=60.0)])
        assert await shown(s) == ("unloaded", FIRST), "its engine would be the same"
        s.registry.apply([ModelSpec("chat", "fake-stream", options=FakeOptions(salt="new"))])
        assert await shown(s) == ("unloaded", None)
