"""From the body of a request to what a route works with: small ones at once, large ones on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from attrs import evolve

from sie_core.errors import ResourceExhausted
from sie_core.http.bulk import LARGE, check_bulk
from sie_core.http.exchange import Exchange
from sie_core.http.limits import Limits, decode, read_typed_body

__all__ = ["Reader"]

T = TypeVar("T")

_WAITING: Final = 4
"""Bodies of the largest size, or as many bytes of smaller ones, may wait for the thread."""
_RETRY_S: Final = 2.0


class Reader:
    """Reads and parses bodies. One thread for all: large bodies are decoded one at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small = evolve(limits, body_bytes=min(limits.body_bytes, LARGE))
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def read(self, exchange: Exchange, parse: Callable[[dict[Any, Any], Limits], T]) -> T:
        """Read the body, a JSON object or a msgpack map, and parse it.

        Raises:
            HttpError: 415, another media type; 408, it does not come.
            ResourceExhausted: too many large bodies wait to be decoded.
            InvalidInput, BodyTooLarge, ClientGone, and what ``parse`` raises.
        """
        body, msgpack = await read_typed_body(exchange, self._limits)
        if len(body) <= LARGE:
            return parse(decode(body, msgpack=msgpack), self._limits)
        if self._waiting + len(body) > _WAITING * self._limits.body_bytes:
            message = f"{self._waiting} bytes of other requests wait to be decoded: send this one again later"
            raise ResourceExhausted(message, retry_after_s=_RETRY_S)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="sie-reader")
        self._waiting += len(body)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._parsed, body, msgpack, parse)
        finally:
            self._waiting -= len(body)

    def _parsed(self, body: bytes, msgpack: bool, parse: Callable[[dict[Any, Any], Limits], T]) -> T:
        check_bulk(body, self._limits.body_bytes, msgpack=msgpack)
        return parse(decode(body, msgpack=msgpack), self._limits)

    async def read_settings(self, exchange: Exchange) -> dict[str, Any]:
        """A small body with some settings, or nothing. Raises as ``read``."""
        body, msgpack = await read_typed_body(exchange, self._small)
        return decode(body, msgpack=msgpack) if body else {}
