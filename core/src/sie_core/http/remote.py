"""Fetching images from elsewhere, where the configuration allows it: never from an address that is not public.

A server that fetches what it is told to would otherwise open the network it stands in to everybody who may ask it. So
every host is resolved here, each of its addresses has to be public, the connection goes to the address that was
checked, and a redirect is checked like the first request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from sie_core.errors import BodyTooLarge, InvalidInput

if TYPE_CHECKING:
    import httpx

__all__ = ["Address", "RemoteImages", "is_public"]

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[Address]]]

TIMEOUT_S: Final = 10.0
MAX_REDIRECTS: Final = 3
_MAX_URL: Final = 4096
_TRANSLATED: Final = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 ones."""
_UNICAST: Final = ipaddress.IPv6Network("2000::/3")
"""All that was ever given out of the open IPv6 internet. Python counts more as global, site-local ones among them."""


_PLATFORMS: Final = frozenset({ipaddress.IPv4Address("168.63.129.16")})
"""Addresses that a cloud answers on from inside its machines (Azure's host), though their range is a public one."""


def is_public(address: Address) -> bool:
    """Whether an address is one of the open internet, whatever it is wrapped in."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address.teredo is not None:
            return False
        if inner is not None:
            return is_public(inner)
        if address not in _UNICAST:
            return False
    if address in _PLATFORMS:
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


async def _resolve(host: str, port: int) -> Sequence[Address]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


class RemoteImages:
    """Fetches images over HTTP. ``permits`` says which addresses may be asked."""

    def __init__(
        self,
        *,
        permits: Callable[[Address], bool] = is_public,
        resolve: Resolve = _resolve,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._permits = permits
        self._resolve = resolve
        self.timeout_s = timeout_s
        """Seconds that an image may take, and all images of a request together."""
        self._trust: ssl.SSLContext | None = None  # reading the certificates takes longer than most fetches

    async def fetch(self, url: str, limit: int) -> bytes:
        """The body of a URL, ``limit`` bytes at most.

        Raises:
            InvalidInput: it can't be had: the address is not allowed, the host does not answer, or not in time.
            BodyTooLarge
        """
        import httpx

        trust = self._trust = self._trust or httpx.create_ssl_context(trust_env=False)
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                httpx.AsyncClient(verify=trust, trust_env=False, timeout=self.timeout_s) as client,
            ):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(client, url, limit)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise _not_to_be_had(f"it did not come within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise _not_to_be_had(type(error).__name__) from error
        except (httpx.InvalidURL, UnicodeError) as error:  # of a redirect, or a host that no name server could know
            raise _not_to_be_had("its address is malformed") from error
        raise _not_to_be_had(f"it is redirected more than {MAX_REDIRECTS} times")

    async def _get(self, client: httpx.AsyncClient, url: str, limit: int) -> bytes | str:
        """The body, or where it is said to be."""
        import httpx

        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError, ValueError):
            raise _not_to_be_had("its address is malformed") from None
        if len(url) > _MAX_URL or parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo:
            raise _not_to_be_had("its address must be a plain http or https one")
        address = await self._checked(parsed.host, parsed.port or (443 if parsed.scheme == "https" else 80))
        headers = {"host": parsed.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
        request = client.build_request(
            "GET",
            parsed.copy_with(host=str(address)),
            headers=headers,
            extensions={"sni_hostname": parsed.raw_host.decode("ascii")},
        )
        response = await client.send(request, stream=True)
        try:
            if response.is_redirect:
                return str(parsed.join(response.headers.get("location", "")))
            if response.status_code != httpx.codes.OK:
                raise _not_to_be_had(f"the other server answered {response.status_code}")
            return await _body(response, limit)
        finally:
            await response.aclose()

    async def _checked(self, host: str, port: int) -> Address:
        try:
            addresses = [ipaddress.ip_address(host.strip("[]"))]
        except ValueError:
            addresses = list(await self._resolve(host, port))
        if not addresses:
            raise _not_to_be_had("its host has no address")
        if not all(self._permits(address) for address in addresses):
            raise _not_to_be_had("its host is not on the open internet")
        return addresses[0]


async def _body(response: httpx.Response, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(
                f"the image has more than {limit} bytes, which is the most (server.max_image_bytes)", limit=limit
            )
        parts.append(part)
    return b"".join(parts)


def _not_to_be_had(reason: str) -> InvalidInput:
    return InvalidInput(f"the image can't be fetched: {reason}")
