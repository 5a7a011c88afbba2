"""A seeded simulation of the real registry: random runs on a virtual clock, every rule checked all along.

The registry, its ledger and its host tier are the product's own; the engines are fakes, on devices that refuse
what they do not have. The same seed makes the same run, to the last step.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from attrs import field, frozen
from sie_core import SieError

from sie_testing._sim_actors import Actors
from sie_testing._sim_draws import Plot, draw
from sie_testing._sim_interrupt import SCENES, play_scene
from sie_testing._sim_rules import BrokenRule, Rules
from sie_testing._sim_tier import starve
from sie_testing._sim_world import World, models_of
from sie_testing.faults import FaultPoints
from sie_testing.virtual import Deadlock, VirtualClockLoop

__all__ = ["SCENES", "BrokenRule", "Report", "SimulationFailed", "interrupt", "simulate"]

_PATIENCE_S = 3600.0
_T = TypeVar("_T")


@frozen
class Report:
    """What a run did. ``looks``: how often all rules were checked; ``counts``: how often what happened."""

    seed: int
    seconds: float
    """Virtual."""
    looks: int
    counts: dict[str, int]
    digest: str
    """Of everything that happened, in order: equal for equal runs."""
    trace: tuple[str, ...] = field(repr=False)


class SimulationFailed(AssertionError):
    """A rule did not hold, or somebody waited for ever. The message says how to run it again."""


def simulate(seed: int, *, steps: int = 80) -> Report:
    """One run with about ``steps`` requests.

    Raises:
        SimulationFailed: with the last events and the command that repeats the run.
    """
    order = random.Random(seed)
    plot = draw(order)
    told: list[World] = []

    async def scene() -> Report:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        world = World(plot.machine, loop, honest=plot.honest)
        told.append(world)
        try:
            return await _play(world, plot, order, seed, steps)
        finally:
            world.close()

    try:
        return run_checked(scene(), seed)
    except (BrokenRule, Deadlock, TimeoutError) as error:
        tail = "\n".join(told[0].trace[-40:])
        again = f"python -m sie_testing.simulate --from {seed} --seeds 1 --steps {steps}"
        message = f"seed {seed}: {error or type(error).__name__}\n{tail}\nrun it again: {again}"
        raise SimulationFailed(message) from error


def run_checked(scene: Coroutine[Any, Any, _T], seed: int) -> _T:
    """Run a scene on a virtual clock of its own."""
    FaultPoints.reset_all()
    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(seed)) as runner:
        try:
            return runner.run(scene)
        finally:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualClockLoop)
            loop.between_steps(None)


def interrupt(scene: str, *, seed: int = 0) -> int:
    """Play a scene once to count the awaits of its transitions, then once for each with a cancellation there.

    Returns how many cancellations it stood. Raises SimulationFailed.
    """
    _, _, awaits = run_checked(play_scene(SCENES[scene], None, False), seed)
    for at in range(awaits):
        for late in (False, True):
            try:
                run_checked(play_scene(SCENES[scene], at, late), seed)
            except (BrokenRule, Deadlock) as error:
                when = f"scene {scene!r}, seed {seed}, await {at} of {awaits}, {'late' if late else 'at once'}"
                again = f"python -m sie_testing.simulate --scene {scene!r} --from {seed} --seeds 1"
                raise SimulationFailed(f"{when}: {error}\nrun it again: {again}") from error
    return 2 * awaits


async def _play(world: World, plot: Plot, order: random.Random, seed: int, steps: int) -> Report:
    threads = set(threading.enumerate())
    rules, actors = Rules(world), Actors(world, plot, order)
    world.loop.between_steps(rules.look)
    models_of(world, plot.models)
    opening = asyncio.create_task(_open(world))
    if order.random() < 0.8:
        await opening
    cast = [actors.start(actors.operate, order.randrange(12))]
    if plot.faulty:
        cast.append(actors.start(actors.harm, order.randrange(20)))
    cast.append(actors.start(actors.crowd, order.randrange(10)))
    if plot.starved:
        cast.append(actors.start(starve, world, order))
    rush = order.choice([0.05, 0.5, 1.5])
    for _ in range(order.randint(1, steps)):
        await asyncio.sleep(order.random() * rush)
        actors.start(actors.request)
        if order.random() < 0.15:
            order.choice(actors.tasks[len(cast) :]).cancel()
    patient = order.random() < 0.5
    if (patient and plot.hanging) or order.random() < 0.5:
        FaultPoints.reset_all()  # an operator may wait for a call that hangs, and those hang until here
    if patient:
        await _all(actors.tasks)
    await opening
    await world.registry.shutdown(order.choice([0.5, 30.0, 60.0]))
    await end(world, rules, actors.tasks, threads)
    return report(world, rules, seed)


async def _open(world: World) -> None:
    try:
        await world.registry.start()
    except SieError as error:  # pinned models that do not fit together
        world.counts[f"start {error.code}"] += 1


async def _all(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait for everybody. Raises BrokenRule: somebody waits for ever."""
    late = asyncio.get_running_loop().time() + _PATIENCE_S
    while pending := [task for task in tasks if not task.done()]:
        left = late - asyncio.get_running_loop().time()
        if left <= 0:
            raise BrokenRule(f"{len(pending)} requests or operators were never answered: {pending[:3]}")
        await asyncio.wait(pending, timeout=left)


async def end(world: World, rules: Rules, tasks: list[asyncio.Task[Any]], threads: set[threading.Thread]) -> None:
    """After the shutdown: calls that hang return at last, and then nothing may be left."""
    world.note("shut down")
    FaultPoints.reset_all()
    await _all(tasks)
    for _ in range(3):
        await _all(list(world.transitions))
        await asyncio.sleep(10.0)
    rules.nothing_left(threads)


def report(world: World, rules: Rules, seed: int) -> Report:
    """What the run came to."""
    digest = hashlib.sha256("\n".join(world.trace).encode()).hexdigest()[:16]
    return Report(seed, world.loop.time(), rules.looks, dict(world.counts), digest, tuple(world.trace))
