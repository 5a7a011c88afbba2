"""Many streams, and everything that can happen to them at once: nobody is left behind, nothing is left over."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import GenerateRequest, Item, SieError
from sie_core.residency import RegistrySettings
from sie_core.serving import GenerateResult, Service
from sie_core.telemetry import Telemetry
from sie_testing import FakeStreamEngine, FaultPoints
from sie_testing.house import MIB, House, close, fake, house

MODELS = ("a", "b", "c")
SETTINGS = RegistrySettings(host_cache_bytes=1024 * MIB)


class Client:
    """Asks for one answer, reads it at its own pace, and may leave before the end."""

    def __init__(self, dice: random.Random, service: Service) -> None:
        self.dice = dice
        self.service = service
        self.model = dice.choice(MODELS)
        self.words = [f"w{number}" for number in range(dice.randint(1, 12))]
        self.got: list[str] = []

    async def emit(self, piece: bytes) -> None:
        self.got += [choice["text"] for choice in json.loads(piece)["choices"]]
        if self.dice.random() < 0.1:
            await asyncio.sleep(self.dice.random() * 3)

    async def ask(self) -> None:
        await asyncio.sleep(self.dice.random() * 60)
        request = GenerateRequest("completion", {"prompt": " ".join(self.words)})
        within = self.dice.choice([None, 1.0, 5.0])
        kind = self.dice.random()
        if kind < 0.1:
            await self.service.encode(self.model, [Item(text="hello")], deadline_s=within)
        elif kind < 0.3:
            result = await self.service.generate(self.model, request, deadline_s=within)
            self.got = [choice["text"] for choice in result.answer["choices"]]
        else:
            result = await self.service.stream(self.model, request, self.emit, deadline_s=within)
            assert isinstance(result, GenerateResult)
        if kind >= 0.1:
            assert "".join(self.got) == " ".join(reversed(self.words))


async def trouble(dice: random.Random, built: House, service: Service) -> None:
    """Engines die, are unloaded by force, parked and faulty."""
    for _ in range(25):
        await asyncio.sleep(dice.random() * 4)
        model = dice.choice(MODELS)
        what = dice.choice(("die", "unload", "force", "park", "fault"))
        try:
            if what == "fault":
                FaultPoints.of(model).fail(dice.choice(("run", "piece")), ValueError("odd"), times=1)
            elif what == "die":
                with built.registry.try_acquire(model) or await built.registry.acquire(model, wait_s=1.0) as lease:
                    engine: Any = lease.engine
                engine.die()
            elif what == "park":
                await service.park(model, wait_s=1.0)
            else:
                await service.unload(model, force=what == "force", wait_s=1.0)
        except SieError:
            continue


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_request_ends_and_nothing_is_left_over(
    virtual_run: Callable[..., Any], fault_points: Callable[[str], FaultPoints], seed: int
) -> None:
    engines: list[FakeStreamEngine] = []

    async def scene() -> None:
        dice = random.Random(seed)
        specs = [
            fake(name, 87 * MIB, adapter="fake-stream", load_s=0.5, token_s=0.3, run_s=0.3, queue=6, max_running=limit)
            for name, limit in zip(MODELS, (1, 3, None), strict=True)
        ]
        built = house(*specs, settings=SETTINGS)
        telemetry = Telemetry()
        service = Service(built.registry, telemetry=telemetry, side_thread=False)
        built.registry.subscribe(lambda event: engines.extend(_engines(built)))
        await built.registry.start()
        clients = [asyncio.ensure_future(Client(dice, service).ask()) for _ in range(150)]
        for client in clients:
            if dice.random() < 0.25:
                asyncio.get_running_loop().call_later(dice.random() * 70, client.cancel)
        _, *results = await asyncio.gather(trouble(dice, built, service), *clients, return_exceptions=True)
        bad = [one for one in results if not isinstance(one, SieError | asyncio.CancelledError | None)]
        assert not bad
        assert sum(one is None for one in results) > 15
        assert await service.drain(0.0) == 0
        assert all(service.model(name).leases == service.model(name).queued == 0 for name in MODELS)
        assert all(lane.waiting == 0 for lane in service._front._lanes.values())
        assert all(engine.running == 0 for engine in engines)
        ended = sum(sum(telemetry.model(name).outcomes.values()) for name in MODELS)
        assert ended <= len(clients)
        await close(built)
        service.close()

    virtual_run(scene(), seed)
    assert engines


def _engines(built: House) -> list[FakeStreamEngine]:
    seats = [record.seat for record in built.registry._roster.records.values()]
    return [seat.engine for seat in seats if seat is not None and isinstance(seat.engine, FakeStreamEngine)]
