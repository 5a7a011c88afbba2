"""What a connection may take before and after its requests: bytes and time of their heads, a place, a quiet end.

uvicorn's two protocols leave that open. :mod:`sie_core.http.protocols` puts :class:`Guarded` in front of both.
"""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.types import ASGIApp

from sie_core.errors import SieError
from sie_core.http.door import Door, Seat, is_local, only_health, too_many
from sie_core.http.errors import Dialect, HttpError, render

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

__all__ = ["Guarded"]

_SMALL: Final = 64 * 1024
"""Bytes of a body that came too late for its answer and are read all the same, so that the connection stays."""
_PROBE_S: Final = (0.1, 2.0)
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Transport:
    """The transport as uvicorn sees it: closing it waits for what the client is still sending."""

    def __init__(self, real: asyncio.Transport, owner: Guarded) -> None:
        self._real = real
        self._owner: Guarded | None = owner
        self.write = real.write

    def close(self) -> None:
        if self._owner is None:
            self._real.close()
        else:
            self._owner.close()

    def is_closing(self) -> bool:
        return self._owner is None or self._owner.closed or self._real.is_closing()

    def forget(self) -> None:
        """Leave no cycle behind, which would live until the collector runs."""
        self._owner = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Cycle(Protocol):
    """What both of uvicorn's protocols know of a request."""

    disconnected: bool
    more_body: bool
    response_started: bool
    response_complete: bool
    message_event: asyncio.Event
    scope: Any


if TYPE_CHECKING:

    class _Uvicorn(asyncio.Protocol):
        """What both of uvicorn's protocols have in common."""

        cycle: Any
        app: ASGIApp
        loop: asyncio.AbstractEventLoop
        flow: FlowControl
        transport: Any
        connections: set[Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def on_response_complete(self) -> None: ...
        def shutdown(self) -> None: ...

else:
    _Uvicorn = object


class Guarded(Seat, _Uvicorn):
    """Goes before one of uvicorn's protocols, and shares its attributes."""

    def __init__(self, *args: Any, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.door = door
        self._real: Any = None
        self.closed = False
        """Answered and not listened to any more; what still comes is thrown away."""
        self.quiet_since = 0.0
        self._timed = False
        self._chunk = 0
        self._pending = 0
        """Bytes that came since the last headers, piece of a body or end of a request."""
        self._progress = False
        self._left = 0
        self._until = 0.0
        self._half_closed = False

    # --- for the two protocols -------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Pass bytes on to uvicorn's protocol."""
        raise NotImplementedError

    def reads_head(self) -> bool:
        """Whether a request's line or headers have begun and not ended."""
        raise NotImplementedError

    def advanced(self) -> None:
        """Headers, a piece of a body or the end of a request came in."""
        self._progress = True

    # --- asyncio's calls -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._real = transport
        peer = transport.get_extra_info("peername")
        admitted = self.door.admits(self.connections, local=is_local(peer))
        super().connection_made(_Transport(self._real, self))  # type: ignore[arg-type]
        self.quiet_since = self.loop.time()
        if admitted is False:
            self._write(too_many())
            self.leave()
            return
        if admitted is None:
            self.app = only_health(self.app)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        if self.closed:
            self._throw_away(len(data))
            return
        self._chunk = len(data)
        self.feed(data)
        if self.closed:
            return
        if self._progress:
            self._progress = False
            self._pending = 0
            self._stop_timing()
        else:
            self._pending += len(data)
            if self._pending > self.door.limits.head_bytes:
                self.refuse_head()
                return
        if self._left:
            self._read_rest(len(data))
        if not self._timed and self.reads_head():
            self._time_head()

    def eof_received(self) -> bool | None:
        cycle: _Cycle | None = self.cycle
        if self.closed or cycle is None or cycle.response_complete or cycle.more_body:
            return None
        # Gone, or done with sending and still reading: both look like this.
        self._half_closed = True
        if cycle.scope["http_version"] == "1.1" and not cycle.response_started and not self.has_queue():
            self._real.write(_CONTINUE)  # Harmless to one who reads; of one who is gone the network tells then.
        self.loop.call_later(_PROBE_S[0], self._probe, _PROBE_S[0])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        self.door.lingering.leave(self.leave)
        super().connection_lost(exc)
        self.transport.forget()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.quiet_since = self.loop.time()
        cycle: _Cycle = self.cycle
        if self._half_closed and cycle.response_complete:
            self.close()
        elif cycle.more_body and cycle.response_complete and not self.closed:
            self._left = _SMALL
        if not self._timed and not self.closed and self.reads_head():
            self._time_head()

    def shutdown(self) -> None:
        """The server ends: what is still being sent for an answered request is not waited for."""
        if self.closed or (self.cycle is not None and self.cycle.response_complete):
            self.leave()
        else:
            super().shutdown()

    def hand_over(self) -> None:
        """Another protocol has the connection from now on."""
        self._stop_timing()
        self.transport.forget()
        self.transport = self._real

    def handed_over(self) -> None:
        """A handshake that the WebSocket library could not read is answered: uvicorn would leave it as it is."""
        fault = getattr(getattr(self._real.get_protocol(), "conn", None), "handshake_exc", None)
        if fault is not None and not self._real.is_closing():
            why = fault.__cause__ or fault
            self._write(HttpError(400, "INVALID_INPUT", f"invalid WebSocket handshake: {why}"))
            self._real.close()

    # --- heads -----------------------------------------------------------------------------------

    def head_is_larger(self, size: int) -> bool:
        """Whether bytes that make a head are too many; to be asked only where they may be."""
        return size > self.door.limits.head_bytes

    def may_be_large(self) -> bool:
        """Whether the head that just ended may be over the limit, for all that is known without counting."""
        return self._pending + self._chunk > self.door.limits.head_bytes

    def has_queue(self) -> bool:
        """Whether requests wait behind the one that is being answered."""
        return False

    def _time_head(self) -> None:
        self._timed = True
        self.door.heads.enter(self._head_overdue)

    def _stop_timing(self) -> None:
        if self._timed:
            self._timed = False
            self.door.heads.leave(self._head_overdue)

    def _head_overdue(self) -> None:
        self._timed = False
        if self._is_answering():  # The one before has not ended: an answer now would be taken for its own.
            self._time_head()
            return
        if not self.reads_head():
            self.leave()
            return
        seconds = self.door.limits.head_s
        message = f"the request's headers did not arrive within {seconds:g} s"
        self._write(HttpError(408, "REQUEST_TIMEOUT", message))
        self.leave()

    def refuse_head(self) -> None:
        """The request line and headers, or what stands around a body in chunks, are larger than the limits allow."""
        limits = self.door.limits
        message = (
            f"the request line and headers are larger than {limits.head_bytes} bytes or more than {limits.head_fields} "
            "fields: send fewer or shorter ones"
        )
        self.refuse(HttpError(431, "HEADERS_TOO_LARGE", message))

    def refuse(self, error: SieError) -> None:
        """Answer what uvicorn has no request for, and close."""
        self._stop_timing()
        cycle: _Cycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._write(error)
        else:
            if not (cycle.response_started or self.has_queue() or self.reads_head()):
                self._write(error)  # It is the answer to this very request, whose body goes on in a wrong way.
            cycle.disconnected = True
            cycle.message_event.set()
        self._linger()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _write(self, error: SieError) -> None:
        reply = render(error, Dialect.BOTH)
        phrase = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Service Unavailable"}
        head = [b"HTTP/1.1 %d %s" % (reply.status, phrase.get(reply.status, b"Bad Request"))]
        fields = {b"content-type": reply.content_type, b"content-length": b"%d" % len(reply.body)}
        fields |= {**dict(reply.headers), b"connection": b"close"}
        head += [name + b": " + value for name, value in fields.items()]
        self._real.write(b"\r\n".join(head) + b"\r\n\r\n" + reply.body)

    # --- the end ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether it waits for another request and has none to answer."""
        return not self.closed and self.cycle is not None and self.cycle.response_complete and not self.has_queue()

    def close(self) -> None:
        """Close, but read first what the client is still sending: else a reset overtakes the answer."""
        cycle: _Cycle | None = self.cycle
        if cycle is not None and cycle.more_body and not self._half_closed:
            self._linger()
        else:
            self.leave()

    def leave(self) -> None:
        """Close now."""
        self.closed = True
        self.connections.discard(self)
        self._real.close()

    def _linger(self) -> None:
        if self.closed:
            return
        self.closed = True
        limits = self.door.limits
        self._left, self._until = limits.linger_bytes, self.loop.time() + limits.linger_s
        self.flow.resume_reading()
        if self._real.can_write_eof():
            self._real.write_eof()
        self.door.lingering.enter(self.leave)

    def _throw_away(self, size: int) -> None:
        self._left -= size
        if self._left < 0 or self.loop.time() > self._until:
            self.leave()
        else:
            self.door.lingering.leave(self.leave)
            self.door.lingering.enter(self.leave)

    def _read_rest(self, size: int) -> None:
        """Count what comes of a body after its answer. Too much of it, and this is the last request here."""
        if not self.cycle.response_complete or self.reads_head():
            self._left = 0
            return
        self._left -= size
        if self._left <= 0:
            self._linger()

    def _probe(self, pause_s: float) -> None:
        """Find out whether a client that sends nothing more is gone."""
        if self._real.is_closing():
            return
        if _is_gone(self._real.get_extra_info("socket")):
            self._real.abort()
            return
        pause_s = min(pause_s * 2, _PROBE_S[1])
        self.loop.call_later(pause_s, self._probe, pause_s)


def _is_gone(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock.fileno(), 0)
    return bool(poll.poll(0))  # Errors and hang-ups are always told: both sides closed, or reset.
