"""What web pages may do. Without keys, any page that a browser on this machine shows could otherwise drive the server.

A page reaches a server on loopback in two ways: as a foreign origin, which the browser tells with ``Origin`` and
``Sec-Fetch-Site``, or under a name of its own that it lets point here (DNS rebinding), which ``Host`` gives away. With
keys neither matters, since no page knows one: then only those who ask for CORS are looked at.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from starlette.types import Message, Send

from sie_core.config import is_loopback
from sie_core.errors import Forbidden
from sie_core.http.wire import Reply

if TYPE_CHECKING:
    from sie_core.config import ServerConfig

__all__ = ["Browsers"]

_ANY: Final = "*"
_REMEMBERED: Final = 64
"""Hosts that were found good: looking at an address takes longer than looking it up."""
_PREFLIGHT_S: Final = b"600"

Headers = Mapping[bytes, bytes]


class Browsers:
    """Tells the requests that a browser makes for a foreign page from all others."""

    def __init__(self, settings: ServerConfig) -> None:
        self._guarded = not settings.api_keys
        self._names = {_bare(name) for name in (*settings.allowed_hosts, settings.host)}
        # A page can't make an address point elsewhere, so addresses are safe where other machines may ask at all.
        self._addresses = not is_loopback(settings.host)
        self._origins = frozenset(origin.lower().encode() for origin in settings.cors_origins)
        self._all_origins = _ANY in settings.cors_origins
        self._good: set[bytes] = set()

    def check(self, headers: Headers) -> bytes | None:
        """The origin that may read the answer, ``None`` for a request that needs no such permission.

        Raises:
            Forbidden: a browser sends this for a page that may not ask, or for a host that is not this one.
        """
        origin = headers.get(b"origin")
        known = origin if origin is not None and self._knows(origin) else None
        if self._guarded:
            host = headers.get(b"host")
            if host is not None and host not in self._good:
                self._check_host(host)
            if known is None:
                self._check_page(origin, host, headers.get(b"sec-fetch-site"))
        return known

    def _knows(self, origin: bytes) -> bool:
        return self._all_origins or origin.lower() in self._origins

    def _check_host(self, host: bytes) -> None:
        name = _host_name(host)
        if not (_ANY in self._names or name in self._names or is_loopback(name) or self._is_address(name)):
            raise Forbidden(
                f"host {host.decode('latin-1')[:255]!r} is not allowed: without API keys the server answers to "
                f"localhost and addresses of loopback{' and other IP addresses' if self._addresses else ''} only; "
                "add the name to server.allowed_hosts, or set API keys"
            )
        if len(self._good) < _REMEMBERED:
            self._good.add(host)

    def _is_address(self, name: str) -> bool:
        if not self._addresses:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _check_page(self, origin: bytes | None, host: bytes | None, site: bytes | None) -> None:
        if origin is not None and not _same(origin, host):
            who = f"origin {origin.decode('latin-1')[:255]!r}"
        elif site is not None and site.strip().lower() == b"cross-site":
            who = "a page of another site"
        else:
            return
        raise Forbidden(
            f"{who} is not allowed: without API keys web pages of other origins may not use this server; add the "
            "page's origin to server.cors_origins"
        )

    def preflight(self, origin: bytes | None, headers: Headers, methods: frozenset[str]) -> Reply:
        """The answer to OPTIONS: what may be asked here, and whether a page of ``origin`` may."""
        listed = ", ".join(sorted({*methods, "OPTIONS"})).encode("latin-1")
        head = [(b"allow", listed)]
        if origin is not None and b"access-control-request-method" in headers:
            head += [(b"access-control-allow-methods", listed), (b"access-control-max-age", _PREFLIGHT_S)]
            if asked := headers.get(b"access-control-request-headers"):
                head.append((b"access-control-allow-headers", asked))
            if b"access-control-request-private-network" in headers:
                head.append((b"access-control-allow-private-network", b"true"))
        return Reply(b"", status=204, headers=tuple(head))

    def readable(self, send: Send, origin: bytes) -> Send:
        """``send`` for an answer that a page of ``origin`` may read."""
        allowed = (b"access-control-allow-origin", b"*" if self._all_origins else origin)
        extra = [allowed, (b"access-control-expose-headers", b"*"), (b"vary", b"origin")]

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        return tell


def _host_name(host: bytes) -> str:
    """The name in a ``Host`` header, without its port and in lower case."""
    text = host.decode("latin-1").strip().lower()
    name, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or (":" in name and not name.endswith("]")):
        name = text
    return _bare(name)


def _bare(name: str) -> str:
    return name.strip("[]").removesuffix(".").lower()


def _same(origin: bytes, host: bytes | None) -> bool:
    """Whether the page came from here. Both leave a usual port out; behind a proxy only the scheme may differ."""
    return host is not None and origin.lower().partition(b"://")[2] == host.lower().strip()
