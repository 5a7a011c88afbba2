"""Large answers go out in pieces, each when the client has taken most of the one before; one that takes none is let go.

Handed over whole, an answer would stay with the connection, and nobody would ask how long.
"""

from __future__ import annotations

import logging
from typing import Final

from sie_core.errors import DeadlineExceeded
from sie_core.http.exchange import ClientGone, Exchange
from sie_core.http.sse import Taken
from sie_core.http.wire import Reply

__all__ = ["PIECE", "send_large"]

_log = logging.getLogger(__name__)

PIECE: Final = 64 * 1024
"""Bytes. A connection holds back about as many before it asks to wait."""


class _Progress:
    """How far it got, as those who watch streams want to know it."""

    __slots__ = ("sending", "sent")

    def __init__(self) -> None:
        self.sending = True
        self.sent = 0


async def send_large(exchange: Exchange, reply: Reply) -> None:
    """Send an answer, or give it up with its connection. Raises ClientGone."""
    exchange.started, exchange.status = True, reply.status
    progress = _Progress()
    try:
        with Taken(exchange, progress):
            await exchange.send(reply.start())
            for offset in range(0, len(reply.body), PIECE):
                piece = reply.body[offset : offset + PIECE]
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
                progress.sent += 1
            await exchange.send({"type": "http.response.body", "body": b""})
    except DeadlineExceeded:
        _log.info("an answer of %d bytes was given up: its client stopped reading", len(reply.body))
        await exchange.cut()
        raise ClientGone from None
