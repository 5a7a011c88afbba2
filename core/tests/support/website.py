"""A whole server in the test's own event loop: real service, real registry, fake engines, and two ways in.

``served()`` answers through httpx without a socket; ``listening()`` runs uvicorn, for what only sockets can show.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import attrs
import httpx
from sie_core import ModelSpec
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service
from sie_core.telemetry import Telemetry
from sie_testing import FakeOptions, FakeStreamEngine, FaultPoints
from websockets.asyncio.client import ClientConnection, connect

MIB = 1024 * 1024


@attrs.frozen
class Pretend:
    """A device without bytes: the fake engines only say that they take some."""

    name: str = "emulated:0"
    kind: str = "emulated"
    description: str = "pretend"
    size: int = 256 * MIB

    def total(self) -> int:
        return self.size

    def used(self) -> int | None:
        return None

    def allocate(self, nbytes: int) -> Any:
        raise TypeError("a pretend device has no bytes")


MODELS: dict[str, FakeOptions] = {
    "mini": FakeOptions(matryoshka=(4,), max_length=16),
    "org/mini": FakeOptions(salt="org"),
    "wide": FakeOptions(dims=384),
    "any": FakeOptions(outputs=("dense", "sparse", "multivector")),
    "nan": FakeOptions(non_finite=("bad",)),
    "adaptable": FakeOptions(max_loras=2),
    "gone": FakeOptions(fail_load="ModelSourceNotFound"),
    "flaky": FakeOptions(fail_load="EngineStartError"),
    "huge": FakeOptions(weights_bytes=1024 * MIB),
    "corrupt": FakeOptions(corrupt_restore=True),
    "tuples": FakeOptions(decline="its tensors sit in tuples"),
    "half": FakeOptions(weights_bytes=140 * MIB, offload_s=0.02, restore_s=0.02),
    "other-half": FakeOptions(weights_bytes=140 * MIB, salt="other", offload_s=0.02, restore_s=0.02),
    "greedy": FakeOptions(weights_bytes=4 * MIB, realised=1.5, figures={"pool_bytes": 4096, "share": 0.25}),
    "third": FakeOptions(weights_bytes=30 * MIB, freed=0.33),
    "ranker": FakeOptions(tasks=("score",), max_length=16, non_finite=("bad",), max_loras=1),
    "late": FakeOptions(tasks=("encode", "score"), outputs=("multivector",), compares="multivector", max_length=16),
    "finder": FakeOptions(tasks=("extract",), non_finite=("bad",)),
    "tagger": FakeOptions(tasks=("extract",), labels=("fox", "owl"), inputs=("text", "image")),
    "looker": FakeOptions(inputs=("text", "image"), matryoshka=(4,)),
}

TALKERS: dict[str, FakeOptions] = {
    "chat": FakeOptions(),
    "org/chat": FakeOptions(),
    "slow": FakeOptions(token_s=0.05, max_running=1),
    "embedder": FakeOptions(tasks=("encode",)),
    "talks-only": FakeOptions(tasks=("generate",)),
    "pirates": FakeOptions(max_loras=1),
    "sees": FakeOptions(inputs=("text", "image")),
}
"""Served by the adapter ``fake-stream``."""


@attrs.frozen
class Served:
    """What a test gets."""

    http: httpx.AsyncClient
    service: Service
    registry: Registry
    app: Any
    url: str

    async def embed(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/embeddings", json={"model": "mini", "input": "hello", **body})

    def engine(self, model: str) -> FakeStreamEngine:
        """The engine of a resident talker."""
        lease = self.registry.try_acquire(model)
        assert lease is not None
        with lease:
            assert isinstance(lease.engine, FakeStreamEngine)
            return lease.engine

    async def encode(self, model: str = "mini", **body: Any) -> httpx.Response:
        return await self.http.post(f"/v1/encode/{model}", json={"items": [{"text": "hello"}], **body})


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


Start = Callable[..., AbstractAsyncContextManager[Served]]


def watch(s: Served, key: str | None = None) -> connect:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return connect(s.url.replace("http://", "ws://") + "/ws/status", additional_headers=headers)


async def next_status(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(5):
        status: dict[str, Any] = json.loads(await socket.recv())
    return status


def key_line(role: str, key: str) -> str:
    return f"{role}:{role}-key:{hashlib.sha256(key.encode()).hexdigest()}"


@contextlib.asynccontextmanager
async def running_service(
    queue: int,
    load_wait_s: float,
    plugins: Plugins,
    telemetry: Telemetry,
    device_bytes: int = 256 * MIB,
    **registry_settings: Any,
) -> AsyncIterator[tuple[Service, Registry]]:
    ledger = Ledger()
    ledger.add_account("host", total=1 << 40)
    device = Pretend(size=device_bytes)
    ledger.add_account(device.name, total=device.total())
    settings = RegistrySettings(load_wait_s=load_wait_s, **registry_settings)
    registry = Registry(plugins, ledger, [device], settings, observer=telemetry)
    registry.apply(
        ModelSpec(name, adapter, options=options, queue=queue)
        for adapter, models in (("fake", MODELS), ("fake-stream", TALKERS))
        for name, options in models.items()
    )
    await registry.start()
    service = Service(registry, telemetry=telemetry)
    try:
        yield service, registry
    finally:
        FaultPoints.reset_all()
        await registry.shutdown(5.0)
        service.close()
