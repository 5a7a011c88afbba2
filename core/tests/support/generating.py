"""Scenes of generation: a service over a real registry of fake models, its readers, the clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
from sie_core import (
    GenerateRequest,
    ModelSpec,
)
from sie_core.residency import RegistrySettings
from sie_core.serving import GenerateResult, Service
from sie_core.telemetry import Telemetry
from sie_testing import FakeStreamEngine
from sie_testing.house import MIB, House, close, fake, house

__all__ = ["TIER", "Reader", "Site", "asked", "now", "numbered", "serving", "settled", "talker"]

TIER = RegistrySettings(host_cache_bytes=1024 * MIB)


def talker(name: str = "chat", size: int = MIB, **fields: Any) -> ModelSpec:
    return fake(name, size, adapter="fake-stream", **fields)


def asked(
    prompt: Any = "a b c", kind: Literal["chat", "completion"] = "completion", lora: str | None = None, **body: Any
) -> GenerateRequest:
    said = {"prompt": prompt} if kind == "completion" else {"messages": [{"role": "user", "content": prompt}]}
    return GenerateRequest(kind, {**said, **body}, lora)


@attrs.define(eq=False)
class Reader:
    """A client: keeps what it was sent and when, and takes ``slow`` seconds for each piece."""

    slow: float = 0.0
    at: list[float] = attrs.field(factory=list)
    got: list[bytes] = attrs.field(factory=list)

    async def __call__(self, piece: bytes) -> None:
        self.at.append(now())
        self.got.append(piece)
        if self.slow:
            await asyncio.sleep(self.slow)

    @property
    def pieces(self) -> list[dict[str, Any]]:
        return [json.loads(piece) for piece in self.got]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for piece in self.pieces for choice in piece["choices"])


async def numbered(pieces: AsyncGenerator[bytes | list[bytes]]) -> AsyncGenerator[tuple[int, bytes | list[bytes]]]:
    place = 0
    async for piece in pieces:
        yield place, piece
        place += 1


@attrs.define(eq=False)
class Site:
    house: House
    service: Service
    telemetry: Telemetry

    def engine(self, model: str = "chat") -> FakeStreamEngine:
        lease = self.house.registry.try_acquire(model)
        assert lease is not None
        with lease:
            assert isinstance(lease.engine, FakeStreamEngine)
            return lease.engine

    def asking(self, *prompts: str, reader: Reader | None = None, **more: Any) -> list[asyncio.Task[GenerateResult]]:
        return [
            asyncio.ensure_future(self.service.stream("chat", asked(prompt), reader or Reader(), **more))
            for prompt in prompts
        ]

    @property
    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.telemetry.model("chat").outcomes.items() if count}


@asynccontextmanager
async def serving(*specs: ModelSpec, settings: RegistrySettings | None = None) -> AsyncIterator[Site]:
    built = house(*(specs or (talker(token_s=1.0),)), **({"settings": settings} if settings else {}))
    telemetry = Telemetry()
    service = Service(built.registry, telemetry=telemetry, side_thread=False)
    await built.registry.start()
    try:
        yield Site(built, service, telemetry)
    finally:
        service.begin_shutdown()
        await close(built)
        service.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def settled(tasks: Sequence[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)
