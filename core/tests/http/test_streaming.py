"""Streams over a real socket: what clients see as it happens, who leaves, and who is slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sie_core import Residency
from website import Served, Start, until

WORD = "w" * 1000


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    payload = json.dumps({"stream": True, **body}).encode()
    lines = f"POST {path} HTTP/1.1", "host: [::1]", "content-type: application/json", f"content-length: {len(payload)}"
    head = "\r\n".join((*lines, "", ""))
    return head.encode() + payload


@contextlib.asynccontextmanager
async def connection(s: Served) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = int(s.url.rpartition(":")[2])
    # A small window, so that a client that does not read is soon felt.
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
    try:
        yield reader, writer
    finally:
        writer.close()


async def loaded(s: Served, model: str = "chat") -> Any:
    await s.service.load(model)
    return s.engine(model)


def settled(s: Served, engine: Any, model: str = "chat") -> Any:
    return lambda: engine.running == 0 and s.service.model(model).leases == 0


async def test_pieces_arrive_one_by_one_while_the_engine_goes_on(listening: Start) -> None:
    async with listening() as s:
        engine = await loaded(s, "slow")
        body = {"model": "slow", "prompt": "a b c d e f g h i j", "stream": True}
        async with s.http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in answer.headers
            lines = answer.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == "j"
            assert engine.emitted < 10
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"


async def test_words_of_many_bytes_arrive_whole(listening: Start) -> None:
    words = "naïve 🦙🏽 日本語 👩‍👩‍👧".split() * 50
    async with listening() as s:
        body = {"model": "chat", "prompt": " ".join(words), "stream": True}
        async with s.http.stream("POST", "/v1/completions", json=body) as answer:
            pieces = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == " ".join(reversed(words))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/generate/chat"])
@pytest.mark.parametrize("streams", [True, False])
async def test_who_leaves_is_aborted_and_their_place_is_free(listening: Start, path: str, streams: bool) -> None:
    async with listening(queue=1) as s:
        engine = await loaded(s, "slow")
        body = {"prompt": "a " * 1000, "stream": streams}
        path = path.replace("chat", "slow")
        if path == "/v1/completions":
            body["model"] = "slow"
        async with connection(s) as (_, writer):
            writer.write(request(body, path))
            await until(lambda: engine.running)
        await until(settled(s, engine, "slow"))
        assert engine.aborted == 1
        assert engine.emitted < 100
        answer = await s.http.post("/v1/completions", json={"model": "slow", "prompt": "a"})
        assert answer.json()["choices"][0]["text"] == "a"


async def test_who_leaves_the_queue_frees_a_place_in_it(listening: Start) -> None:
    async with listening(queue=1) as s:
        engine = await loaded(s, "slow")
        async with connection(s) as (_, running), connection(s) as (_, waiting):
            running.write(request({"model": "slow", "prompt": "a " * 1000}))
            await until(lambda: engine.running)
            waiting.write(request({"model": "slow", "prompt": "b"}))
            await until(lambda: s.service.model("slow").leases == 2)
            full = await s.http.post("/v1/completions", json={"model": "slow", "prompt": "c"})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "QUEUE_FULL")
            waiting.close()
            await until(lambda: s.service.model("slow").leases == 1)
            last = asyncio.create_task(s.http.post("/v1/completions", json={"model": "slow", "prompt": "d"}))
            await until(lambda: s.service.model("slow").leases == 2)
            running.close()
            assert (await last).json()["choices"][0]["text"] == "d"
        assert engine.aborted == 1


async def test_the_engine_is_read_no_faster_than_the_client_reads(listening: Start) -> None:
    words, choices = 1500, 20  # 30 MB in all: more than all the buffers in between
    async with listening() as s:
        engine = await loaded(s)
        async with connection(s) as (reader, writer):
            writer.write(request({"model": "chat", "prompt": " ".join([WORD] * words), "n": choices}))
            await until(lambda: engine.emitted)
            before = -1
            while engine.emitted != before:  # until everything in between is full
                before = engine.emitted
                await asyncio.sleep(0.2)
            assert before < words * choices / 2
            other = await s.http.post("/v1/completions", json={"model": "chat", "prompt": "a b"})
            assert other.json()["choices"][0]["text"] == "b a"
            assert engine.emitted == before + 2
            while engine.emitted < before + 100:
                assert await reader.read(65536)
        await until(settled(s, engine))
        assert engine.aborted == 1


async def test_a_client_that_neither_reads_nor_leaves_loses_its_place(listening: Start) -> None:
    async with listening(stall_timeout_s=0.3) as s:
        engine = await loaded(s)
        async with connection(s) as (reader, writer):
            writer.write(request({"model": "chat", "prompt": " ".join([WORD] * 1500), "n": 20}))
            await until(lambda: engine.aborted)
            assert s.service.model("chat").leases == 0
            last = b""
            while b"0\r\n\r\n" not in last:  # one that wakes up late learns that this was not all
                last = last[-2000:] + await reader.read(65536)
            assert b"DEADLINE_EXCEEDED" in last
            assert b"[DONE]" not in last


async def test_a_slow_reader_keeps_its_place(listening: Start) -> None:
    async with listening(stall_timeout_s=0.4) as s:
        engine = await loaded(s)
        loop = asyncio.get_running_loop()
        async with connection(s) as (reader, writer):
            writer.write(request({"model": "chat", "prompt": " ".join([WORD] * 1500), "n": 20}))
            began = loop.time()
            while loop.time() - began < 1.5:
                assert await reader.read(65536 * 4)
                await asyncio.sleep(0.02)
            assert engine.running == 1


async def test_an_unload_by_force_ends_a_stream_with_the_reason(listening: Start) -> None:
    async with listening() as s:
        engine = await loaded(s, "slow")
        body = {"model": "slow", "prompt": "a " * 1000, "stream": True}
        async with s.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            asked = asyncio.create_task(s.service.unload("slow", force=True))
            rest = [json.loads(line[6:]) async for line in lines if line]
        assert (await asked).residency is Residency.UNLOADED
        assert rest[-1]["error"]["code"] == "RESOURCE_EXHAUSTED"
        assert "unloaded" in rest[-1]["error"]["message"]
        assert engine.aborted == 1


async def test_a_connection_serves_the_next_request_after_a_stream_that_broke_off(listening: Start) -> None:
    async with listening() as s:
        engine = await loaded(s)
        engine.faults.fail("piece", ValueError("oh"), times=1, after=1)
        async with connection(s) as (reader, writer):
            for ending in (b'"error"', b"[DONE]"):
                writer.write(request({"model": "chat", "prompt": "a b c"}))
                told = await reader.readuntil(b"0\r\n\r\n")
                assert ending in told
