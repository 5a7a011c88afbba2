"""uvicorn's two HTTP protocols, guarded: httptools where it is installed, else h11."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from sie_core.http.connections import Guarded
from sie_core.http.door import ConnectionLimits, Door
from sie_core.http.errors import HttpError

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # another interpreter than CPython
    HttpToolsProtocol = None  # type: ignore[assignment,misc]

__all__ = ["ProtocolName", "protocol_factory"]

ProtocolName = Literal["auto", "h11", "httptools"]
_TOO_LARGE: Final = 431


class _TooLarge(Exception):
    """Raised inside of a parser, which then stops."""


def protocol_factory(limits: ConnectionLimits, name: ProtocolName = "auto") -> Callable[..., Any]:
    """What makes the protocol of each connection of one server, for ``uvicorn.Config(http=…)``."""
    if name == "auto":
        name = "h11" if HttpToolsProtocol is None else "httptools"
    return partial(_H11 if name == "h11" else _HttpTools, door=Door(limits))


class _Refusing(Guarded):
    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for whatever its parser raised."""
        error = sys.exc_info()[1]
        hint = getattr(error, "error_status_hint", None)
        if hint == _TOO_LARGE or (error is not None and isinstance(error.__context__, _TooLarge)):
            self.refuse_head()
        else:
            message = f"invalid HTTP request: {error}"
            self.refuse(HttpError(400, "INVALID_INPUT", message))


if HttpToolsProtocol is not None:

    class _HttpTools(_Refusing, HttpToolsProtocol):  # type: ignore[misc] # uvicorn says less than asyncio
        _answered: Any = None
        """The request that is being answered; others may wait behind it."""

        def feed(self, data: bytes) -> None:
            HttpToolsProtocol.data_received(self, data)

        def reads_head(self) -> bool:
            return self.scope is not None and "method" not in self.scope

        def has_queue(self) -> bool:
            return bool(self.pipeline)

        def on_headers_complete(self) -> None:
            self._progress = True
            if len(self.headers) > self.door.limits.head_fields or (self.may_be_large() and self._is_large()):
                raise _TooLarge
            HttpToolsProtocol.on_headers_complete(self)
            if not self.parser.should_upgrade():  # which looks at the headers once more
                self.headers = []  # uvicorn would put the trailers among the headers.

        def _is_large(self) -> bool:
            return self.head_is_larger(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))

        def on_body(self, body: bytes) -> None:
            self._progress = True
            HttpToolsProtocol.on_body(self, body)

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._answered = cycle
            HttpToolsProtocol._start_asgi_task(self, cycle, app)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._answered is not None:  # uvicorn tells the last of several requests only.
                self._answered.disconnected = True
                self._answered.message_event.set()
            self.pipeline.clear()

        def handle_websocket_upgrade(self) -> None:
            self.hand_over()
            HttpToolsProtocol.handle_websocket_upgrade(self)
            self.handed_over()


class _Heads(h11.Connection):
    """Refuses large heads also where they come in one piece."""

    def __init__(self, owner: _H11, limits: ConnectionLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._owner: _H11 | None = owner

    def forget(self) -> None:
        """Leave no cycle behind."""
        self._owner = None

    def next_event(self) -> Any:
        event = super().next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED or self._owner is None:
            return event
        self._owner.advanced()
        if isinstance(event, h11.Request):
            size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
            if self._owner.head_is_larger(size) or len(list(event.headers)) > self._owner.door.limits.head_fields:
                raise h11.RemoteProtocolError("head too large", error_status_hint=_TOO_LARGE)
        return event


class _H11(_Refusing, H11Protocol):  # type: ignore[misc] # the same
    def __init__(self, *args: Any, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, door=door, **kwargs)
        self.conn = self._heads = _Heads(self, door.limits)

    def feed(self, data: bytes) -> None:
        H11Protocol.data_received(self, data)

    def reads_head(self) -> bool:
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    def has_queue(self) -> bool:
        return bool(self.conn.trailing_data[0]) and self.conn.their_state is h11.DONE

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._heads.forget()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self.hand_over()
        H11Protocol.handle_websocket_upgrade(self, event)
        self.handed_over()
