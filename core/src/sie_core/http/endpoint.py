"""What every route shares: the objects it may use, and the step from a handler to an ASGI endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

from attrs import Factory, field, frozen
from starlette.types import Receive, Scope, Send

from sie_core.errors import ModelNotFound
from sie_core.http.exchange import Exchange
from sie_core.http.known import Catalogue
from sie_core.http.limits import Limits
from sie_core.http.reading import Reader
from sie_core.http.sending import PIECE, send_large
from sie_core.http.wire import Reply

if TYPE_CHECKING:
    from sie_core.http.remote import RemoteImages
    from sie_core.serving import Allowance, Service
    from sie_core.telemetry import Telemetry

__all__ = ["Endpoint", "Handler", "Site", "allow", "checked_name", "known_model", "model_in_path"]

FEW: Final = 8
"""Items whose vectors, one each, can't make a large answer."""
MAX_NAME: Final = 256
"""Characters; more than any configured name has."""


@frozen(eq=False)
class Site:
    """What the routes work with."""

    service: Service
    limits: Limits
    telemetry: Telemetry
    started_at: float
    """Wall-clock time, seconds since 1970."""
    remote: RemoteImages | None = None
    """Fetches images from elsewhere; ``None``: the configuration does not allow it."""
    catalogue: Catalogue = field(factory=Catalogue)
    """The well-known models, for those whose files are not here yet."""
    root: str = ""
    """What a proxy puts before every path."""
    reader: Reader = field(init=False, default=Factory(lambda self: Reader(self.limits), takes_self=True))


def allow(
    site: Site, exchange: Exchange, number_bytes: float, items: int, outputs: Sequence[str] = ("multivector",)
) -> Allowance | None:
    """What the answer may take, with so many bytes for a number; given back when it was sent. ``None``: it is small."""
    if items <= FEW and "multivector" not in outputs:
        return None
    exchange.allowance = site.service.allowance(site.limits.answer_bytes, number_bytes)
    return exchange.allowance


def model_in_path(exchange: Exchange) -> str:
    """The model that the path names. Raises ModelNotFound for what is too long to be a name."""
    return checked_name(exchange.scope["path_params"]["model"])


def known_model(site: Site, exchange: Exchange) -> str:
    """The model that the path names, before the body costs anything. Raises ModelNotFound, ShuttingDown."""
    name = model_in_path(exchange)
    site.service.expect(name)
    return name


def checked_name(name: str) -> str:
    """The name as it is. Looking for similar names takes time by its length, so absurd ones are refused unsought."""
    if len(name) > MAX_NAME:
        raise ModelNotFound(f"{name[:MAX_NAME]}…")
    return name


Handler = Callable[[Site, Exchange], Awaitable[Reply | None]]
"""``None``: it has answered by itself, piece by piece."""


class Endpoint:
    """A handler as an ASGI endpoint: no request or response objects in between."""

    __slots__ = ("_handler", "_site")

    def __init__(self, handler: Handler, site: Site) -> None:
        self._handler = handler
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["sie.exchange"]
        reply = await self._handler(self._site, exchange)
        if reply is None:
            return
        if len(reply.body) > PIECE:
            await send_large(exchange, reply)
        else:
            await exchange.reply(reply)
