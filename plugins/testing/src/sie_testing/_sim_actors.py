"""Who acts in a simulated run: requests, operators, faults, and whoever else uses the machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import attrs
from sie_core import LedgerError, SieError, TransitionError
from sie_core.residency.record import Lease
from sie_core.residency.roster import consume

from sie_testing._sim_draws import Plot, draw_model
from sie_testing._sim_guests import client, long_request
from sie_testing._sim_tier import park_again, snatch_host
from sie_testing._sim_world import KIB, SimDeviceFull, SimFault, SimHostFull, World, injected
from sie_testing.faults import POINTS, FaultPoints
from sie_testing.virtual import pause

__all__ = ["Actors"]

_LATE_S = 0.001
_BUGS = (LedgerError, TransitionError)


class Actors:
    """All of them, on one world."""

    def __init__(self, world: World, plot: Plot, order: random.Random) -> None:
        self._world = world
        self._plot = plot
        self._order = order
        self.tasks: list[asyncio.Task[Any]] = []
        self.ended = False

    def start(self, step: Callable[..., Awaitable[None]], *args: Any) -> asyncio.Task[Any]:
        """Let somebody act."""
        task = self._world.loop.create_task(self._sincerely(partial(step, *args)))
        self.tasks.append(task)
        return task

    async def _sincerely(self, step: Callable[[], Awaitable[None]]) -> None:
        """Errors that the product answers with are outcomes; any other is a problem."""
        counts = self._world.counts
        try:
            await step()
        except SieError as error:
            counts[f"answer {error.code}"] += 1
            if isinstance(error, _BUGS) and not injected(error):
                self._world.problems.append(f"somebody was answered {type(error).__name__}: {error}")
        except Exception as error:
            self._world.problems.append(f"somebody was answered {type(error).__name__}: {error}")

    # --- requests ----------------------------------------------------------------------------------

    def name(self) -> str:
        names = self._world.registry.names()
        return self._order.choice(names) if names and self._order.random() < 0.98 else "nobody"

    async def request(self) -> None:
        """Waits for a lease, within its time; runs a few batches; goes."""
        world, order = self._world, self._order
        if self._plot.long and order.random() < 0.15:
            await long_request(world, order, self.name())
            return
        if self._plot.slow and order.random() < 0.4:
            await client(world, self.name())
            return
        lease = await self._acquire(self.name(), order.choice([None, 0.0, 0.2, 5.0, 30.0]))
        with lease:
            world.counts["leases"] += 1
            if self._order.random() < 0.3:
                await self._with_lora(lease)
                return
            for _ in range(order.choice([0, 1, 1, 3])):
                if lease.lost.done():
                    world.counts["lost"] += 1
                    return
                await self._batch(lease)

    async def _acquire(self, name: str, wait_s: float | None) -> Lease:
        waits = self._world.waits
        one, error = waits.begin(name, wait_s), None
        try:
            return await self._world.registry.acquire(name, wait_s=wait_s)
        except BaseException as failure:
            error = failure
            raise
        finally:
            waits.end(one, error)

    async def _with_lora(self, lease: Lease) -> None:
        """A request that names an adapter: the engine has it as long as the request uses it."""
        world, order, loop = self._world, self._order, self._world.loop
        name, wait_s, began = order.choice(["one", "one", "two", "mine"]), order.choice([0.0, 0.5, 10.0]), loop.time()
        try:
            hold = await world.registry.hold_lora(lease, name, wait_s=wait_s)
        finally:
            if loop.time() - began > wait_s + _LATE_S:
                world.problems.append(f"a request that would wait {wait_s} s for an adapter waited longer")
        with hold:
            world.counts["adapters used"] += 1
            await self._batch(lease)
            engine: Any = lease.engine
            if not lease.lost.done() and name not in engine.loras:
                world.problems.append(f"{lease.model.name} lost its adapter {name!r} while a request used it")

    async def _batch(self, lease: Lease) -> None:
        if not self._plot.activations:
            await asyncio.wait({lease.lost}, timeout=self._order.choice([0.0, 0.05, 0.5, 2.0]))
            return
        # As the batcher does it: a batch that runs is not torn by a request that leaves.
        run = self._world.loop.create_task(self._run(lease))
        self.tasks.append(run)
        await asyncio.wait({run, lease.lost}, return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, lease: Lease) -> None:
        world, order = self._world, self._order
        options = lease.model.options
        wish = lease.model.runtime_headroom
        nbytes = options.headroom_bytes if wish is None else wish
        seconds = order.choice([0.0, 0.05, 0.3])
        devices = [world.devices[name] for name in lease.engine.devices]

        def activate() -> None:
            taken = []
            try:
                for device in devices:
                    if nbytes:
                        taken.append(device.allocate(nbytes))
                pause(seconds)
            finally:
                for buffer in taken:
                    buffer.free()

        async with lease.permit:
            if lease.lost.done() or lease._on_release is None:
                return
            world.counts["batches"] += 1
            run = lease.worker.submit(activate)
            run.add_done_callback(consume)
            await asyncio.wait({run, lease.lost}, return_when=asyncio.FIRST_COMPLETED)
            if not run.done() and lease.worker.current is not run:
                run.cancel()  # queued behind a call that may never return
            else:
                await asyncio.wait({run})

    # --- operators ---------------------------------------------------------------------------------

    async def operate(self, rounds: int) -> None:
        """An operator's round of doings, one after the other."""
        for _ in range(rounds):
            await asyncio.sleep(self._order.random() * 2)
            acts = (
                self._unload, self._load, self._park, self._park, self._pin, self._apply, self._apply_policy,
                self._kill, self._make_room, self._grow, self._lora, self._park_again,
            )  # fmt: skip
            act = self._order.choice(acts)
            await self._sincerely(partial(act, self.name()))

    async def _unload(self, name: str) -> None:
        force = self._order.random() < 0.5
        await self._world.registry.unload(name, force=force, wait_s=self._order.choice([None, 0.0, 40.0]))

    async def _load(self, name: str) -> None:
        await self._world.registry.load(name, wait_s=self._order.choice([0.1, 40.0]))

    async def _park(self, name: str) -> None:
        await self._world.registry.park(name, wait_s=self._order.choice([None, 0.1, 40.0]))

    async def _park_again(self, name: str) -> None:
        await park_again(self._world, self._order, name)

    async def _pin(self, name: str) -> None:
        self._world.pinned.pin(name, self._order.random() < 0.3)

    async def _apply(self, name: str) -> None:
        """Another configuration: a model changes, goes, comes, or comes back."""
        world, order = self._world, self._order
        specs = dict(world.pinned.file)
        act = order.randrange(3)
        if act == 0 and len(specs) > 2:
            specs.pop(name, None)
        elif act == 1 and name in specs:
            specs[name] = attrs.evolve(specs[name], batch_tokens=order.choice([1024, 4096, 8192]))
        else:
            new = f"m{order.randrange(8)}"
            plot = self._plot
            specs[new] = draw_model(new, order, len(world.devices), plot.honest, slow=plot.slow, sizing=plot.sizing)
        world.pinned.apply(specs.values())

    async def _apply_policy(self, name: str) -> None:
        """The file is read again, for an idle time-out of its own or for nothing."""
        specs = dict(self._world.pinned.file)
        if name in specs and self._order.random() < 0.6:
            specs[name] = attrs.evolve(specs[name], idle_evict_s=self._order.choice([None, 0.3]))
        self._world.pinned.apply(specs.values())

    async def _kill(self, name: str) -> None:
        """An engine dies, whatever happens to it at the time."""
        record = self._world.records.get(name)
        if record is not None and record.seat is not None:
            self._world.counts[f"killed {record.state}"] += 1
            self._world.engine(record.seat).die("killed")

    async def _make_room(self, name: str) -> None:
        """A batch ran out of memory."""
        lease = self._world.registry.try_acquire(name)
        if lease is not None:
            with lease:
                got = await self._world.registry.make_room(lease, self._order.choice([1, 5, 40]) * KIB)
                self._world.counts[f"make_room {got}"] += 1

    async def _grow(self, name: str) -> None:
        """An engine asks for more."""
        record = self._world.records.get(name)
        if record is not None and record.devices and record.seat is not None:
            device = self._order.choice(record.devices)
            self._world.registry._lifecycle.grow(record, record.seat.worker, device, 2 * KIB)

    async def _lora(self, name: str) -> None:
        """Load or unload an adapter by hand."""
        registry, order = self._world.registry, self._order
        lora, wait_s = order.choice(["mine", "one"]), order.choice([0.1, 40.0])
        if order.random() < 0.5:
            await registry.load_lora(name, lora, order.choice(["path:/mine", "path:/other"]), wait_s=wait_s)
        else:
            await registry.unload_lora(name, lora, wait_s=wait_s)

    # --- faults and others -------------------------------------------------------------------------

    def _tear(self) -> None:
        """Cancel a transition from outside."""
        running = [task for task in self._world.transitions if not task.done()]
        if running:
            task = self._order.choice(running)
            self._world.counts["torn"] += 1
            self._world.note(f"{task.get_name()} is cancelled")
            task.cancel()

    def _die(self, name: str) -> None:
        record = self._world.records.get(name)
        if record is not None and record.seat is not None:
            self._world.counts[f"killed {record.state}"] += 1
            self._world.engine(record.seat).die("killed in a call")

    async def harm(self, rounds: int) -> None:
        """Sets traps: the next call that reaches one fails, is slow, or hangs."""
        order = self._order
        for _ in range(rounds):
            await asyncio.sleep(order.random() * 3)
            name = f"m{order.randrange(8)}"
            points = FaultPoints.of(name)
            if self._plot.tearing and order.random() < 0.4:
                self._tear()
                continue
            point = order.choice([point for point in POINTS if point not in ("prepare", "run")])
            if self._plot.hanging and order.random() < 0.3:
                self._world.counts["hangs set"] += 1
                if order.random() < 0.5:
                    points.hold(point, times=1)
                else:
                    points.delay(point, order.choice([5.0, 20.0]), times=1)
            else:
                if order.random() < 0.25:
                    points.do(order.choice(["offload", "restore", "probe", "close"]), partial(self._die, name), times=1)
                    continue
                error: Exception = order.choice([SimFault("failed"), SimDeviceFull("full"), SimHostFull("full")])
                if point == "close":
                    error = SimFault("does not close")
                    points.do(point, self._world.leak, times=1)
                points.fail(point, error, times=1)

    async def crowd(self, rounds: int) -> None:
        """Other processes take memory of the devices and of the host, and give it back."""
        order, world = self._order, self._world
        for _ in range(rounds):
            await asyncio.sleep(order.random() * 3)
            if order.random() < 0.5 and not world.honest:
                device = order.choice(list(world.devices.values()))
                room = device.foreign + device.free
                device.foreign = max(0, min(room, order.choice([0, 0, 10, 30, 60]) * KIB))
            elif world.settings.watch_host and order.random() < 0.3:
                snatch_host(world, order)
            elif world.settings.watch_host:
                host = world.settings.host
                world.host_foreign = int(order.choice([0.0, 0.2, 0.5, 0.9, 1.1]) * host)
