"""How many connections there may be: who comes in when places are short, and who has to go for them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Collection
from functools import partial
from typing import Any, Final

from attrs import frozen
from starlette.types import ASGIApp, Receive, Scope, Send

from sie_core.errors import QueueFull
from sie_core.http.errors import Dialect, render
from sie_core.http.patrol import Patrol

__all__ = ["ConnectionLimits", "Door", "Seat", "is_local", "only_health", "too_many"]

_log = logging.getLogger(__name__)
_HEALTH: Final = ("/health", "/healthz", "/readyz")
_RETRY_S: Final = 5.0
_WARN_EVERY_S: Final = 60.0


@frozen
class ConnectionLimits:
    """Sizes in bytes, times in seconds."""

    most: int = 1024
    """Connections at a time."""
    kept: int = 16
    """Those among them that are kept for loopback and for health checks."""
    head_bytes: int = 64 * 1024
    """Of the request line and the headers together."""
    head_fields: int = 100
    head_s: float = 20.0
    """From the beginning of a connection, or the first byte of a later request, to the end of its headers."""
    linger_bytes: int = 128 * 1024 * 1024
    """Of a body whose request was answered, read and thrown away before the connection is closed."""
    linger_s: float = 30.0
    linger_idle_s: float = 5.0


class Seat:
    """A connection, as the door sees it."""

    quiet_since: float
    """The loop's time at which it had its last answer."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for another request and has none to answer."""
        raise NotImplementedError

    def leave(self) -> None:
        """Close now."""
        raise NotImplementedError


class Door:
    """The connections of one server: who may come in when there are many, and who has to go for them."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.heads = Patrol(limits.head_s)
        self.lingering = Patrol(limits.linger_idle_s)
        self._warned_at = float("-inf")

    def admits(self, connections: Collection[object], *, local: bool) -> bool | None:
        """Whether one more may come in: ``None`` means for health checks only.

        Where places are short, connections that hold one for nothing go first, the longest-standing ones before others.
        """
        limits = self.limits
        if len(connections) < limits.most - limits.kept:
            return True
        self._warn()
        before = len(connections)
        for make_room in (self.lingering.hurry, self.heads.hurry, partial(_end_idle, connections)):
            make_room()
            if len(connections) < before:  # Those who leave are taken out at once; not all who are hurried leave.
                break
        if len(connections) >= limits.most:
            return False
        return True if local or len(connections) < limits.most - limits.kept else None

    def _warn(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at > _WARN_EVERY_S:
            self._warned_at = now
            _log.warning(
                "there are %d connections, and no more are allowed (server.max_connections, open files): idle ones are "
                "closed, then new ones are refused",
                self.limits.most - self.limits.kept,
            )


def _end_idle(connections: Collection[object]) -> None:
    """Close the connection that has waited longest for another request, if any does."""
    idle = [one for one in connections if isinstance(one, Seat) and one.is_idle]
    if idle:
        min(idle, key=lambda one: one.quiet_since).leave()


def is_local(peer: Any) -> bool:
    """Whether a connection comes from this machine."""
    if not isinstance(peer, tuple) or not peer:
        return True  # a socket of this machine's files
    try:
        return ipaddress.ip_address(peer[0]).is_loopback
    except ValueError:
        return False


def only_health(app: ASGIApp) -> ASGIApp:
    """The application for a connection that came in for health checks only."""

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        # A proxy's prefix may stand before the path.
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"].endswith(_HEALTH):
            await app(scope, receive, send)
            return
        if scope["type"] == "http":
            reply = render(too_many(), Dialect.BOTH)
            reply.headers = (*reply.headers, (b"connection", b"close"))
            await reply.send(send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1013})

    return refusing


def too_many() -> QueueFull:
    """The refusal of a connection."""
    return QueueFull("too many connections: try again later", retry_after_s=_RETRY_S)
