"""One HTTP request while it runs: its headers, its answer, and whether its client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from starlette.types import Message, Receive, Scope, Send

from sie_core.http.wire import Reply

__all__ = ["ClientGone", "Exchange", "Watched"]


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


class Exchange:
    """One HTTP request, and what its headers say about media types."""

    __slots__ = ("headers", "receive", "scope", "send", "started", "status")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.started = False
        self.status = 0

    @property
    def content_type(self) -> bytes:
        """The body's media type in lower case, without parameters."""
        return self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()

    @property
    def sends_msgpack(self) -> bool:
        """Whether the body is msgpack."""
        return b"msgpack" in self.content_type

    @property
    def wants_msgpack(self) -> bool:
        """Whether the answer shall be msgpack: the client says so, or says nothing and sent msgpack."""
        accept = self.headers.get(b"accept", b"")
        if b"msgpack" in accept:
            return True
        return b"json" not in accept and self.sends_msgpack

    async def watch_disconnect(self) -> None:
        """Return when the client is gone. Only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            await asyncio.sleep(0)  # Some servers say again and again that the body is over.

    async def tell(self, message: Message) -> None:
        """``send`` for those who answer by themselves (routes of plugins)."""
        self.started = True
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)

    async def reply(self, reply: Reply) -> None:
        """Send the answer."""
        self.started = True
        self.status = reply.status
        await reply.send(self.send)


class Watched:
    """Runs in the request's own task and cancels it when the client leaves, so that its place in the queue is freed.

    Most answers are there within milliseconds. Watching costs a task, so it starts only after ``GRACE_S`` seconds.
    """

    GRACE_S: Final = 0.05
    __slots__ = ("_exchange", "_gone", "_owner", "_timer", "_watcher")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._timer = owner.get_loop().call_later(self.GRACE_S, self._start)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and kind is asyncio.CancelledError and self._owner.uncancel() == 0:
            raise ClientGone from None

    def _start(self) -> None:
        self._watcher = self._owner.get_loop().create_task(self._watch())

    async def _watch(self) -> None:
        await self._exchange.watch_disconnect()
        self._gone = True
        self._owner.cancel()
