"""Connections, over sockets and with both parsers: large and slow heads, too many of them, and quiet ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sie_core.http.door import ConnectionLimits
from sie_testing import FaultPoints
from website import Served, Start, key_line, until

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
PARSERS = ["httptools", "h11"]


@pytest.fixture(params=PARSERS)
def parsing(request: pytest.FixtureRequest, listening: Start) -> Callable[..., Any]:
    """``listening`` with each parser that may be chosen, and limits by name."""

    def start(limits: dict[str, Any] | None = None, **settings: Any) -> Any:
        return listening(limits=ConnectionLimits(**(limits or {})), protocol=request.param, **settings)

    return start


@contextlib.asynccontextmanager
async def connection(s: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def talk(s: Served, *raw: bytes) -> bytes:
    """Send, and read up to the end of the connection."""
    async with asyncio.timeout(10), connection(s) as (reader, writer):
        for part in raw:
            writer.write(part)
            await writer.drain()
        return await reader.read()


def embed_request(text: str = "hello", *lines: str) -> bytes:
    body = json.dumps({"model": "mini", "input": text}).encode()
    head = ["POST /v1/embeddings HTTP/1.1", "host: localhost", "content-type: application/json", *lines]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


# --- heads ----------------------------------------------------------------------------------------


LARGE = {
    "many fields": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 150 + b"\r\n",
    "many fields without an end": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + b"a:\r\n" * 40_000,
    "a large field": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
    "a large field without an end": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\na: " + b"x" * 300_000,
    "a large name": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n" + b"x" * 300_000,
    "a large address": b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "an address without an end": b"GET /" + b"x" * 300_000,
}


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_head_is_a_431(parsing: Any, name: str) -> None:
    """F3: request line and headers had no limit: 60 MB of ``a:`` lines took 1.4 GB."""
    async with parsing() as s:
        answer = await talk(s, LARGE[name])
        after = await s.embed()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in answer.lower()
    assert error_of(answer)["code"] == "HEADERS_TOO_LARGE"
    assert after.status_code == 200


async def test_a_large_head_in_small_pieces_is_refused_before_its_end(parsing: Any) -> None:
    """F3: the answer comes while the client still sends."""
    async with parsing() as s, connection(s) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"a: " + b"x" * 4000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
                sent += 4000
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_heads_within_the_limits_pass_also_behind_large_bodies(parsing: Any) -> None:
    """F3: what counts is the head alone, however pieces and requests lie in what is read at a time."""
    fields = [f"x-{number}: {'v' * 600}" for number in range(90)]
    async with parsing() as s:
        many = embed_request("hello", *fields)
        large = embed_request("y" * 600_000, "connection: keep-alive")
        answer = await talk(s, large + many + embed_request("bye", "connection: close"))
    assert answer.count(b"HTTP/1.1 200 ") == 3


@pytest.mark.parametrize(
    "rest",
    [b"0\r\n" + b"a: b\r\n" * 60_000, b"0\r\na: " + b"x" * 300_000, b"5;x=" + b"x" * 300_000],
    ids=["many trailers", "a large trailer", "a large extension"],
)
async def test_what_stands_around_a_body_in_chunks_is_bounded(parsing: Any, rest: bytes) -> None:
    """F3: trailers and extensions of chunks are read into memory like headers."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with parsing() as s:
        answer = await talk(s, head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + rest)
        after = await s.embed()
    assert answer[:13] in (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")
    assert after.status_code == 200


async def test_headers_have_a_deadline(parsing: Any) -> None:
    """F3: half-sent headers stayed for minutes."""
    async with parsing({"head_s": 0.2}) as s:
        half = await talk(s, b"GET /healthz HTTP/1.1\r\nhost: local")
        second = await talk(s, GET, b"GET /healthz HTTP/1.1\r\n")
        nothing = await talk(s)
        after = await s.embed()
    assert half.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in half.lower()
    assert error_of(half)["code"] == "REQUEST_TIMEOUT"
    assert second.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in second
    assert nothing == b""
    assert after.status_code == 200


async def test_the_deadline_is_for_headers_only(parsing: Any) -> None:
    """F3: a request that takes its time, and a connection between requests, are left alone."""
    async with parsing({"head_s": 0.1}) as s, connection(s) as (reader, writer):
        latch = FaultPoints.of("mini").hold("run", times=1)
        writer.write(embed_request())
        await latch.arrival()
        await asyncio.sleep(0.3)
        latch.release()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(0.3)
        writer.write(embed_request("more", "connection: close"))
        assert b"HTTP/1.1 200 " in await reader.read()


# --- how many -------------------------------------------------------------------------------------


async def test_half_sent_heads_lock_nobody_out(parsing: Any) -> None:
    """F3: a hundred half-sent requests held every place. Those that wait longest go first."""
    async with parsing({"most": 12, "kept": 4}) as s, contextlib.AsyncExitStack() as stack:
        for _ in range(100):
            _, writer = await stack.enter_async_context(connection(s))
            writer.write(b"GET /healthz HTTP/1.1\r\n")
        assert (await talk(s, GET[:-2] + b"connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await s.embed()).status_code == 200


async def test_idle_connections_lock_nobody_out(parsing: Any) -> None:
    """F3: nor do those that had their answer and keep their connection."""
    async with parsing({"most": 12, "kept": 4}) as s, contextlib.AsyncExitStack() as stack:
        for _ in range(30):
            reader, writer = await stack.enter_async_context(connection(s))
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert (await s.embed()).status_code == 200


async def test_an_idle_connection_goes_where_a_half_sent_one_has_to_stay(
    parsing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: a sibling: a head that is half sent behind a request that runs kept newcomers out, whoever was idle."""
    monkeypatch.setattr("sie_core.http.connections.is_local", lambda _: False)
    async with parsing({"most": 12, "kept": 4}) as s, contextlib.AsyncExitStack() as stack:
        await s.service.load("mini")
        latch = FaultPoints.of("mini").hold("run")
        _, writer = await stack.enter_async_context(connection(s))
        writer.write(embed_request())
        await until(lambda: s.registry.status("mini").leases == 1)
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(7):
            reader, writer = await stack.enter_async_context(connection(s))
            writer.write(GET)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        found = await talk(s, b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        latch.release()
    assert found.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("peer", ["127.0.0.1", "192.0.2.7"])
async def test_places_are_kept_for_loopback_and_health_checks(
    parsing: Any, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: where every place is taken by a request that runs."""
    monkeypatch.setattr("sie_core.http.connections.is_local", lambda _: peer == "127.0.0.1")
    async with parsing({"most": 12, "kept": 4}) as s, contextlib.AsyncExitStack() as stack:
        await s.service.load("mini")
        latch = FaultPoints.of("mini").hold("run")
        for _ in range(8):
            _, writer = await stack.enter_async_context(connection(s))
            writer.write(embed_request())
        await until(lambda: s.registry.status("mini").leases == 8)
        healthy = await talk(s, GET[:-2] + b"connection: close\r\n\r\n")
        alike = await talk(s, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        status = await talk(s, b"GET /v1/status HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        for _ in range(4):
            reader, writer = await stack.enter_async_context(connection(s))
            writer.write(GET[:-2] + b"content-length: 5\r\n\r\n")
            await reader.readline()
        latch.release()
    assert healthy.startswith(b"HTTP/1.1 200 ")
    assert alike.startswith(b"HTTP/1.1 200 ")
    assert status.startswith(b"HTTP/1.1 200 " if peer == "127.0.0.1" else b"HTTP/1.1 503 ")
    if peer != "127.0.0.1":
        assert error_of(status)["code"] == "QUEUE_FULL"
        assert b"retry-after" in status.lower()


# --- refused bodies -------------------------------------------------------------------------------


LATE = [
    ("POST", "/v1/embeddings", {}, 401, {"api_keys": (key_line("inference", "in"),)}),
    ("POST", "/nowhere", {}, 404, {}),
    ("POST", "/healthz", {}, 405, {}),
    ("POST", "/v1/embeddings", {}, 413, {"max_body_bytes": 1 << 20}),
    ("POST", "/v1/embeddings", {"content-type": "text/plain"}, 415, {}),
    ("POST", "/v1/embeddings", {"origin": "http://evil.example"}, 403, {}),
]


@pytest.mark.parametrize(("method", "path", "headers", "status", "settings"), LATE, ids=[str(one[3]) for one in LATE])
async def test_who_sends_a_large_body_reads_why_it_is_refused(
    parsing: Any, method: str, path: str, headers: dict[str, str], status: int, settings: dict[str, Any]
) -> None:
    """C2: the server closed at once, and whoever was still sending saw a reset instead of the answer."""

    def ask(url: str) -> tuple[int, bytes]:
        headers_ = {"content-type": "application/json", **headers}
        request = urllib.request.Request(url + path, b"x" * 16_000_000, headers_, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    async with parsing(**settings) as s:
        for _ in range(3):
            got, body = await asyncio.to_thread(ask, s.url)
            assert got == status
            assert json.loads(body)


async def test_a_refused_body_is_read_for_a_while_only(parsing: Any) -> None:
    """C2: so many bytes, and so long: then the connection is cut."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 1000000000\r\n\r\n"
    for limits in ({"linger_bytes": 1_000_000}, {"linger_s": 0.1}):
        async with parsing(limits) as s, connection(s) as (reader, writer), asyncio.timeout(10):
            writer.write(head)
            answer = await reader.read()
            with pytest.raises(ConnectionError):
                for _ in range(100_000):
                    writer.write(b"x" * 65536)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        assert answer.startswith(b"HTTP/1.1 404 ")


async def test_a_client_that_keeps_quiet_is_not_waited_for(parsing: Any) -> None:
    """C2: it has its answer, and holds a place for nothing."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 1000\r\n\r\n"
    async with parsing({"linger_idle_s": 0.1}) as s, connection(s) as (reader, writer):
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(10):
                while True:
                    await asyncio.sleep(0.2)
                    writer.write(b"x")
                    await writer.drain()


async def test_a_small_body_that_comes_late_keeps_the_connection(parsing: Any) -> None:
    """C2: clients that send head and body one after the other go on as before."""
    async with parsing() as s, connection(s) as (reader, writer):
        for _ in range(3):
            writer.write(b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
            await reader.readuntil(b"}}")
            writer.write(b"x" * 1000)


async def test_a_body_that_nobody_reads_does_not_go_on_for_ever(parsing: Any) -> None:
    """C2: of a body behind an answer that leaves the connection open not more than a little is read."""
    head = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n"
    async with parsing({"linger_bytes": 1_000_000}) as s, connection(s) as (reader, writer), asyncio.timeout(10):
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                writer.write(b"x" * 65536)
                await writer.drain()
                await asyncio.sleep(0)


# --- clients that close one side ------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mini", "chat", "slow"])
async def test_a_client_that_is_done_with_sending_is_answered(parsing: Any, model: str) -> None:
    """G5: a client closed its sending side and then read: nothing came."""
    path, body = "/v1/embeddings", {"model": model, "input": "hello"}
    if model != "mini":
        path, body = "/v1/completions", {"model": model, "prompt": "a b c", "stream": model == "slow"}
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    async with parsing() as s, connection(s) as (reader, writer), asyncio.timeout(10):
        writer.write(head.encode() + b"\r\n\r\n" + raw)
        writer.write_eof()
        answer = await reader.read()
    assert b"HTTP/1.1 200 " in answer
    assert answer.endswith((b"}", b"data: [DONE]\n\n", b"0\r\n\r\n"))


async def test_two_requests_and_then_no_more_are_both_answered(parsing: Any) -> None:
    """G5: the same with requests that wait behind each other."""
    async with parsing() as s, connection(s) as (reader, writer), asyncio.timeout(10):
        writer.write(embed_request("one") + embed_request("two"))
        writer.write_eof()
        answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200 ") == 2


async def test_a_client_that_is_gone_is_told_from_one_that_is_done(parsing: Any) -> None:
    """G5: both close their sending side; only one of them still reads."""
    async with parsing() as s:
        await s.service.load("mini")
        latch = FaultPoints.of("mini").hold("run", times=1)
        running = asyncio.create_task(s.embed())
        await latch.arrival()
        async with connection(s) as (reader, stays):
            stays.write(embed_request())
            async with connection(s) as (_, leaver):
                leaver.write(embed_request())
                stays.write_eof()
                await until(lambda: s.registry.status("mini").leases == 3)
            await until(lambda: s.registry.status("mini").leases == 2)
            latch.release()
            assert b"HTTP/1.1 200 " in await reader.read()
        assert (await running).status_code == 200


async def test_requests_behind_each_other_of_a_client_that_left_say_nothing(
    parsing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """F15: each logged an exception."""
    async with parsing() as s:
        await s.service.load("mini")
        latch = FaultPoints.of("mini").hold("run", times=1)
        async with connection(s) as (_, writer):
            writer.write(embed_request() * 5)
            await latch.arrival()
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        latch.release()
        await until(lambda: s.registry.status("mini").leases == 0)
        assert (await s.embed()).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


# --- what uvicorn leaves open ---------------------------------------------------------------------


UPGRADE = b"host: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
KEY = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HANDSHAKES = {
    "a POST": b"POST /v1/embeddings HTTP/1.1\r\n" + UPGRADE + b"content-length: 2\r\n\r\n{}",
    "a body": b"GET /ws/status HTTP/1.1\r\n" + UPGRADE + KEY + b"content-length: 2\r\n\r\n{}",
    "a body in chunks": b"GET /ws/status HTTP/1.1\r\n" + UPGRADE + KEY + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a long line": b"GET /ws/status HTTP/1.1\r\n" + UPGRADE + KEY + b"x: " + b"x" * 20_000 + b"\r\n\r\n",
    "no key": b"GET /ws/status HTTP/1.1\r\n" + UPGRADE + b"\r\n",
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_a_handshake_that_cannot_be_read_is_answered(parsing: Any, name: str) -> None:
    """F3: it had no answer, and held its place for good, without a key."""
    async with parsing() as s:
        answer = await talk(s, HANDSHAKES[name])
        after = await s.embed()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert b"WebSocket" in answer
    assert after.status_code == 200


async def test_trailers_are_no_headers(parsing: Any) -> None:
    """F1: a trailer took the place of the header of its name: host, key, origin."""
    body = b'{"model": "mini", "input": "hello"}'
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with parsing(api_keys=(key_line("inference", "in"),)) as s:
        keyed = await talk(s, head + chunks + b"authorization: Bearer in\r\n\r\n")
    async with parsing() as s:
        foreign = await talk(s, head + chunks + b"host: evil.example\r\norigin: http://evil.example\r\n\r\n")
    assert keyed.startswith(b"HTTP/1.1 401 ")
    assert foreign.startswith(b"HTTP/1.1 200 ")


async def test_what_outlasts_the_end_is_told_so(
    parsing: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C6: who unloaded a model then, or did not take an answer, left a traceback; the first got a bare 500."""
    monkeypatch.setattr("sie_core.cli.running._LAST_ANSWERS_S", 0.1)
    large = json.dumps({"model": "wide", "input": ["a"] * 2000}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with parsing() as s, asyncio.timeout(20):
            await s.service.load("mini")
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, ("127.0.0.1", int(s.url.rpartition(":")[2])))
            await loop.sock_sendall(lazy, head + b"content-length: %d\r\n\r\n" % len(large) + large)
            await loop.sock_recv(lazy, 100)
            latch = FaultPoints.of("mini").hold("close", times=1)
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
            writer.write(b"POST /v1/admin/models/mini/unload HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await latch.arrival()
            s.service.begin_shutdown()
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"SHUTTING_DOWN" in answer
    assert [record for record in caplog.records if record.exc_info or "ASGI" in record.getMessage()] == []
