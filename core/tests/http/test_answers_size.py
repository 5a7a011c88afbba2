"""Large answers: refused before they are computed, in the host's book while they are there, given up when unread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest
from sie_testing import FaultPoints
from website import Served, Start, until

HOST = "host"
TEXT = "word " * 400


def booked(s: Served) -> int:
    return next(one.promised for one in s.registry.accounts() if one.account == HOST)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("encode/any", {"items": [{"text": TEXT}] * 50, "params": {"output_types": ["multivector"]}}),
        ("encode/wide", {"items": [{"text": "a"}] * 50}),
        ("embeddings", {"model": "wide", "input": ["a"] * 50}),
        ("embed", {"model": "wide", "texts": ["a"] * 50}),
    ],
)
async def test_an_answer_over_the_limit_is_refused_before_it_is_computed(
    served: Start, path: str, body: dict[str, Any]
) -> None:
    """F9: by the tokens and dimensions that are known; a smaller one is answered."""
    model = body.get("model") or path.partition("/")[2]
    async with served(max_answer_bytes=100_000) as s:
        name = next(name for name in ("items", "input", "texts") if name in body)
        few = await s.http.post(f"/v1/{path}", json={**body, name: body[name][:1]})
        runs = FaultPoints.of(model).hits("run")
        many = await s.http.post(f"/v1/{path}", json=body)
        assert FaultPoints.of(model).hits("run") <= runs + 1
        assert booked(s) == 0
    error = many.json().get("detail", many.json().get("error"))
    error = error if isinstance(error, dict) else many.json()["error"]
    assert (few.status_code, many.status_code, error["code"]) == (200, 413, "BODY_TOO_LARGE")
    assert error["limit"] == 100_000
    assert "max_answer_bytes" in error["message"]


async def test_words_are_enough_to_refuse_what_is_far_too_much(served: Start) -> None:
    """F9: each has a token or more, so that nothing is prepared for it; where they don't tell, the tokens do."""
    async with served(max_answer_bytes=100_000) as s:
        await s.service.load("any")
        prepared = FaultPoints.of("any").hits("prepare")
        params = {"output_types": ["multivector"]}
        many = await s.encode("any", items=[{"text": TEXT}] * 50, params=params)
        assert many.status_code == 413
        assert FaultPoints.of("any").hits("prepare") == prepared
        spaces = await s.encode("any", items=[{"text": " " * 2000 + "a"}] * 50, params=params)
        assert spaces.status_code == 200


async def test_findings_count_as_well(served: Start) -> None:
    """F9: of sparse weights and of what is extracted the number shows when it is there."""
    labels = [f"w{number}" for number in range(50)]
    body = {"items": [{"text": " ".join(labels)}] * 20, "params": {"labels": labels}}
    async with served(max_answer_bytes=20_000) as s:
        answer = await s.http.post("/v1/extract/finder", json=body)
    assert answer.status_code == 413, answer.text


async def test_an_answer_is_booked_until_it_was_sent(served: Start) -> None:
    """F9: on the host, for as long as it is made; then the host has those bytes again."""
    async with served() as s:
        await s.service.load("wide")
        latch = FaultPoints.of("wide").hold("run", times=1)
        asking = asyncio.create_task(s.embed(model="wide", input=["a"] * 1000))
        await latch.arrival()
        assert booked(s) > 1000 * 384 * 12
        latch.release()
        assert (await asking).status_code == 200
        assert booked(s) == 0


async def test_no_answer_is_begun_that_the_host_has_no_room_for(served: Start) -> None:
    """F9: a 503 that says so; what else is asked for goes on."""
    async with served() as s:
        await s.service.load("wide")
        s.registry._roster.ledger.observe_available(HOST, 1 << 20)
        answer = await s.embed(model="wide", input=["a"] * 1000)
        assert (await s.embed()).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "RESOURCE_EXHAUSTED")
    assert "retry-after" in answer.headers


async def test_an_answer_that_nobody_reads_is_given_up(listening: Start, caplog: pytest.LogCaptureFixture) -> None:
    """F9: and its connection closed; so far it was kept whole for as long as the client liked."""
    body = json.dumps({"model": "wide", "input": ["a"] * 2000}).encode()
    async with listening(stall_timeout_s=0.2) as s:
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.setblocking(False)
            host, _, port = s.url.removeprefix("http://").partition(":")
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, (host, int(port)))
            lines = ("POST /v1/embeddings HTTP/1.1", "Host: localhost", "Content-Type: application/json")
            head = "\r\n".join((*lines, f"Content-Length: {len(body)}", "", ""))
            await loop.sock_sendall(lazy, head.encode() + body)
            await until(lambda: booked(s) > 0)
            await until(lambda: booked(s) == 0)
            arrived = 0
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(10):
                    while part := await loop.sock_recv(lazy, 65536):
                        arrived += len(part)
    assert arrived < 2000 * 384 * 8
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_large_answers_arrive_whole(listening: Start) -> None:
    """F9: in pieces, over a connection that goes on."""
    async with listening() as s:
        for _ in range(2):
            answer = await s.embed(model="wide", input=["a"] * 500)
            assert len(answer.json()["data"]) == 500
            assert int(answer.headers["content-length"]) == len(answer.content) > 500_000
