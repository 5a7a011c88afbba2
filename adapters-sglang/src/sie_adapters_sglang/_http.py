"""HTTP to an engine, as much of it as inference needs: connections that are kept, answers that are read as they come.

What a general client does for a piece of a stream costs several times as much as everything else that happens to it.
Here a piece costs the parser's callback, and all that have come by the time somebody reads are handed on together.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import httptools

__all__ = ["Answer", "Broken", "Pool"]

_HIGH_BYTES = 64 * 1024
"""So much of an answer is kept for its reader; beyond that the engine's connection is not read."""
_LAST_S = 1.0
"""How long an answer may take to end once all of it that matters is there."""


class Broken(ConnectionError):
    """A connection that could not be made, or ended where it should not have."""


class Answer:
    """An answer whose head is there. Raises Broken while it is read, if the engine breaks off."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status: int = connection.parser.get_status_code()

    async def read(self) -> bytes:
        """What has come by now; waits for something to come. Empty: that was all."""
        connection = self._connection
        while not connection.blocks:
            if connection.complete:
                return b""
            await connection.progress()
        return connection.take()

    async def rest(self) -> bytes:
        """All that is left."""
        found = []
        while data := await self.read():
            found.append(data)
        return b"".join(found)

    def close(self, *, read: bool) -> None:
        """Let go of the connection, which serves another request if all that matters was ``read``."""
        self._connection.leave(read)


class Pool:
    """Connections to one engine, for one event loop."""

    def __init__(self, host: str, port: int, *, keep_s: float, connect_s: float) -> None:
        self._host, self._port, self._keep_s, self._connect_s = host, port, keep_s, connect_s
        self._all: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._closed = False

    async def post(self, path: str, body: Mapping[str, Any], key: str) -> Answer:
        """Send a request and wait for the head of its answer. Cancelling closes the connection. Raises Broken."""
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = self._kept() or await self._connect()
        try:
            connection.begin(head.encode() + data)
            while not connection.headed:
                await connection.progress()
        except BaseException:
            connection.leave(read=False)
            raise
        return Answer(connection)

    async def aclose(self) -> None:
        """Whoever waits for an answer gets an error."""
        self._closed = True
        for connection in list(self._all):
            connection.leave(read=False)

    def _kept(self) -> _Connection | None:
        oldest = asyncio.get_running_loop().time() - self._keep_s
        while self._idle:
            connection = self._idle.pop()
            if connection.lost is None and connection.idle_since > oldest:
                return connection
            connection.leave(read=False)
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError as error:  # a TimeoutError is one
            raise Broken(str(error) or type(error).__name__) from error
        if self._closed:
            connection.leave(read=False)
        return connection

    def opened(self, connection: _Connection) -> None:
        self._all.add(connection)

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def give_back(self, connection: _Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiter: asyncio.Future[None] | None = None
        self._size = 0
        self._paused = self._leaving = self._keeps = self._unasked = False
        self.parser = httptools.HttpResponseParser(self)
        self.blocks: list[bytes] = []
        self.headed = False
        self.complete = True
        """Nothing is asked that is not answered."""
        self.lost: Exception | None = None
        self.idle_since = 0.0

    def begin(self, request: bytes) -> None:
        self.headed = self.complete = self._leaving = False
        self._transport.write(request)

    async def progress(self) -> None:
        """Return when something has come. Raises Broken."""
        if self.lost is not None:
            raise self.lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        data = self.blocks[0] if len(self.blocks) == 1 else b"".join(self.blocks)
        self.blocks.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def leave(self, read: bool) -> None:
        if read and not self.complete and self.lost is None:
            self._leaving = True  # its last bytes are on their way
            asyncio.get_running_loop().call_later(_LAST_S, self._give_up)
        elif read and self.lost is None and not self.blocks and self._keeps:
            self._pool.give_back(self)
        else:
            self._end(Broken("the connection was closed"))
            self._transport.abort()

    def _give_up(self) -> None:
        if self._leaving and not self.complete:
            self._transport.abort()

    def _end(self, why: Exception) -> None:
        self.lost = self.lost or why
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- from the transport and the parser ---------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.lost(self)
        self._end(Broken(str(exc) if exc else "the engine closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
            if self._unasked:  # whoever asks next would take it for theirs
                raise httptools.HttpParserError("an answer that nobody asked for")
        except httptools.HttpParserError as error:
            self._end(Broken(f"the engine does not speak HTTP: {error}"))
            self._transport.abort()
            return
        if self._leaving:
            self.blocks.clear()
            if self.complete:
                self._leaving = False
                self.leave(read=True)
            return
        if self._size > _HIGH_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_begin(self) -> None:
        self._unasked = self.complete

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, body: bytes) -> None:
        self.blocks.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self._keeps = self.parser.should_keep_alive()  # later it no longer knows
