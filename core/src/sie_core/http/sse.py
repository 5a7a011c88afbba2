"""Server-sent events: an answer in pieces, whose status is only settled with the first of them."""

from __future__ import annotations

from typing import Final

from sie_core.http.errors import Dialect, render
from sie_core.http.exchange import Exchange

__all__ = ["EventStream"]

_DONE: Final = b"data: [DONE]\n\n"
_HEAD: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or a proxy would gather the pieces
]


class EventStream:
    """Sends pieces as events; nothing at all is sent before the first, so that an error may still have its status.

    Each piece waits until the connection takes it: the server holds a few of them back for a slow client, no more.
    """

    __slots__ = ("_exchange", "_send", "started")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self.started = False

    async def send(self, piece: bytes) -> None:
        """Send one piece, which has no line breaks."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % piece, "more_body": True})

    async def end(self) -> None:
        """The answer is complete."""
        if not self.started:
            await self._start()
        await self._send({"type": "http.response.body", "body": _DONE})

    async def fail(self, error: Exception) -> None:
        """The answer broke off: say why, and leave out what ends a complete one."""
        event = render(error, Dialect.OPENAI).body
        await self._send({"type": "http.response.body", "body": b"data: %b\n\n" % event})

    async def _start(self) -> None:
        self.started = self._exchange.started = True
        self._exchange.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEAD})
