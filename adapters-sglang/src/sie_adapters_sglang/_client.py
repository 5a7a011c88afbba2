"""The engine as the event loop sees it: a pool of connections a loop; a request that is left is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar
from uuid import uuid4

from sie_core import EngineDied, InferenceError

from sie_adapters_sglang._control import Keys
from sie_adapters_sglang._gate import Gate, Place
from sie_adapters_sglang._http import Answer, Broken, Pool
from sie_adapters_sglang._relay import checked_answer, pieces, raise_for

__all__ = ["EngineClient"]

# Shorter than the time after which the engine closes an idle connection.
_KEEP_S = 2.0
_CONNECT_S = 5.0
_ABORT_S = 5.0
_DEATH_S = 1.0
_CLOSE_S = 2.0
_AGAIN_S = 0.5

T = TypeVar("T")


class EngineClient:
    """``died``: waits up to so many seconds and says why the engine is gone; ``None``: it is not."""

    def __init__(self, url: str, keys: Keys, gate: Gate, died: Callable[[float], str | None]) -> None:
        self._url, self._keys, self._gate, self._died = url, keys, gate, died
        self._lock = threading.Lock()
        self._closed = False
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
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
            status, content = await self._sent(self._whole(path, request), name, place)
            if status != 200:
                raise_for(status, content)
            return checked_answer(content) if rid else json.loads(content)

    async def _whole(self, path: str, request: Mapping[str, Any]) -> tuple[int, bytes]:
        answer = await self._pool().post(path, request, self._keys.api)
        read = False
        try:
            content = await answer.rest()
            read = True
        finally:
            answer.close(read=read)
        return answer.status, content

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[bytes]]:
        """The pieces of a stream, those together that came together. Leaving it early aborts the request.

        Raises as ``ask``.
        """
        name = uuid4().hex
        ended = False
        with self._gate.enter() as place:
            request = {**body, "rid": name, "stream": True}
            answer = await self._sent(self._pool().post(path, request, self._keys.api), name, place)
            read = False
            try:
                if answer.status != 200:
                    ended = True
                    raise_for(answer.status, await answer.rest())
                async with contextlib.aclosing(pieces(answer.read)) as found:
                    async for run in found:
                        yield run
                ended = read = True
            except (Broken, EOFError) as error:
                ended = True
                raise await self._broken(error) from error
            finally:
                answer.close(read=read)
                if not ended:
                    self._run(self._abort(name))

    async def _sent(self, sending: Coroutine[Any, Any, T], name: str | None, place: Place) -> T:
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
        except Broken as error:
            raise await self._broken(error) from error

    async def _abandon(self, task: asyncio.Task[Any], name: str | None, leave: Callable[[], None]) -> None:
        """Abort a request that may still be on its way, until it has ended."""
        try:
            while not task.done():
                if name is not None:
                    await self._abort(name)
                await asyncio.wait({task}, timeout=_AGAIN_S)
            if not task.cancelled() and task.exception() is None:
                result = task.result()
                if isinstance(result, Answer):
                    result.close(read=False)
        finally:
            task.cancel()
            leave()

    def close(self) -> None:
        """From any thread. What still runs fails."""
        with self._lock:
            pools, self._pools, self._closed = self._pools, {}, True
        for loop, pool in pools.items():
            _close_pool(loop, pool)

    def _pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            with self._lock:
                if self._closed:
                    raise EngineDied("the engine was closed")
                host, _, port = self._url.removeprefix("http://").partition(":")
                pool = self._pools[loop] = Pool(host, int(port), keep_s=_KEEP_S, connect_s=_CONNECT_S)
        return pool

    async def _broken(self, error: Exception) -> InferenceError:
        """A connection that broke: the engine is gone, or goes, or has only let go of this request."""
        reason = self._died(0.0) or await asyncio.to_thread(self._died, _DEATH_S)
        if reason is not None:
            return EngineDied(reason)
        return InferenceError(f"the engine broke off: {type(error).__name__} {error}".rstrip())

    async def _abort(self, name: str) -> None:
        """Closing the connection should be enough; that the engine sees it may take it seconds."""
        with contextlib.suppress(Broken, TimeoutError, EngineDied, RuntimeError):
            async with asyncio.timeout(_ABORT_S):
                answer = await self._pool().post("/abort_request", {"rid": name}, self._keys.admin)
                await answer.rest()
                answer.close(read=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """In the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_closing: set[asyncio.Task[None]] = set()


def _close_pool(loop: asyncio.AbstractEventLoop, pool: Pool) -> None:
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
