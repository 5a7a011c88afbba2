"""Connections to an engine: kept while they are good, read as they come, and closed when they are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sie_adapters_sglang._http import Broken, Pool
from sie_adapters_sglang._relay import pieces

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b"".join(
    b"%x\r\n%b\r\n" % (len(event), event)
    for event in (b'data: {"n":1}\n\n', b'data: {"n":2}\n\ndata: {"t":"\xc3\xa9"}\n\n', b"data: [DONE]\n\n")
)
WANTED = [b'{"n":1}', b'{"n":2}', b'{"t":"\xc3\xa9"}']


@asynccontextmanager
async def engine(*writes: bytes, pause_s: float = 0.0) -> AsyncIterator[tuple[Pool, list[int]]]:
    """Answers every request with ``writes``. The list has the number of requests of each connection."""
    requests: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(0)
        mine = len(requests) - 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
                await reader.readexactly(length)
                requests[mine] += 1
                for data in writes:
                    writer.write(data)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
                if not data:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    pool = Pool("127.0.0.1", server.sockets[0].getsockname()[1], keep_s=5.0, connect_s=5.0)
    try:
        yield pool, requests
    finally:
        await pool.aclose()
        server.close()


async def streamed(pool: Pool) -> list[bytes]:
    answer = await pool.post("/x", {}, "key")
    found = [piece async for run in pieces(answer.read) for piece in run]
    answer.close(read=True)
    return found


async def test_pieces_are_whole_wherever_the_bytes_are_cut() -> None:
    everything = HEAD + STREAM + b"0\r\n\r\n"
    async with engine(*(everything[n : n + 1] for n in range(len(everything)))) as (pool, _):
        assert await streamed(pool) == WANTED


async def test_what_came_together_is_handed_on_together() -> None:
    async with engine(HEAD + STREAM + b"0\r\n\r\n") as (pool, _):
        answer = await pool.post("/x", {}, "key")
        assert [run async for run in pieces(answer.read)] == [WANTED]


async def test_a_connection_serves_one_request_after_the_other_also_when_the_last_bytes_come_late() -> None:
    async with engine(HEAD + STREAM, b"0\r\n\r\n", pause_s=0.02) as (pool, requests):
        for _ in range(3):
            assert await streamed(pool) == WANTED
            await asyncio.sleep(0.1)
        assert requests == [3]


async def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async with engine(HEAD + STREAM, b"0\r\n\r\n", pause_s=0.02) as (pool, requests):
        assert await asyncio.gather(*(streamed(pool) for _ in range(3))) == [WANTED] * 3
        assert requests == [1, 1, 1]


async def test_an_answer_that_was_left_costs_its_connection() -> None:
    async with engine(HEAD + STREAM + b"0\r\n\r\n") as (pool, requests):
        answer = await pool.post("/x", {}, "key")
        answer.close(read=False)
        assert await streamed(pool) == WANTED
        assert requests == [1, 1]


async def test_a_connection_that_the_engine_closed_is_not_used_again() -> None:
    async with engine(HEAD + STREAM + b"0\r\n\r\n", b"") as (pool, requests):
        for _ in range(2):
            assert await streamed(pool) == WANTED
            await asyncio.sleep(0.05)
        assert requests == [1, 1]


@pytest.mark.parametrize("said", [HEAD + STREAM[:20], HEAD[:10], b""], ids=["half", "half a head", "nothing"])
async def test_an_answer_that_ends_too_early_is_broken(said: bytes) -> None:
    async with engine(said, b"") as (pool, _):
        with pytest.raises(Broken):
            await streamed(pool)


async def test_a_line_of_many_megabytes_takes_time_by_its_length() -> None:
    async def seconds(megabytes: int) -> float:
        line = b'data: {"t":"%b"}\n\ndata: [DONE]\n\n' % (b"x" * (megabytes << 20))
        parts = iter([line[at : at + 65536] for at in range(0, len(line), 65536)])

        async def read() -> bytes:
            return next(parts, b"")

        began = time.process_time()
        assert [len(piece) for run in [run async for run in pieces(read)] for piece in run] == [len(line) - 22]
        return time.process_time() - began

    assert await seconds(32) < 1.0


ALONE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
STRAY = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\nsomebody else's"


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_an_answer_that_nobody_asked_for_is_nobodys(pause_s: float) -> None:
    async with engine(ALONE, STRAY, pause_s=pause_s) as (pool, requests):
        for _ in range(2):
            answer = await pool.post("/x", {}, "key")
            assert (await answer.read())[:2] == b"{}"
            answer.close(read=True)
            await asyncio.sleep(0.2)
        assert requests == [1, 1]


async def test_what_is_no_http_is_broken() -> None:
    async with engine(b"SSH-2.0-OpenSSH\r\n\r\n") as (pool, _):
        with pytest.raises(Broken, match="HTTP"):
            await streamed(pool)


async def test_nobody_there_and_a_closed_pool_are_broken() -> None:
    async with engine(HEAD) as (pool, _):
        answer = await pool.post("/x", {}, "key")
        reading = asyncio.create_task(answer.read())
        await asyncio.sleep(0.01)
        await pool.aclose()
        with pytest.raises(Broken):
            await reading
        with pytest.raises(Broken):
            await pool.post("/x", {}, "key")
    with pytest.raises(Broken):
        await Pool("127.0.0.1", 1, keep_s=5.0, connect_s=5.0).post("/x", {}, "key")
