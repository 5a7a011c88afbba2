"""Is it alive, does it take work, and how is it doing."""

from __future__ import annotations

from sie_core.http.endpoint import Site
from sie_core.http.errors import HttpError
from sie_core.http.exchange import Exchange
from sie_core.http.wire import Reply, pack

__all__ = ["healthz", "metrics", "readyz"]


async def healthz(site: Site, exchange: Exchange) -> Reply:
    """The process is alive: it answers."""
    return Reply(b'{"status":"ok"}')


async def readyz(site: Site, exchange: Exchange) -> Reply:
    """Work is accepted; else 503 with what stands in the way."""
    ready, problems = site.service.ready()
    return pack({"status": "ready" if ready else "not ready", "problems": list(problems)}, status=200 if ready else 503)


async def metrics(site: Site, exchange: Exchange) -> Reply:
    """What Prometheus scrapes."""
    body, content_type = site.telemetry.render()
    if not body:
        raise HttpError(404, "NOT_FOUND", "metrics are switched off (telemetry.prometheus)")
    return Reply(body, content_type=content_type.encode("latin-1"))
