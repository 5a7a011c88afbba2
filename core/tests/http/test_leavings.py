"""What a request leaves behind: no frame, no traceback, nothing of its own, however it ends.

The server looks for reference cycles rarely, and a cycle through a traceback holds all that the request's frames held:
bodies, images, pixels.
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sie_core import DeviceOutOfMemory, InferenceError, InvalidInput
from sie_testing import FaultPoints
from website import Served, Start, until

Ask = Callable[[Served], Awaitable[Any]]


@pytest.fixture
def collected() -> Iterator[Callable[[], Counter[str]]]:
    """``collected()``: what the collector finds that only cycles keep: frames, tracebacks and objects of SIE's."""
    gc.collect()
    gc.disable()

    def look() -> Counter[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found = Counter(
                type(one).__name__
                for one in gc.garbage
                if isinstance(one, types.FrameType | types.TracebackType) or type(one).__module__.startswith("sie_core")
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.collect()  # or the next look would find them again
        return found

    yield look
    gc.set_debug(0)
    gc.enable()
    gc.collect()


JSON = {"content-type": "application/json"}


def failing(point: str, error: Exception, ask: Ask, model: str = "mini", after: int = 0) -> Ask:
    """What is asked while the fake engine fails: after an answer or two, so that it is there."""

    async def run(s: Served) -> Any:
        FaultPoints.of(model).reset()
        FaultPoints.of(model).fail(point, error, after=after)
        return await ask(s)

    return run


async def unloaded(s: Served) -> Any:
    """The engine is taken from a request that runs."""
    latch = FaultPoints.of("mini").hold("run", times=1)
    asking = asyncio.create_task(s.embed())
    await latch.arrival()
    leaving = asyncio.create_task(s.service.unload("mini", force=True))
    await until(lambda: s.registry.status("mini").leases == 0)
    latch.release()
    await leaving
    answer = await asking
    await s.service.load("mini")
    return answer


async def late(s: Served) -> Any:
    """Answered late enough for its client to be watched meanwhile."""
    FaultPoints.of("mini").delay("run", 0.1, times=1)
    return await s.embed()


def post(path: str, **body: Any) -> Ask:
    return lambda s: s.http.post(f"/v1/{path}", json=body)


LORA = "admin/models/adaptable/loras/x"
TALK = post("completions", model="chat", prompt="a")
STREAM = post("completions", model="chat", prompt="a b c d", stream=True)


WAYS: dict[str, tuple[int, Ask]] = {
    "answered": (200, lambda s: s.embed()),
    "answered late": (200, late),
    "answered, native": (200, lambda s: s.encode()),
    "scored by comparing": (200, post("score/late", query="a", items=[{"text": "b"}])),
    "no JSON": (400, lambda s: s.http.post("/v1/embeddings", content=b"{", headers=JSON)),
    "unknown model": (404, lambda s: s.embed(model="nope")),
    "unknown path": (404, lambda s: s.http.get("/nope")),
    "wrong kind": (400, lambda s: s.embed(input=7)),
    "no image": (400, lambda s: s.encode("looker", items=[{"images": ["x"]}])),
    "too long": (400, lambda s: s.embed(input="word " * 1000)),
    "too long, of many": (400, lambda s: s.embed(input=["fine"] * 300 + ["word " * 1000])),
    "unsupported": (400, lambda s: s.encode("mini", params={"output_types": ["sparse"]})),
    "not finite": (500, lambda s: s.embed(model="nan", input="bad")),
    "prepared badly": (500, failing("prepare", RuntimeError("torn"), lambda s: s.embed())),
    "prepared in vain": (400, failing("prepare", InvalidInput("torn", index=0), lambda s: s.embed())),
    "run badly": (500, failing("run", RuntimeError("torn"), lambda s: s.embed())),
    "out of memory": (503, failing("run", DeviceOutOfMemory("full"), lambda s: s.embed(input=["a", "b"]))),
    "compared badly": (400, post("score/late", query="word " * 100, items=[{"text": "word " * 100}] * 3)),
    "not loaded": (502, post("embeddings", model="gone", input="a")),
    "never fits": (502, post("embeddings", model="huge", input="a")),
    "loaded badly": (502, failing("load", RuntimeError("torn"), post("admin/models/org/mini/load"), "org/mini")),
    "no such LoRA": (400, lambda s: s.encode("adaptable", params={"lora": "none"})),
    "LoRA": (502, failing("lora_load", RuntimeError("torn"), post(LORA, source="path:/x"), "adaptable")),
    "not parked": (501, post("admin/models/mini/park")),
    "generated": (200, post("completions", model="chat", prompt="a b", max_tokens=2)),
    "streamed": (200, post("completions", model="chat", prompt="a b", max_tokens=2, stream=True)),
    "streamed badly": (
        200,
        failing("piece", InferenceError("torn"), STREAM, "chat", after=2),
    ),
    "generated badly": (500, failing("piece", InferenceError("torn"), TALK, "chat")),
    "engine taken away": (503, unloaded),
}


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_of_a_request_stays_for_the_garbage_collector(served: Start, collected: Any, way: str) -> None:
    """F2: frames and tracebacks go with the answer, whatever it is; so do the exchange and what it held."""
    status, ask = WAYS[way]
    async with served() as s:
        await ask(s)
        collected()
        answers = [await ask(s) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [status] * 3, answers[-1].text
        assert not collected()


async def test_nothing_stays_of_a_client_that_left(listening: Start, collected: Any) -> None:
    """F2: the same over sockets, for a client that leaves while the engine runs."""
    async with listening() as s:
        for count in range(3):
            latch = FaultPoints.of("mini").hold("run", times=1)
            asking = asyncio.create_task(s.embed())
            await latch.arrival()
            await until(lambda: s.registry.status("mini").leases == 1)
            asking.cancel()
            await asyncio.wait([asking])
            await until(lambda: s.registry.status("mini").leases == 0)
            latch.release()
            if not count:
                collected()
        assert not collected()
