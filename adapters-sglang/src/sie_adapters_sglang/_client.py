"""The engine as the event loop sees it: a pool of connections a loop; a request that is left is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from uuid import uuid4

import httpx
from sie_core import EngineDied, InferenceError

from sie_adapters_sglang._control import Keys
from sie_adapters_sglang._gate import Gate
from sie_adapters_sglang._relay import checked_answer, pieces, raise_for

__all__ = ["EngineClient"]

# Shorter than the time after which the engine closes an idle connection.
_KEEP_S = 2.0
_DEATH_S = 1.0


class EngineClient:
    """``died``: waits up to so many seconds and says why the engine is gone; ``None``: it is not."""

    def __init__(self, url: str, keys: Keys, gate: Gate, died: Callable[[float], str | None]) -> None:
        self._url, self._keys, self._gate, self._died = url, keys, gate, died
        self._lock = threading.Lock()
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    async def ask(self, path: str, body: Mapping[str, Any], *, rid: bool = True) -> Any:
        """One whole answer.

        Raises:
            InvalidInput, ResourceExhausted, InferenceError, EngineDied
        """
        with self._gate.enter():
            name = uuid4().hex
            ended = False
            try:
                answer = await self._pool().post(path, json={**body, "rid": name} if rid else body)
                ended = True
            except httpx.TransportError as error:
                ended = True
                raise await self._broken(error) from error
            finally:
                if not ended:
                    self._abort(name)
            if answer.status_code != 200:
                raise_for(answer.status_code, answer.content)
            return checked_answer(answer.content) if rid else answer.json()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """The pieces of a stream. Leaving it early aborts the request. Raises as ``ask``."""
        with self._gate.enter():
            name = uuid4().hex
            ended = False
            request = {**body, "rid": name, "stream": True}
            try:
                async with self._pool().stream("POST", path, json=request) as answer:
                    if answer.status_code != 200:
                        raise_for(answer.status_code, await answer.aread())
                    async with contextlib.aclosing(pieces(answer.aiter_raw())) as found:
                        async for piece in found:
                            yield piece
                ended = True
            except (httpx.TransportError, EOFError) as error:
                ended = True
                raise await self._broken(error) from error
            finally:
                if not ended:
                    self._abort(name)

    def close(self) -> None:
        """From any thread. What still runs fails."""
        with self._lock:
            pools, self._pools = self._pools, {}
        for loop, pool in pools.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
                loop.call_soon_threadsafe(_close_soon, loop, pool)

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            with self._lock:
                pool = self._pools[loop] = httpx.AsyncClient(
                    base_url=self._url,
                    headers={"Authorization": f"Bearer {self._keys.api}", "Accept-Encoding": "identity"},
                    timeout=httpx.Timeout(None, connect=5.0),
                    limits=httpx.Limits(max_keepalive_connections=64, keepalive_expiry=_KEEP_S),
                    trust_env=False,
                )
        return pool

    async def _broken(self, error: Exception) -> InferenceError:
        """A connection that broke: the engine is gone, or goes, or has only let go of this request."""
        reason = self._died(0.0) or await asyncio.to_thread(self._died, _DEATH_S)
        if reason is not None:
            return EngineDied(reason)
        return InferenceError(f"the engine broke off: {type(error).__name__} {error}".rstrip())

    def _abort(self, name: str) -> None:
        """Closing the connection should be enough; that the engine sees it may take it seconds."""

        async def abort() -> None:
            with contextlib.suppress(httpx.HTTPError):
                headers = {"Authorization": f"Bearer {self._keys.admin}"}
                await self._pool().post("/abort_request", json={"rid": name}, headers=headers, timeout=5.0)

        if self._gate.is_open:
            task = asyncio.get_running_loop().create_task(abort())
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)


_closing: set[asyncio.Task[None]] = set()


def _close_soon(loop: asyncio.AbstractEventLoop, pool: httpx.AsyncClient) -> None:
    task = loop.create_task(pool.aclose())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
