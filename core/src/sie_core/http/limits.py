"""Reading a request's body: how large, how slow and how deep it may be."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson
from attrs import frozen

from sie_core.errors import BodyTooLarge, InvalidInput
from sie_core.http.errors import HttpError
from sie_core.http.exchange import BodyDeadline, ClientGone, Exchange

__all__ = ["Limits", "decode", "read_body", "read_typed_body"]

_JSON_TYPES: Final = frozenset({b"application/json", b"text/json"})
_MSGPACK_TYPES: Final = frozenset({b"application/msgpack", b"application/x-msgpack", b"application/vnd.msgpack"})

_PACKED: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""How compressed bodies begin; no JSON and no msgpack map does."""

_from_msgpack = msgspec.msgpack.Decoder().decode


@frozen
class Limits:
    """Sizes in bytes, times in seconds. ``body_s``: how long a client may take to send its body; ``stall_s``: how long
    it may take nothing of its answer. ``images``: how many a request may hold, ``image_pixels``: how large one may be.
    """

    body_bytes: int
    item_bytes: int
    items: int
    body_s: float
    stall_s: float = 120.0
    image_bytes: int = 20 * 1024 * 1024
    image_pixels: int = 40_000_000
    images: int = 256
    answer_bytes: int = 256 * 1024 * 1024


async def read_body(exchange: Exchange, limits: Limits) -> bytes:
    """Read the whole body.

    Raises:
        BodyTooLarge: by its Content-Length, or (whatever that said) by what came.
        HttpError: 408, the client took too long.
        ClientGone: the client left half way.
    """
    declared = exchange.headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits, int(declared[:20]))
    try:
        with BodyDeadline(exchange):
            return await _receive(exchange, limits)
    except TimeoutError:
        message = f"the request's body did not arrive within {limits.body_s:g} s"
        raise HttpError(408, "REQUEST_TIMEOUT", message, headers={"connection": "close"}) from None


async def _receive(exchange: Exchange, limits: Limits) -> bytes:
    first = await exchange.receive()
    if first["type"] == "http.disconnect":
        raise ClientGone
    body: bytes = first.get("body", b"")
    if not first.get("more_body", False):
        _check_size(len(body), limits)
        return body
    parts = [body]
    size = len(body)
    more = True
    while more:
        _check_size(size, limits)
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        parts.append(part)
        more = message.get("more_body", False)
    _check_size(size, limits)
    return b"".join(parts)


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.body_bytes:
        raise _too_large(limits, size)


def _too_large(limits: Limits, size: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {limits.body_bytes} bytes: send fewer or shorter items a request",
        size=size,
        limit=limits.body_bytes,
    )


async def read_typed_body(exchange: Exchange, limits: Limits) -> tuple[bytes, bool]:
    """Read the body; whether it is msgpack, and not JSON.

    Raises:
        HttpError: 415, another media type; 408.
        BodyTooLarge, ClientGone
    """
    kind = exchange.content_type
    check_media_type(kind, exchange)
    body = await read_body(exchange, limits)
    if body and not kind:  # Sent in chunks, so that its size was not known before.
        raise _untyped()
    return body, kind in _MSGPACK_TYPES


def check_media_type(kind: bytes, exchange: Exchange) -> None:
    """Refuse a body that could not be read anyway, before reading it. Raises HttpError (415)."""
    if not kind and exchange.headers.get(b"content-length", b"0").strip(b"0 "):
        raise _untyped()
    if kind and kind not in _JSON_TYPES and kind not in _MSGPACK_TYPES and not kind.endswith(b"+json"):
        message = f"unsupported content type {kind.decode('latin-1')!r}: send application/json or application/msgpack"
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", message, param="content-type")
    coding = exchange.headers.get(b"content-encoding", b"").strip().lower()
    if coding and coding != b"identity":
        message = f"unsupported content encoding {coding.decode('latin-1')!r}: send the body uncompressed"
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", message, param="content-encoding")


def _untyped() -> HttpError:
    """Without a type a browser sends a body wherever a page tells it to, without asking first."""
    message = "the body has no Content-Type: send 'Content-Type: application/json' or 'application/msgpack'"
    return HttpError(415, "UNSUPPORTED_MEDIA_TYPE", message, param="content-type")


def decode(body: bytes, *, msgpack: bool) -> dict[Any, Any]:
    """Decode a body. Raises InvalidInput for one that is empty, malformed, nested too deep, or no object."""
    name = "msgpack map" if msgpack else "JSON object"
    if not body:
        raise InvalidInput(f"the body is empty: send a {name}")
    try:
        value = _from_msgpack(body) if msgpack else orjson.loads(body)
    except RecursionError:
        raise InvalidInput(f"the body is nested too deep for a {name}") from None
    except (orjson.JSONDecodeError, msgspec.MsgspecError) as error:
        _refuse_packed(body)
        raise InvalidInput(f"Invalid {'msgpack' if msgpack else 'JSON'} body: {_fault(body, error)}") from None
    if not isinstance(value, dict):
        _refuse_packed(body)
        raise InvalidInput(f"the body must be a {name}")
    return value


def _refuse_packed(body: bytes) -> None:
    """A body that is compressed and does not say so is not a broken one. Raises HttpError (415)."""
    coding = next((coding for start, coding in _PACKED.items() if body.startswith(start)), None)
    if coding is not None:
        message = f"The body is compressed ({coding}), and no 'Content-Encoding' says so: send it uncompressed"
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", message, param="content-encoding")


def _fault(body: bytes, error: Exception) -> str:
    """What is wrong with it; of JSON in another encoding than UTF-8 the parser says something about surrogates."""
    if isinstance(error, orjson.JSONDecodeError):
        try:
            body.decode()
        except UnicodeDecodeError as odd:
            return f"byte {odd.start} (0x{body[odd.start]:02x}) is not UTF-8: send the text in UTF-8"
    return str(error)
