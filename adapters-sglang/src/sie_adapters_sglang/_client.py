"""The engine as the event loop sees it: a pool of connections a loop; a request that is left is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any
from uuid import uuid4

import httpx
from sie_core import EngineDied, InferenceError

from sie_adapters_sglang._control import Keys
from sie_adapters_sglang._gate import Gate, Place
from sie_adapters_sglang._relay import checked_answer, pieces, raise_for

__all__ = ["EngineClient"]

# Shorter than the time after which the engine closes an idle connection.
_KEEP_S = 2.0
_DEATH_S = 1.0
_CLOSE_S = 2.0
_AGAIN_S = 0.5


class EngineClient:
    """``died``: waits up to so many seconds and says why the engine is gone; ``None``: it is not."""

    def __init__(self, url: str, keys: Keys, gate: Gate, died: Callable[[float], str | None]) -> None:
        self._url, self._keys, self._gate, self._died = url, keys, gate, died
        self._lock = threading.Lock()
        self._closed = False
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, path: str, body: Mapping[str, Any], *, rid: bool = True) -> Any:
        """One whole answer.

        Raises:
            InvalidInput, ResourceExhausted, InferenceError, EngineDied
            ModelLoading: the engine is parked.
        """
        name = uuid4().hex if rid else None
        request = {**body, "rid": name} if rid else body
        with self._gate.enter() as place:
            answer = await self._sent(self._pool().post(path, json=request), name, place)
            if answer.status_code != 200:
                raise_for(answer.status_code, answer.content)
            return checked_answer(answer.content) if rid else answer.json()

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """The pieces of a stream. Leaving it early aborts the request. Raises as ``ask``."""
        name = uuid4().hex
        ended = False
        with self._gate.enter() as place:
            pool = self._pool()
            request = pool.build_request("POST", path, json={**body, "rid": name, "stream": True})
            answer = await self._sent(pool.send(request, stream=True), name, place)
            try:
                if answer.status_code != 200:
                    ended = True
                    raise_for(answer.status_code, await answer.aread())
                async with contextlib.aclosing(pieces(answer.aiter_raw())) as found:
                    async for piece in found:
                        yield piece
                ended = True
            except (httpx.TransportError, EOFError) as error:
                ended = True
                raise await self._broken(error) from error
            finally:
                await answer.aclose()
                if not ended:
                    self._run(self._abort(name))

    async def _sent(
        self, sending: Coroutine[Any, Any, httpx.Response], name: str | None, place: Place
    ) -> httpx.Response:
        """The beginning of an answer.

        Who is cancelled before it is there does not know whether the engine has the request yet. It may come to it at
        any time, and on released memory that is the engine's end: so the place is kept until the engine has answered.
        """
        task = asyncio.get_running_loop().create_task(sending)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._run(self._abandon(task, name, place.keep()))
            raise
        except httpx.TransportError as error:
            raise await self._broken(error) from error

    async def _abandon(self, task: asyncio.Task[httpx.Response], name: str | None, leave: Callable[[], None]) -> None:
        """Abort a request that may still be on its way, until it has ended."""
        try:
            while not task.done():
                if name is not None:
                    await self._abort(name)
                await asyncio.wait({task}, timeout=_AGAIN_S)
            if not task.cancelled() and task.exception() is None:
                await task.result().aclose()
        finally:
            task.cancel()
            leave()

    def close(self) -> None:
        """From any thread. What still runs fails."""
        with self._lock:
            pools, self._pools, self._closed = self._pools, {}, True
        for loop, pool in pools.items():
            _close_pool(loop, pool)

    def _pool(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            with self._lock:
                if self._closed:
                    raise EngineDied("the engine was closed")
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

    async def _abort(self, name: str) -> None:
        """Closing the connection should be enough; that the engine sees it may take it seconds."""
        with contextlib.suppress(httpx.HTTPError, EngineDied, RuntimeError):
            headers = {"Authorization": f"Bearer {self._keys.admin}"}
            await self._pool().post("/abort_request", json={"rid": name}, headers=headers, timeout=5.0)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """In the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_closing: set[asyncio.Task[None]] = set()


def _close_pool(loop: asyncio.AbstractEventLoop, pool: httpx.AsyncClient) -> None:
    """Connections belong to their loop: close them there, and wait for it where that is possible."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        task = loop.create_task(pool.aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)
    elif loop.is_running():
        with contextlib.suppress(TimeoutError, RuntimeError):
            asyncio.run_coroutine_threadsafe(pool.aclose(), loop).result(timeout=_CLOSE_S)
