"""Bytes out: whole answers, and how values look in JSON and in msgpack."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.types import Message, Send

__all__ = ["JSON", "MSGPACK", "Reply", "msgpack_array", "pack", "part"]

JSON: Final = b"application/json"
MSGPACK: Final = b"application/msgpack"
_NO_CONTENT: Final = 204

_to_msgpack = msgspec.msgpack.Encoder().encode
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class Reply:
    """A whole answer."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        self.body = body
        self.status = status
        self.content_type = content_type
        self.headers = headers

    async def send(self, send: Send) -> None:
        """Send it. Length and type come first, so that a client can read no other body into it."""
        await send(self.start())
        await send({"type": "http.response.body", "body": self.body})

    def start(self) -> Message:
        """What comes before the body."""
        head: list[tuple[bytes, bytes]] = []
        if self.status != _NO_CONTENT:  # which must not have a length
            head += ((b"content-type", self.content_type), (b"content-length", b"%d" % len(self.body)))
        head += self.headers
        return {"type": "http.response.start", "status": self.status, "headers": head}


def pack(
    value: Any, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = (), msgpack: bool = False
) -> Reply:
    """Serialise ``value``; numpy arrays are fine in JSON, and go through :func:`msgpack_array` for msgpack."""
    body = _serialised(value, msgpack=msgpack)
    return Reply(body, status=status, content_type=MSGPACK if msgpack else JSON, headers=headers)


def part(value: Any, *, msgpack: bool = False) -> orjson.Fragment | msgspec.Raw:
    """A part of an answer, serialised by itself, for ``pack`` to put in as it is."""
    body = _serialised(value, msgpack=msgpack)
    return msgspec.Raw(body) if msgpack else orjson.Fragment(body)


def _serialised(value: Any, *, msgpack: bool) -> bytes:
    try:
        return _to_msgpack(value) if msgpack else orjson.dumps(value, option=_JSON_OPTIONS)
    except (TypeError, UnicodeEncodeError):
        clean = _readable(value)
        return _to_msgpack(clean) if msgpack else orjson.dumps(clean, option=_JSON_OPTIONS)


def _readable(value: Any) -> Any:
    """The value with texts that are valid Unicode: names of files, and errors that quote them, may not be."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    return [_readable(inner) for inner in value] if isinstance(value, list | tuple) else value


def msgpack_array(array: NDArray[Any]) -> dict[bytes, Any]:
    """An array in the convention of ``msgpack-numpy``: a map with binary keys."""
    array = np.ascontiguousarray(array)
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}
