"""A model that is busy when the configuration drops it: it is shown as leaving until it is gone, and harms nobody."""

from __future__ import annotations

import asyncio
from typing import Any

from sie_core.config import TelemetryConfig
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints
from website import Served, Start, next_status, until, watch


def rows(status: dict[str, Any]) -> dict[str, bool]:
    return {row["name"]: row["leaving"] for row in status["models"]}


def drop(s: Served, name: str) -> None:
    s.registry.apply([status.spec for status in s.registry.statuses() if status.name != name])


async def test_a_busy_model_that_is_removed_is_shown_as_leaving(served: Start) -> None:
    """F5: status, models, document and metrics were 404 for everybody until it had drained."""
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(telemetry=telemetry) as s:
        latch = FaultPoints.of("mini").hold("run")
        asked = asyncio.create_task(s.embed())
        await until(lambda: s.registry.status("mini").leases)
        drop(s, "mini")
        status = await s.http.get("/v1/status")
        assert status.status_code == 200
        assert rows(status.json())["mini"] is True
        assert sum(rows(status.json()).values()) == 1
        models = await s.http.get("/v1/models")
        assert models.status_code == 200
        assert "mini" not in {one["id"] for one in models.json()["data"]} | {
            one["name"] for one in models.json()["models"]
        }
        assert (await s.http.get("/openapi.json")).status_code == 200
        metrics = (await s.http.get("/metrics")).text
        assert 'sie_worker_model_residency{model="mini",residency="draining"} 1' in metrics
        assert "sie_worker_account_available_bytes{" in metrics
        assert (await s.embed()).status_code == 404
        assert (await s.http.post("/v1/admin/models/mini/load")).status_code == 404
        assert "mini" not in s.registry
        assert "mini" not in s.registry.names()
        latch.release()
        assert (await asked).status_code == 200
        await until(lambda: "mini" not in {one.name for one in s.registry.statuses()})
        assert "mini" not in rows((await s.http.get("/v1/status")).json())
    telemetry.shutdown()


async def test_watchers_see_it_leave(listening: Start) -> None:
    """F5: they heard nothing any more, for good."""
    async with listening() as s, watch(s) as socket:
        latch = FaultPoints.of("mini").hold("run")
        asked = asyncio.create_task(s.embed())
        await until(lambda: s.registry.status("mini").leases)
        drop(s, "mini")
        while not rows(await next_status(socket)).get("mini"):
            pass
        latch.release()
        assert (await asked).status_code == 200
        while "mini" in rows(await next_status(socket)):
            pass


async def test_a_look_that_fails_does_not_silence_the_feed(listening: Start) -> None:
    """F5: whatever the next fault of the kind will be."""
    async with listening() as s, watch(s) as socket:
        await next_status(socket)
        statuses, failed = s.registry.statuses, asyncio.Event()

        def fail() -> Any:
            failed.set()
            raise RuntimeError("no status today")

        s.registry.statuses = fail  # type: ignore[method-assign]
        assert (await s.embed()).status_code == 200
        await failed.wait()
        s.registry.statuses = statuses  # type: ignore[method-assign]
        while (
            next(row["residency"] for row in (await next_status(socket))["models"] if row["name"] == "mini")
            != "resident"
        ):
            pass
