"""A registry of fake models on pretend devices, on the virtual clock: what every residency test starts from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import attrs
from sie_core import LedgerError, ModelSpec, Residency
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import EngineWorker, Registry, RegistrySettings

from sie_testing import FakeOptions, FaultPoints, VirtualClockLoop, VirtualWorker

MIB = 1024 * 1024


@attrs.define(eq=False)
class PretendDevice:
    """A device whose driver counts what the ledger's claims really hold, plus ``foreign``."""

    name: str
    size: int
    house: House | None = None
    foreign: int = 0
    measured: Callable[[], int] | None = None
    kind: Literal["cuda", "cpu", "emulated"] = "emulated"
    description: str = "pretend"

    def total(self) -> int:
        return self.size

    def used(self) -> int | None:
        if self.measured is not None:
            return self.measured()
        return self.foreign + (self.house.held(self.name) if self.house is not None else 0)

    def allocate(self, nbytes: int) -> Any:
        raise TypeError("a pretend device has no bytes")


@attrs.define(eq=False)
class House:
    """The registry and what it stands on."""

    registry: Registry
    ledger: Ledger
    devices: dict[str, PretendDevice]
    peak: dict[str, int] = attrs.field(factory=dict)
    problems: list[str] = attrs.field(factory=list)
    """What was wrong after a change of residency; ``close`` fails with the first."""

    def held(self, account: str) -> int:
        """What the engines hold there, as they say themselves; one that can't say holds what it asked for."""
        total = 0
        for record in self.registry._roster.records.values():
            if record.seat is not None:
                report: Any = record.seat.engine.memory()
                held = report.devices.get(account, 0)
                total += record.spec.options.weights_bytes if held is None else held
        return total

    def state(self, name: str) -> Residency:
        return self.registry.status(name).residency

    def states(self) -> dict[str, str]:
        return {name: str(self.state(name)) for name in self.registry.names()}

    async def until(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Let virtual time pass until the condition holds."""
        end = asyncio.get_running_loop().time() + seconds
        while not condition():
            if asyncio.get_running_loop().time() > end:
                raise TimeoutError(f"not so within {seconds} virtual seconds: {self.states()}")
            await asyncio.sleep(0.01)


def fake(name: str, size: int = 87 * MIB, **fields: Any) -> ModelSpec:
    """A fake model; fields of FakeOptions and of ModelSpec side by side."""
    mine = {field.name for field in attrs.fields(FakeOptions)}
    options = FakeOptions(weights_bytes=size, **{key: value for key, value in fields.items() if key in mine})
    rest = {key: value for key, value in fields.items() if key not in mine}
    return ModelSpec(name=name, adapter=rest.pop("adapter", "fake"), options=options, **rest)


def house(
    *specs: ModelSpec,
    devices: dict[str, int] | None = None,
    settings: RegistrySettings | None = None,
    host: int = 64 * 1024 * MIB,
    plugins: Plugins | None = None,
    host_available: Callable[[], int] | None = None,
    host_pressure: Callable[[], float | None] | None = None,
    observer: Any = None,
    make_worker: Callable[[str], EngineWorker] = VirtualWorker,
) -> House:
    """Build one. Call it with a running loop."""
    ledger = Ledger()
    ledger.add_account("host", total=host)
    pretend = {name: PretendDevice(name, size) for name, size in (devices or {"emulated:0": 128 * MIB}).items()}
    settings = settings or RegistrySettings()
    for device in pretend.values():
        ledger.add_account(device.name, total=device.size, permits=settings.run_permits)
    registry = Registry(
        plugins or Plugins.load(),
        ledger,
        [*pretend.values()],
        settings,
        make_worker=make_worker,
        host_available=host_available,
        host_pressure=host_pressure,
        observer=observer,
    )
    registry.apply(specs)
    built = House(registry, ledger, pretend)
    for device in pretend.values():
        device.house = built

    def watch(event: Any) -> None:
        try:
            ledger.check()
        except LedgerError as error:
            built.problems.append(f"{event}: {error}")
        for name, device in pretend.items():
            built.peak[name] = max(built.peak.get(name, 0), built.held(name))
            if built.held(name) + device.foreign > device.size:
                built.problems.append(f"{event}: {name} is over")

    registry.subscribe(watch)
    return built


def play(scene: Callable[[], Coroutine[Any, Any, Any]], *, seed: int = 0) -> Any:
    """Run a scene on the virtual clock; nothing may be left unhandled."""
    FaultPoints.reset_all()
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(seed)) as runner:
        result = runner.run(scene())
        loop = runner.get_loop()
        assert isinstance(loop, VirtualClockLoop)
        assert loop.unhandled == []
    return result


async def close(built: House) -> None:
    """Shut down and check that nothing is left."""
    await built.registry.shutdown(60.0)
    built.ledger.check()
    assert not built.problems, built.problems[0]
    assert not built.ledger.claims(), built.ledger.claims()
