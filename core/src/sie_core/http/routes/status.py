"""``GET /v1/status`` once, and ``/ws/status`` whenever something changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from sie_core.http.endpoint import Site
from sie_core.http.exchange import Exchange
from sie_core.http.views import server_status
from sie_core.http.wire import Reply, pack

if TYPE_CHECKING:
    from sie_core.serving import ServerStatus

__all__ = ["StatusFeed", "show_status"]

_log = logging.getLogger(__name__)
MIN_GAP_S: Final = 0.25
POLL_S: Final = 1.0
"""Queue lengths and bytes change without a change of residency; they are looked at this often while anybody watches."""


async def show_status(site: Site, exchange: Exchange) -> Reply:
    """Accounts, models, uptime and version."""
    return pack(_stamped(site.service.status(), operator=exchange.operator), msgpack=exchange.wants_msgpack)


def _stamped(status: ServerStatus, *, operator: bool) -> dict[str, Any]:
    shown = server_status(status, operator=operator)
    return {**shown, "uptime_s": round(status.uptime_s, 3), "version": status.version}


class StatusFeed:
    """The WebSocket endpoint. One look at the service serves all watchers; a slow one misses versions, never delays.

    Each watcher has its own task, which sends the newest version and waits for the next: nothing is queued for it.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._watchers = 0
        self._state: dict[str, Any] = {}
        self._texts: dict[bool, str] = {}
        self._version = 0
        self._changed = asyncio.Condition()
        self._stirred = asyncio.Event()
        self._refresher: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        await send({"type": "websocket.accept"})
        operator: bool = scope.get("sie.operator", False)
        self._arrive()
        tasks = {
            asyncio.ensure_future(self._until_gone(receive)),
            asyncio.ensure_future(self._send_versions(send, operator)),
        }
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._leave()

    def _arrive(self) -> None:
        self._watchers += 1
        self._look()
        if self._refresher is None:
            self._refresher = asyncio.ensure_future(self._refresh())

    def _leave(self) -> None:
        self._watchers -= 1
        if self._watchers == 0 and self._refresher is not None:
            self._refresher.cancel()
            self._refresher = None

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass  # Watchers have nothing to say; what they send is dropped.

    async def _send_versions(self, send: Send, operator: bool) -> None:
        seen = 0
        while True:
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()
                seen, text = self._version, self._texts[operator]
            await send({"type": "websocket.send", "text": text})
            await asyncio.sleep(MIN_GAP_S)

    async def _refresh(self) -> None:
        """Runs while anybody watches."""
        unsubscribe = self._site.service.subscribe(lambda event: self._stirred.set())
        try:
            announced = self._version
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._stirred.wait()
                self._stirred.clear()
                try:
                    self._look()
                except Exception:  # the next look may go well: watchers must not fall silent for good
                    _log.exception("the status can't be told")
                if self._version != announced:
                    announced = self._version
                    async with self._changed:
                        self._changed.notify_all()
                await asyncio.sleep(MIN_GAP_S)
        finally:
            unsubscribe()

    def _look(self) -> None:
        status = self._site.service.status()
        state = server_status(status, operator=True)
        if state != self._state:
            self._state = state
            self._version += 1
            self._texts = {role: orjson.dumps(_stamped(status, operator=role)).decode() for role in (True, False)}
