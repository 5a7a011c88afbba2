"""Server-sent events: an answer in pieces, whose status is only settled with the first of them."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from sie_core.errors import DeadlineExceeded
from sie_core.http.errors import Dialect, render
from sie_core.http.exchange import Exchange

__all__ = ["EventStream", "Taken"]

_DONE: Final = b"data: [DONE]\n\n"
_NEXT: Final = b"\n\ndata: "
_HEAD: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy would gather the pieces
]


class EventStream:
    """Sends pieces as events; nothing at all is sent before the first, so that an error may still have its status.

    Each piece waits until the connection takes it: the server holds a few of them back for a slow client, no more.
    """

    __slots__ = ("_exchange", "_send", "sending", "sent", "started")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self.started = False
        self.sending = False
        self.sent = 0

    async def send(self, pieces: bytes) -> None:
        """Send what there is: a piece a line, each as an event of its own, all with one write."""
        if not self.started:
            await self._start()
        self.sending = True
        body = b"data: %b\n\n" % pieces.replace(b"\n", _NEXT)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self.sending = False
        self.sent += 1

    async def end(self) -> None:
        """The answer is complete."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": _DONE})

    async def fail(self, error: Exception) -> None:
        """The answer broke off: say why, and leave out what ends a complete one."""
        event = render(error, Dialect.OPENAI, operator=self._exchange.operator).body
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % event})

    async def _start(self) -> None:
        self.started = self._exchange.started = True
        self._exchange.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEAD})


class _Sends(Protocol):
    """What ``Taken`` looks at: whether a piece is being sent, and how many were."""

    sending: bool
    sent: int


class Taken:
    """Runs in the request's own task and ends it when its client takes no piece for too long.

    A client that neither reads nor leaves would keep its place in the engine, and the model from being unloaded.
    """

    __slots__ = ("_events", "_exchange", "_owner", "_seen", "_stalled")

    def __init__(self, exchange: Exchange, events: _Sends) -> None:
        self._exchange = exchange
        self._events = events
        self._seen = -1
        self._stalled = False

    def __enter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._exchange.patrols.stalls.enter(self._look)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._exchange.patrols.stalls.leave(self._look)
        if self._stalled and kind is asyncio.CancelledError and self._owner.uncancel() == 0:
            raise DeadlineExceeded("timed out: the client stopped reading") from None

    def _look(self) -> None:
        events = self._events
        if events.sending and events.sent == self._seen:
            self._stalled = True
            self._owner.cancel()
            return
        self._seen = events.sent if events.sending else -1
        self._exchange.patrols.stalls.enter(self._look)
