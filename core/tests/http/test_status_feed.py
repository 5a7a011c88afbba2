"""``/ws/status``: a snapshot on connect, then one on change, 4 a second at most; watchers never get in the way."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

import pytest
from sie_testing import FaultPoints
from website import Start, key_line, next_status, until, watch
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus


def residency(status: dict[str, Any], model: str = "mini") -> str:
    return str(next(entry["residency"] for entry in status["models"] if entry["name"] == model))


async def test_a_whole_snapshot_on_connect_and_then_on_change(listening: Start) -> None:
    async with listening() as s, watch(s) as socket:
        first = await next_status(socket)
        plain = (await s.http.get("/v1/status")).json()
        keys = {"accounts", "host_cache", "models", "slow_hooks", "uptime_s", "version"}
        assert first.keys() == plain.keys() == keys
        assert residency(first) == "unloaded"
        latch = FaultPoints.of("mini").hold("load")
        asked = asyncio.create_task(s.embed())
        while residency(await next_status(socket)) != "loading":
            pass
        latch.release()
        while residency(await next_status(socket)) != "resident":
            pass
        assert (await asked).status_code == 200


async def test_nothing_is_sent_while_nothing_changes(listening: Start) -> None:
    async with listening() as s, watch(s) as socket:
        await next_status(socket)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await socket.recv()


async def test_four_a_second_at_most(listening: Start) -> None:
    async with listening() as s, watch(s) as socket:
        await next_status(socket)
        arrivals: list[float] = []

        async def collect() -> None:
            async for _ in socket:
                arrivals.append(time.monotonic())

        collector = asyncio.create_task(collect())
        for _ in range(8):
            for action in ("load", "unload"):
                assert (await s.http.post(f"/v1/admin/models/mini/{action}")).status_code == 200
            await asyncio.sleep(0.1)
        collector.cancel()
    assert len(arrivals) >= 2
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert min(gaps) > 0.2


async def test_one_who_comes_later_gets_a_snapshot_at_once(listening: Start) -> None:
    async with listening() as s, watch(s) as one:
        await next_status(one)
        assert (await s.embed()).status_code == 200
        async with watch(s) as two:
            assert residency(await next_status(two)) == "resident"


async def test_watchers_that_vanish_or_do_not_read_harm_nobody(listening: Start) -> None:
    async with listening() as s:
        sleepers = [await watch(s) for _ in range(10)]
        for sleeper in sleepers[:5]:
            sleeper.transport.abort()
        for _ in range(5):
            assert (await s.embed()).status_code == 200
            await s.http.post("/v1/admin/models/mini/unload")
        async with watch(s) as socket:
            assert residency(await next_status(socket)) in ("unloaded", "unloading")
        for sleeper in sleepers[5:]:
            sleeper.transport.abort()
        feed = next(route.app for route in s.app.starlette.routes if getattr(route, "path", "") == "/ws/status")
        await until(lambda: feed._watchers == 0 and feed._refresher is None)


async def test_what_a_watcher_says_is_ignored(listening: Start) -> None:
    async with listening() as s, watch(s) as socket:
        await next_status(socket)
        await socket.send("hello")
        await socket.send(b"\x00" * 1000)
        await s.http.post("/v1/admin/models/mini/load")
        assert await next_status(socket)


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("in", None), ("root", None)])
async def test_keys_count_here_too(
    listening: Start, key: str | None, status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = (key_line("inference", "in"), key_line("admin", "root"))
    async with listening(api_keys=keys) as s:
        if status is None:
            async with watch(s, key) as socket:
                assert (await next_status(socket))["models"]
            return
        with pytest.raises(InvalidStatus) as caught:
            async with watch(s, key):
                pass
    assert caught.value.response.status_code == status
    assert b"UNAUTHORIZED" in caught.value.response.body
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_refused_client_that_leaves_at_once_holds_nothing(listening: Start) -> None:
    async with listening(api_keys=(key_line("inference", "in"),)) as s:
        host, port = s.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /ws/status HTTP/1.1\r\nhost: [::1]\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        writer.transport.abort()
        before = time.monotonic()
        assert (await s.http.get("/healthz")).status_code == 200
    assert time.monotonic() - before < 5.0


async def test_an_unknown_socket_is_refused(listening: Start) -> None:
    async with listening() as s:
        with pytest.raises(InvalidStatus) as caught:
            async with connect(s.url.replace("http://", "ws://") + "/ws/nothing"):
                pass
    assert caught.value.response.status_code in (403, 404)
