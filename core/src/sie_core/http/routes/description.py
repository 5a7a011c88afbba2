"""``GET /openapi.json``: every built-in route, as tools and generators of clients read it."""

from __future__ import annotations

import asyncio

from sie_core.http.document import as_json
from sie_core.http.endpoint import Site
from sie_core.http.exchange import Exchange
from sie_core.http.wire import Reply

__all__ = ["openapi"]


async def openapi(site: Site, exchange: Exchange) -> Reply:
    """The OpenAPI document, made by the first who asks: no start waits for it, and no other request."""
    return Reply(await asyncio.to_thread(as_json, site.service.status().version, site.root))
