"""``GET /``: what this is, and where to go from here. As a small page for browsers, as JSON for everybody else."""

from __future__ import annotations

from html import escape
from typing import Final

from sie_core.http.endpoint import Site
from sie_core.http.exchange import Exchange
from sie_core.http.wire import Reply, pack

__all__ = ["LINKS", "welcome"]

_WHAT: Final = "SIE is a model server: it embeds, scores, extracts and generates."
LINKS: Final = {
    "models": ("/v1/models", "the models that are served, and how they are"),
    "status": ("/v1/status", "memory, and where each model is"),
    "openapi": ("/openapi.json", "every path, as tools read it"),
    "metrics": ("/metrics", "numbers for Prometheus"),
    "health": ("/healthz", "whether the process is alive"),
    "ready": ("/readyz", "whether it accepts work"),
}
_PAGE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>SIE</title></head>
<body>
<h1>SIE</h1>
<p>{what}</p>
<ul>
{links}
</ul>
<p>Clients of OpenAI's API use <code>{root}/v1</code> as their base URL.</p>
</body>
</html>
"""
_NO_MORE: Final = ((b"content-security-policy", b"default-src 'none'"), (b"vary", b"accept"))
"""The page needs nothing, and may do nothing."""


async def welcome(site: Site, exchange: Exchange) -> Reply:
    """It is open to all, so it tells nothing of this server in particular."""
    if _reads_html(exchange.headers.get(b"accept", b"")):
        links = "\n".join(
            f'<li><a href="{escape(site.root + path)}">{path}</a>: {text}</li>' for path, text in LINKS.values()
        )
        page = _PAGE.format(what=_WHAT, links=links, root=escape(site.root))
        return Reply(page.encode(), content_type=b"text/html; charset=utf-8", headers=_NO_MORE)
    links_by_name = {name: site.root + path for name, (path, _) in LINKS.items()}
    return pack(
        {"name": "sie", "description": _WHAT, "openai_base_url": f"{site.root}/v1", "links": links_by_name},
        headers=((b"vary", b"accept"),),
    )


def _reads_html(accept: bytes) -> bool:
    """Browsers name it first of all; what takes anything, or JSON as well, gets JSON."""
    return b"text/html" in accept.lower() and b"json" not in accept.lower()
