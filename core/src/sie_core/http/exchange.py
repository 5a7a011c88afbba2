"""One HTTP request while it runs: its headers, its answer, and whether its client is still there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import frozen
from starlette.types import Message, Receive, Scope, Send

from sie_core.http.patrol import Patrol
from sie_core.http.wire import Reply

if TYPE_CHECKING:
    from sie_core.serving import Allowance

__all__ = ["BodyDeadline", "ClientGone", "Exchange", "Patrols", "Watched"]


_CUT_S: Final = 2.0
"""The server tells of a connection that was closed within a turn of the loop; others than uvicorn may not."""


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


@frozen(eq=False)
class Patrols:
    """Who looks after bodies that do not come, answers that take a while, and answers that nobody takes."""

    bodies: Patrol
    answers: Patrol
    stalls: Patrol


class Exchange:
    """One HTTP request, and what its headers say about media types."""

    __slots__ = (
        "_of_server",
        "allowance",
        "headers",
        "operator",
        "patrols",
        "receive",
        "scope",
        "send",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, patrols: Patrols) -> None:
        self.patrols = patrols
        self.scope = scope
        self.receive = receive
        self.send = self._of_server = send
        self.headers: Mapping[bytes, bytes] = dict(scope["headers"])
        self.operator = False
        """Whether who asks may see the inside of the server."""
        self.started = False
        self.status = 0
        self.allowance: Allowance | None = None
        """What its answer takes of the host's memory until it was sent."""

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
            return b";" not in accept or _prefers_msgpack(accept)
        return b"json" not in accept and self.sends_msgpack

    def abort(self) -> None:
        """Close the connection at once, with what was not sent yet. ASGI has no word for it: uvicorn's is used."""
        transport = getattr(getattr(self._of_server, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()

    async def cut(self) -> None:
        """Close the connection in the middle of an answer; uvicorn would log an error for one that ends before it."""
        self.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CUT_S):
                await self.watch_disconnect()

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


def _prefers_msgpack(accept: bytes) -> bool:
    """Whether msgpack weighs (``q``) as much as JSON in a list of types that names it."""
    msgpack = json = 0.0
    for one in accept.lower().split(b","):
        kind, _, parameters = one.partition(b";")
        weight = 1.0
        for parameter in parameters.split(b";"):
            name, _, value = parameter.strip().partition(b"=")
            if name == b"q":
                with contextlib.suppress(ValueError):
                    weight = float(value)
        if b"msgpack" in kind:
            msgpack = max(msgpack, weight)
        elif b"json" in kind:
            json = max(json, weight)
    return msgpack > 0 and msgpack >= json


class Watched:
    """Runs in the request's own task and cancels it when the client leaves, so that its place in the queue is freed.

    Watching costs a task, and most answers are there within milliseconds: only slow ones are watched.
    """

    __slots__ = ("_exchange", "_gone", "_owner", "_watcher")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._owner = _current_task()
        self._exchange.patrols.answers.enter(self._start)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._exchange.patrols.answers.leave(self._start)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None  # its error would keep it, through its frame and this object
        if self._gone and kind is asyncio.CancelledError and self._owner.uncancel() == 0:
            raise ClientGone from None

    def _start(self) -> None:
        self._watcher = self._owner.get_loop().create_task(self._watch())

    async def _watch(self) -> None:
        await self._exchange.watch_disconnect()
        self._gone = True
        self._owner.cancel()


class BodyDeadline:
    """Raises TimeoutError in a request whose body takes too long to come. As ``asyncio.timeout``, for less."""

    __slots__ = ("_exchange", "_overdue", "_owner")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._overdue = False

    def __enter__(self) -> None:
        self._owner = _current_task()
        self._exchange.patrols.bodies.enter(self._stop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._exchange.patrols.bodies.leave(self._stop)
        if self._overdue and kind is asyncio.CancelledError and self._owner.uncancel() == 0:
            raise TimeoutError from None

    def _stop(self) -> None:
        self._overdue = True
        self._owner.cancel()


def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task
