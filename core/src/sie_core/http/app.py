"""The ASGI application: web pages and keys first, then Starlette's router; every error becomes an answer here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from sie_core._traces import forget_traces
from sie_core.errors import ShuttingDown
from sie_core.http._beside import is_taken, path_of, routes_beside
from sie_core.http.auth import KeyRing
from sie_core.http.browsers import Browsers
from sie_core.http.endpoint import Endpoint, Handler, Site
from sie_core.http.errors import Dialect, render
from sie_core.http.exchange import ClientGone, Exchange, Patrols
from sie_core.http.known import Catalogue
from sie_core.http.limits import Limits
from sie_core.http.paths import methods_of, not_found
from sie_core.http.patrol import Patrol
from sie_core.http.remote import RemoteImages
from sie_core.http.routes import (
    admin,
    cohere,
    description,
    encode,
    generation,
    models,
    openai,
    ops,
    status,
    tasks,
    welcome,
)
from sie_core.http.wire import Reply
from sie_core.telemetry import Telemetry

if TYPE_CHECKING:
    from sie_core.config import ServerConfig
    from sie_core.plugins import Plugins
    from sie_core.serving import Service

__all__ = ["create_app", "taken_paths"]

UNMATCHED: Final = "none"
"""Stands for the route in metrics where there is none: raw paths would make a series each."""
WATCH_AFTER_S: Final = 0.05
"""Answers that take longer are watched, in case that the client leaves."""
CLIENT_GONE: Final = 499
"""Stands for the status in metrics where nobody was left to answer."""
LAST_ANSWER_S: Final = 2.0
"""A client whose WebSocket was refused has so long to take the answer."""
SHUTDOWN_RETRY_S: Final = 5.0
_OPENAI_PATHS = ("/v1/embeddings", "/v1/chat/", "/v1/completions")
_COHERE_PATHS = ("/v1/rerank", "/rerank", "/v1/embed", "/v2/")
_NATIVE_PATHS = ("/v1/encode/", "/v1/score/", "/v1/extract/", "/v1/generate/", "/v1/status", "/v1/admin", "/ws/")


def create_app(
    service: Service,
    settings: ServerConfig,
    *,
    plugins: Plugins | None = None,
    telemetry: Telemetry | None = None,
    body_timeout_s: float = 60.0,
    stall_timeout_s: float = 120.0,
) -> Application:
    """Build the application over a running service.

    ``plugins`` add their routes after the built-in ones. A client has ``body_timeout_s`` seconds to send a request's
    body; one that takes nothing of a stream for ``stall_timeout_s`` seconds (at most twice that) loses the rest of it.
    Raises ConfigError for a malformed API key line.
    """
    site = Site(
        service=service,
        limits=Limits(
            settings.max_body_bytes,
            settings.max_item_bytes,
            settings.max_items,
            body_timeout_s,
            stall_timeout_s,
            settings.max_image_bytes,
            settings.max_image_pixels,
            settings.max_images,
            settings.max_answer_bytes,
        ),
        telemetry=telemetry or Telemetry.disabled(),
        started_at=time.time(),
        remote=RemoteImages() if settings.allow_image_urls else None,
        catalogue=Catalogue([one.folder for one in plugins.catalogues] if plugins is not None else ()),
        root=(settings.root_path or "").rstrip("/"),
    )
    ours = _routes(site)
    extra = routes_beside(plugins, ours) if plugins is not None else ()
    return Application(site, settings, [*ours, *extra])


def taken_paths(routes: Iterable[BaseRoute]) -> list[str]:
    """Paths of these routes that the server answers itself: a plugin's would not be reached, or answer in its place."""
    ours = _routes(cast(Site, None))  # they only have to be there
    return [path_of(route) for route in routes if is_taken(route, ours)]


def _routes(site: Site) -> list[BaseRoute]:
    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(handler, site), methods=[method])

    return [
        route("POST", "/v1/embeddings", openai.embeddings),
        route("POST", "/v1/chat/completions", generation.chat),
        route("POST", "/v1/completions", generation.completions),
        route("POST", "/v1/encode/{model:path}", encode.encode),
        route("POST", "/v1/score/{model:path}", tasks.score),
        route("POST", "/v1/extract/{model:path}", tasks.extract),
        route("POST", "/v1/generate/{model:path}", generation.generate),
        route("POST", "/v1/rerank", cohere.rerank_v1),
        route("POST", "/rerank", cohere.rerank_v1),
        route("POST", "/v2/rerank", cohere.rerank_v2),
        route("POST", "/v1/embed", cohere.embed_v1),
        route("POST", "/v2/embed", cohere.embed_v2),
        route("GET", "/v1/models", models.list_models),
        route("GET", "/v1/models/{model:path}", models.show_model),
        route("GET", "/v1/status", status.show_status),
        WebSocketRoute("/ws/status", status.StatusFeed(site)),
        route("GET", "/v1/admin/decisions", admin.decisions),
        route("GET", "/v1/admin/models/{model:path}/explain", admin.explain),
        Route(
            "/v1/admin/models/{model:path}/loras/{lora:path}", Endpoint(admin.lora, site), methods=["POST", "DELETE"]
        ),
        *(route("POST", f"/v1/admin/models/{{model:path}}/{name}", act) for name, act in admin.ACTIONS.items()),
        route("GET", "/", welcome.welcome),
        route("GET", "/health", ops.healthz),
        route("GET", "/healthz", ops.healthz),
        route("GET", "/readyz", ops.readyz),
        route("GET", "/metrics", ops.metrics),
        route("GET", "/openapi.json", description.openapi),
    ]


class Application:
    """Keys and errors around a Starlette application (``starlette``), whose own middleware is left out: it costs."""

    def __init__(self, site: Site, settings: ServerConfig, routes: Sequence[BaseRoute]) -> None:
        self._site = site
        self._patrols = Patrols(
            bodies=Patrol(site.limits.body_s), answers=Patrol(WATCH_AFTER_S), stalls=Patrol(site.limits.stall_s)
        )
        self._fixed = {
            (method, route.path): route
            for route in routes
            if isinstance(route, Route) and isinstance(route.app, Endpoint) and not route.param_convertors
            for method in route.methods or ()
        }
        self._keys = KeyRing(settings.api_keys)
        self._browsers = Browsers(settings)
        self.starlette = Starlette(routes=list(routes))
        self.starlette.router.redirect_slashes = False  # sie-sdk follows no redirects.
        self.starlette.state.service = site.service
        self._router = self.starlette.router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self.starlette
        root = scope.get("root_path") or self._site.root
        if root:
            _forget_root(scope, root)
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope["sie.exchange"] = Exchange(scope, receive, send, self._patrols)
        telemetry = self._site.telemetry
        began = perf_counter()
        try:
            if telemetry.tracing:
                with telemetry.server_span(scope["method"], scope["headers"]) as report:
                    await self._answer(exchange)
                    report(exchange.status)
            else:
                await self._answer(exchange)
        finally:
            del scope["sie.exchange"]  # they would keep each other
            if exchange.allowance is not None:
                exchange.allowance.release()
            route = getattr(scope.get("route"), "path_format", UNMATCHED)
            telemetry.http_request(route, scope["method"], exchange.status, perf_counter() - began)

    async def _answer(self, exchange: Exchange) -> None:
        scope = exchange.scope
        try:
            origin = self._browsers.check(exchange.headers)
            if origin is not None:
                exchange.send = self._browsers.readable(exchange.send, origin)
            if scope["method"] == "OPTIONS" and (methods := methods_of(scope["path"], self.starlette.routes)):
                await exchange.reply(self._browsers.preflight(origin, exchange.headers, methods))
                return
            exchange.operator = self._keys.check(scope["path"], exchange.headers)
            route = self._fixed.get((scope["method"], scope["path"]))
            if route is None:
                await self._router(scope, exchange.receive, exchange.tell)
            else:  # What the router would do; it would take longer.
                scope["route"] = route
                await route.app(scope, exchange.receive, exchange.tell)
        except ClientGone as gone:
            exchange.status = CLIENT_GONE
            forget_traces(gone)
        except asyncio.CancelledError:
            if not self._site.service.stopping:
                raise
            await self._cut_short(exchange)
        except Exception as error:
            if exchange.started:  # Too late for another answer: the server closes the connection.
                raise
            reply = self._rendered(error, exchange)
            forget_traces(error)
            await exchange.reply(reply)

    async def _cut_short(self, exchange: Exchange) -> None:
        """The time for running requests is over. Left alone, uvicorn logs a traceback and answers with a bare 500."""
        if exchange.started:
            await exchange.cut()
        else:
            error = ShuttingDown("the server is shutting down", retry_after_s=SHUTDOWN_RETRY_S)
            await exchange.reply(self._rendered(error, exchange))

    def _rendered(self, error: Exception, exchange: Exchange) -> Reply:
        scope = exchange.scope
        if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND and "endpoint" not in scope:
            error = not_found(scope["method"], scope["path"], self.starlette.routes)
        return render(error, dialect_of(scope["path"]), operator=exchange.operator)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            self._browsers.check(headers)
            scope["sie.operator"] = self._keys.check(scope["path"], headers)
        except Exception as error:
            await _refuse(error, scope, receive, send)
            return
        await self._router(scope, receive, send)


def _forget_root(scope: Scope, root: str) -> None:
    """Behind a prefix the path may start with it: keys, dialects and routes shall all see the path without."""
    root = root.rstrip("/")
    if scope["path"].startswith(root + "/"):
        scope["path"] = scope["path"][len(root) :]
    scope["root_path"] = ""


async def _refuse(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Deny a WebSocket with an HTTP answer, where the server can; else by closing it, which clients see as a 403."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    reply = render(error, Dialect.NATIVE)
    await send(
        {
            "type": "websocket.http.response.start",
            "status": reply.status,
            "headers": [(b"content-type", reply.content_type), *reply.headers],
        }
    )
    await send({"type": "websocket.http.response.body", "body": reply.body})
    # uvicorn logs an error for an application that ends without a handshake, unless that finds the client gone.
    # Its older releases take no further message, and raise.
    with contextlib.suppress(TimeoutError, RuntimeError):
        async with asyncio.timeout(LAST_ANSWER_S):
            for _ in ("told that it is over", "told that the connection is closed"):
                await receive()
            await send({"type": "websocket.close", "code": 1008})


def dialect_of(path: str) -> Dialect:
    """Who uses a path; paths that nobody knows are answered in both shapes."""
    if path.startswith(_OPENAI_PATHS):
        return Dialect.OPENAI
    if path.startswith(_COHERE_PATHS):
        return Dialect.COHERE
    return Dialect.NATIVE if path.startswith(_NATIVE_PATHS) else Dialect.BOTH
