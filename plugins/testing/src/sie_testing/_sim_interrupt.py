"""Scenes in which the task of a transition is cancelled at each of its awaits in turn: nothing may be lost by it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
from attrs import define, field
from sie_core import ModelSpec, SieError, Unavailable
from sie_core.residency import RegistrySettings

from sie_testing._sim_rules import BrokenRule, Rules
from sie_testing._sim_world import KIB, SimDeviceFull, SimFault, World, WorldSettings
from sie_testing.fake import FakeOptions
from sie_testing.faults import FaultPoints
from sie_testing.virtual import VirtualClockLoop

__all__ = ["SCENES", "Interrupter", "Scene", "play_scene"]

_WAIT_S = 2000.0
Script = Callable[[World], Awaitable[None]]


@define(eq=False)
class Interrupter:
    """Cancels the transition whose await is number ``at`` of the scene; ``late``: when what it waits for has come."""

    world: World
    at: int | None = None
    late: bool = False
    heard: int = 0
    _due: list[asyncio.Task[Any]] = field(factory=list)

    def hear(self, task: asyncio.Task[Any], awaited: Any) -> None:
        """A transition begins, or awaits something."""
        self.heard += 1
        if self.heard - 1 != self.at:
            return
        self.world.note(f"{task.get_name()} is cancelled")
        if self.late and isinstance(awaited, asyncio.Future):
            awaited.add_done_callback(lambda _: task.cancel())
        else:
            self._due.append(task)

    def strike(self) -> None:
        """Between two steps."""
        while self._due:
            self._due.pop().cancel()


def model(name: str, size: int = 60, **fields: Any) -> ModelSpec:
    """A model of ``size`` KiB whose every call takes time."""
    mine = {one.name for one in attrs.fields(FakeOptions)}
    times = {"load_s": 0.4, "offload_s": 0.2, "restore_s": 0.2, "close_s": 0.1}
    options: dict[str, Any] = {**times, **{key: value for key, value in fields.items() if key in mine}}
    rest = {key: value for key, value in fields.items() if key not in mine}
    fake = FakeOptions(weights_bytes=size * KIB, allocate=True, dims=2, context_bytes=2 * KIB, **options)
    return ModelSpec(name=name, adapter="fake", options=fake, **rest)


@define
class Scene:
    """Models on one or more devices of 100 KiB, and what is done with them."""

    models: tuple[ModelSpec, ...]
    script: Script
    tier: int = 500
    devices: int = 1

    def settings(self) -> WorldSettings:
        names = [f"emulated:{number}" for number in range(self.devices)]
        registry = RegistrySettings(
            host_cache_bytes=self.tier * KIB, close_timeout_s=3.0, offload_timeout_s=3.0, load_timeout_s=10.0
        )
        return WorldSettings(dict.fromkeys(names, 100 * KIB), registry=registry)


async def use(world: World, name: str, seconds: float = 0.1) -> None:
    """A request."""
    with await world.registry.acquire(name) as lease:
        await asyncio.wait({lease.lost}, timeout=seconds)


async def at_once(*doings: Awaitable[Any]) -> None:
    """Side by side; what the product refuses is an answer like any other."""
    for outcome in await asyncio.gather(*doings, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, SieError):
            raise BrokenRule(f"somebody was answered {type(outcome).__name__}: {outcome}")


async def later(seconds: float, doing: Callable[[], Any]) -> None:
    await asyncio.sleep(seconds)
    done = doing()
    if asyncio.iscoroutine(done):
        await done


async def _load(world: World) -> None:
    await at_once(use(world, "a"), use(world, "a"))


async def _failing(world: World) -> None:
    FaultPoints.of("a").fail("load", SimFault("no"), times=1)
    FaultPoints.of("a").fail("memory", SimFault("no"), times=1)
    await _load(world)
    await at_once(world.registry.load("a"))
    await at_once(world.registry.load("a"))


async def _turns(world: World) -> None:
    for name in "abab":
        await at_once(use(world, name), later(0.05, partial(use, world, name)))


async def _hard_turns(world: World) -> None:
    FaultPoints.of("a").fail("restore", SimDeviceFull("full"), times=1)
    FaultPoints.of("b").fail("load", SimDeviceFull("full"), times=1)
    FaultPoints.of("b").fail("offload", SimDeviceFull("full"), times=1)
    await at_once(use(world, "a"), use(world, "c"))
    await at_once(world.registry.park("a"))
    await at_once(use(world, "b"))
    await at_once(use(world, "a"), use(world, "b"))


async def _busy(world: World) -> None:
    await at_once(use(world, "a", 2.0), later(0.6, lambda: use(world, "b")), later(0.7, lambda: use(world, "a")))


async def _operators(world: World) -> None:
    registry = world.registry
    await at_once(registry.load("a"))
    await at_once(registry.park("a"), later(0.1, lambda: registry.park("a")))
    await at_once(registry.wake("a"), later(0.1, lambda: registry.unload("a")))
    await at_once(use(world, "a", 5.0), later(0.6, lambda: registry.unload("a", force=True)))
    await at_once(registry.load("a"), later(0.1, lambda: registry.unload("a")))


def _changed(world: World, name: str) -> None:
    specs = [
        attrs.evolve(record.spec, batch_tokens=record.spec.batch_tokens + 1) if record.name == name else record.spec
        for record in world.records.values()
    ]
    world.registry.apply(specs)


async def _changes(world: World) -> None:
    registry = world.registry
    await at_once(use(world, "a"), later(0.2, lambda: _changed(world, "a")))
    await at_once(registry.park("a"), later(0.1, lambda: _changed(world, "a")))
    await at_once(use(world, "a"))
    await at_once(registry.park("a"))
    await at_once(use(world, "a"), later(0.1, lambda: _changed(world, "a")))


async def _hangs(world: World) -> None:
    for point in ("offload", "restore", "close", "load"):
        await at_once(use(world, "a"))
        latch = FaultPoints.of("a").hold(point, times=1)
        await at_once(world.registry.park("a", wait_s=5.0), use(world, "b"))
        await at_once(use(world, "a"), later(8.0, latch.release))


async def _full_tier(world: World) -> None:
    for name in "abcabc":
        await at_once(use(world, name))


async def _deaths(world: World) -> None:
    def kill() -> None:
        seat = world.records["a"].seat
        if seat is not None:
            world.engine(seat).die("killed")

    await at_once(use(world, "a"))
    await at_once(world.registry.park("a"), later(0.1, kill))
    await at_once(use(world, "a"))
    await at_once(world.registry.park("a"))
    await at_once(use(world, "a"), later(0.1, kill))
    await at_once(use(world, "a"), later(0.3, kill))


SCENES: dict[str, Scene] = {
    "load": Scene((model("a"),), _load),
    "load with an error": Scene((model("a"),), _failing),
    "evict by unloading": Scene((model("a"), model("b")), _turns, tier=0),
    "evict by parking": Scene((model("a"), model("b")), _turns),
    "kept backups": Scene((model("a", backup=True), model("b", backup=True)), _turns),
    "two devices": Scene((model("a", ranks=2), model("b")), _turns, devices=2),
    "out of memory": Scene((model("a", 40), model("b", 50), model("c", 20)), _hard_turns),
    "drain": Scene((model("a"), model("b")), _busy),
    "operators": Scene((model("a"),), _operators),
    "changes": Scene((model("a"),), _changes),
    "hangs": Scene((model("a"), model("b")), _hangs),
    "full tier": Scene((model("a"), model("b", backup=True), model("c")), _full_tier, tier=130),
    "deaths": Scene((model("a"),), _deaths),
}


async def _works(world: World, name: str) -> None:
    """Load and use a model. One whose engine has just died again may say so, once, with when it will be started."""
    for again in (True, False):
        try:
            await asyncio.wait_for(world.registry.load(name), _WAIT_S)
            await asyncio.wait_for(use(world, name, 0.0), _WAIT_S)
            return
        except Unavailable as error:
            if not again:
                raise
            await asyncio.sleep(error.retry_after_s)


async def play_scene(scene: Scene, at: int | None, late: bool) -> tuple[World, Rules, int]:
    """Play it, with the cancellation at that await; then every model must still work, and the shutdown leave nothing.

    Returns how many awaits there were. Raises BrokenRule.
    """
    from sie_testing.simulation import end

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    threads = set(threading.enumerate())
    world = World(scene.settings(), loop, honest=False)
    try:
        rules, blow = Rules(world), Interrupter(world, at, late)

        def between() -> None:
            blow.strike()
            rules.look()

        world.on_await = blow.hear
        loop.between_steps(between)
        world.registry.apply(scene.models)
        await world.registry.start()
        await scene.script(world)
        heard, world.on_await = blow.heard, None
        FaultPoints.reset_all()
        for name in world.registry.names():
            await _works(world, name)
        await world.registry.shutdown(60.0)
        await end(world, rules, [], threads)
    except (SieError, TimeoutError) as error:
        raise BrokenRule(f"a model does not work afterwards: {type(error).__name__}: {error}") from error
    finally:
        world.close()
    return world, rules, heard
