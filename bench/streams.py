"""The load of the generation measures: streams whose pieces are counted and not parsed. A process of its own.

Nothing stands between it and the connections but a parser in C, so that it takes little of the machine while others are
measured; how much it took is part of what it tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import httptools
from attrs import asdict, frozen

__all__ = ["Seen", "Wanted", "drive"]

_PIECE = b"data: {"
_DONE = b"data: [DONE]\n\n"
_STALL_S = 60.0


@frozen
class Wanted:
    """``pieces``: tokens of each answer; ``spread_s``: over which the first requests are spread out.

    ``pause_s``: at most so long, and by chance, a client waits before it asks again. Answers end with the engine's
    steps: without a pause all questions would come with them, just when every other stream has a piece to pass on.
    """

    port: int
    streams: int
    seconds: float
    pieces: int
    spread_s: float = 0.0
    pause_s: float = 0.0


@frozen
class Seen:
    """``rate``: pieces a second, of all streams together. ``first_ms``: from each request to its first piece.

    ``pieces``: all of them, also those that came after the time was over; ``cpu_s``: what reading them took.
    """

    rate: float
    first_ms: list[float]
    pieces: int
    cpu_s: float
    seconds: float


def drive(wanted: Wanted) -> Seen:
    """Keep so many streams open for so long, then let them end. Raises RuntimeError if one is not complete."""
    command = [sys.executable, str(Path(__file__)), json.dumps(asdict(wanted))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the streams' client: {done.stderr.strip()[-2000:]}")
    return Seen(**json.loads(done.stdout))


class _Reader(asyncio.Protocol):
    """One connection: one stream after the other."""

    def __init__(self, wanted: Wanted, until: float) -> None:
        self._wanted, self._until = wanted, until
        body = {"model": "chat", "stream": True, "max_tokens": wanted.pieces}
        data = json.dumps({**body, "messages": [{"role": "user", "content": "Hello"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.in_time = self.all = 0
        self.first_ms: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._ask()

    def _ask(self) -> None:
        self._last, self._count = b"", 0
        self._parser = httptools.HttpResponseParser(self)
        self._asked = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        # A piece may come in two halves: what is kept of the last read is too short to be counted twice.
        count = (self._last[1 - len(_PIECE) :] + data).count(_PIECE)
        self._last = (self._last + data)[-len(_DONE) :]
        if count and not self._count:
            self.first_ms.append((self._now - self._asked) * 1e3)
        self._count += count
        if self._now < self._until:
            self.in_time += count

    def on_message_complete(self) -> None:
        # Beside the tokens: the piece with the role, and the one that says why it ended.
        if self._count != self._wanted.pieces + 2 or self._last != _DONE:
            self._fail(f"{self._count} pieces of {self._wanted.pieces + 2}, and at the end {self._last!r}")
            return
        self.all += self._count
        if self._now < self._until:
            asyncio.get_running_loop().call_later(self._wanted.pause_s * random.random(), self._ask)
        elif not self.over.done():
            self.over.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke off after {self._count} pieces: {exc}")

    def _fail(self, why: str) -> None:
        if not self.over.done():
            self.over.set_exception(RuntimeError(why))
            self._transport.close()


async def _run(wanted: Wanted) -> Seen:
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    until = began + wanted.seconds
    readers = []
    for n in range(wanted.streams):
        await asyncio.sleep(max(0.0, began + wanted.spread_s * n / wanted.streams - time.perf_counter()))
        made = await loop.create_connection(lambda: _Reader(wanted, until), "127.0.0.1", wanted.port)
        readers.append(made[1])
    async with asyncio.timeout(wanted.seconds + _STALL_S):
        await asyncio.gather(*(reader.over for reader in readers))
    used = os.times()
    return Seen(
        rate=sum(reader.in_time for reader in readers) / wanted.seconds,
        first_ms=[ms for reader in readers for ms in reader.first_ms],
        pieces=sum(reader.all for reader in readers),
        cpu_s=used.user + used.system,
        seconds=time.perf_counter() - began,
    )


if __name__ == "__main__":
    import uvloop

    print(json.dumps(asdict(uvloop.run(_run(Wanted(**json.loads(sys.argv[1])))))))
