"""What seeds of the simulation have broken, told as scenes: each was a fault of the registry once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sie_core import HostOutOfMemory, Residency, SieError
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints, VirtualClockLoop
from sie_testing.house import MIB, House, close, fake, house, play

seeds = pytest.mark.parametrize("seed", range(6))
PARKED, RESIDENT, UNLOADED = Residency.PARKED, Residency.RESIDENT, Residency.UNLOADED


def tier(**more: Any) -> RegistrySettings:
    return RegistrySettings(host_cache_bytes=1024 * MIB, **more)


async def use(built: House, name: str, seconds: float = 0.0) -> None:
    with await built.registry.acquire(name):
        await asyncio.sleep(seconds)


@seeds
def test_a_batch_that_wants_more_memory_does_not_wait_for_somebody_to_turn_up(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a"), fake("parked", 20 * MIB), fake("small", 20 * MIB), settings=tier())
        await use(built, "parked")
        await built.registry.park("parked")
        loop = asyncio.get_running_loop()
        with await built.registry.acquire("a") as lease:
            began = loop.time()
            assert not await built.registry.make_room(lease, 100 * MIB)
            assert loop.time() == began
            await use(built, "small")  # nor does it hold others back
        await close(built)

    play(scene, seed=seed)


def test_a_batch_that_wants_more_memory_waits_no_longer_than_a_guard_lasts() -> None:
    async def scene() -> None:
        built = house(fake("a", 60 * MIB), fake("busy", 60 * MIB))
        working = await built.registry.acquire("busy")
        built.registry._roster.records["busy"].exempt_until = 1e6  # it has refused to drain
        loop = asyncio.get_running_loop()
        with await built.registry.acquire("a") as lease:
            began = loop.time()
            assert not await built.registry.make_room(lease, 20 * MIB)
            assert loop.time() - began < 3.0
        working.release()
        await close(built)

    play(scene)


@seeds
def test_an_engine_that_goes_while_it_waits_for_more_memory_leaves_nothing_booked(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", 60 * MIB), fake("busy", 60 * MIB))
        working = await built.registry.acquire("busy")
        lease = await built.registry.acquire("a")
        growing = asyncio.create_task(built.registry.make_room(lease, 20 * MIB))
        await built.until(lambda: built.state("busy") is Residency.DRAINING)
        lease.engine.die("killed")  # type: ignore[attr-defined]
        assert not await growing
        await built.until(lambda: built.state("a") is UNLOADED)
        assert built.ledger.holding("a") == {}
        assert built.state("busy") is RESIDENT  # nobody needs its room any more
        for one in (lease, working):
            one.release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_request_whose_growth_is_granted_as_it_is_cancelled_leaves_no_claim(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a", 60 * MIB), fake("busy", 60 * MIB))
        working = await built.registry.acquire("busy")
        lease = await built.registry.acquire("a")
        before = built.ledger.holding("a")
        growing = asyncio.create_task(built.registry.make_room(lease, 20 * MIB))
        await built.until(lambda: built.state("busy") is Residency.DRAINING)

        def cancel_when_granted() -> None:
            if not built.registry._admission.busy:
                growing.cancel()

        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        loop.between_steps(cancel_when_granted)
        working.release()
        await asyncio.wait({growing})
        await asyncio.sleep(1.0)
        assert growing.cancelled()
        assert built.ledger.holding("a") == before
        lease.release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_pinned_model_may_be_asked_for_while_the_server_starts(seed: int) -> None:
    async def scene() -> None:
        specs = [fake(name, 30 * MIB, pinned=True, host_bytes=MIB, host_load_bytes=2 * MIB) for name in "abc"]
        built = house(*specs)
        FaultPoints.of("b").delay("reserve", 1.0)
        starting = asyncio.create_task(built.registry.start())
        await asyncio.gather(*[use(built, name, 0.5) for name in "abc"])
        await starting
        assert set(built.states().values()) == {"resident"}
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_backup_that_will_not_go_stays_charged_and_nobody_is_hurt(seed: int) -> None:
    async def scene() -> None:
        settings = RegistrySettings(host_cache_bytes=90 * MIB, close_timeout_s=2.0)
        specs = [fake(name, 40 * MIB, backup=name != "c") for name in "abc"]
        built = house(*specs, settings=settings, devices={"emulated:0": 500 * MIB})
        for name in "ab":
            await use(built, name)
            await built.registry.park(name)
            await use(built, name)
        FaultPoints.of("a").fail("drop", HostOutOfMemory("no"), times=1)
        latch = FaultPoints.of("b").hold("drop")
        await use(built, "c")
        with pytest.raises(SieError):
            await built.registry.park("c")  # the first of them will not go: no room, and it is unloaded
        assert built.registry.status("a").host_bytes == 40 * MIB
        FaultPoints.of("a").fail("drop", HostOutOfMemory("no"), times=1)
        assert built.state("a") is RESIDENT
        latch.release()
        await close(built)

    play(scene, seed=seed)


@seeds
def test_an_engine_whose_thread_hangs_in_dropping_a_backup_is_quarantined(seed: int) -> None:
    async def scene() -> None:
        settings = RegistrySettings(host_cache_bytes=50 * MIB, close_timeout_s=2.0)
        built = house(
            fake("a", 40 * MIB, backup=True), fake("b", 40 * MIB), settings=settings, devices={"emulated:0": 500 * MIB}
        )
        await use(built, "a")
        await built.registry.park("a")
        await use(built, "a")
        latch = FaultPoints.of("a").hold("drop", times=1)
        await use(built, "b")
        with pytest.raises(SieError):
            await built.registry.park("b")
        await built.until(lambda: built.state("a") is Residency.QUARANTINED)
        latch.release()
        await built.until(lambda: built.state("a") is UNLOADED)
        await use(built, "a")
        await close(built)

    play(scene, seed=seed)


@seeds
def test_idle_copies_are_given_back_when_the_host_has_run_short_meanwhile(seed: int) -> None:
    async def scene() -> None:
        free = [300 * MIB]
        built = house(
            fake("a", 64 * MIB, allocate=False), fake("b", 64 * MIB), settings=tier(), host=300 * MIB,
            host_available=lambda: free[0],
        )  # fmt: skip
        await built.registry.start()
        await use(built, "a")
        await built.registry.park("a")
        built.registry._tier.arena.give_back(built.registry._tier.arena.take(128 * MIB))
        free[0] = 20 * MIB
        await asyncio.sleep(3.0)
        await use(built, "a")
        built.ledger.check()
        assert built.registry._tier.arena.idle == 0
        await close(built)

    play(scene, seed=seed)


@seeds
def test_a_park_that_ends_after_the_shutdown_leaves_no_idle_memory(seed: int) -> None:
    async def scene() -> None:
        built = house(fake("a"), settings=tier())
        await use(built, "a")
        latch = FaultPoints.of("a").hold("offload")
        parking = asyncio.create_task(built.registry.park("a"))
        await latch.arrival()
        await built.registry.shutdown(1.0)
        assert built.ledger.claims()
        built.registry._tier.copies["a"].buffer(10)
        latch.release()
        await parking
        await built.until(lambda: not built.ledger.claims())
        assert built.registry._tier.arena.idle == 0

    play(scene, seed=seed)


@seeds
def test_what_others_do_meanwhile_is_not_taken_for_a_parks_doing(seed: int) -> None:
    """An honest engine parks while another loads; one that lies parks while another goes."""

    async def scene() -> None:
        built = house(
            fake("honest", 40 * MIB, offload_s=1.0),
            fake("liar", 40 * MIB, offload_s=1.0, freed=0.5),
            fake("goes", 40 * MIB, close_s=0.5),
            fake("comes", 40 * MIB, load_s=0.5),
            settings=tier(),
            devices={"emulated:0": 400 * MIB},
        )
        for name in ("honest", "liar", "goes"):
            await use(built, name)
        await asyncio.gather(built.registry.park("honest"), built.registry.load("comes"))
        assert built.ledger.holding("honest").get("emulated:0", 0) == 0
        await asyncio.gather(built.registry.park("liar"), built.registry.unload("goes"))
        assert built.ledger.holding("liar")["emulated:0"] == 20 * MIB
        await use(built, "honest")
        assert built.registry.why_not_parked("honest") is None
        assert built.registry.why_not_parked("liar") is not None
        await close(built)

    play(scene, seed=seed)


@seeds
def test_engines_of_a_pool_that_share_one_of_their_devices_run_in_turn(seed: int) -> None:
    async def scene() -> None:
        devices = {"emulated:0": 100 * MIB, "emulated:1": 100 * MIB}
        built = house(
            fake("wide", 20 * MIB, ranks=2, pool="p"),
            fake("left", 20 * MIB, pool="p", device="emulated:0"),
            fake("right", 20 * MIB, pool="p", device="emulated:1"),
            devices=devices,
        )
        running: dict[str, int] = dict.fromkeys(devices, 0)
        most = 0

        async def run(name: str) -> None:
            nonlocal most
            with await built.registry.acquire(name) as lease:
                for _ in range(5):
                    async with lease.permit:
                        for device in lease.engine.devices:
                            running[device] += 1
                        most = max(most, *running.values())
                        await asyncio.sleep(0.1)
                        for device in lease.engine.devices:
                            running[device] -= 1

        await asyncio.gather(*[run(name) for name in ("wide", "left", "right", "wide")])
        assert most == 1
        await close(built)

    play(scene, seed=seed)


def test_a_loop_that_is_closed_in_the_middle_of_everything_starts_nothing_new() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def scene() -> None:
        built = house(fake("a", load_s=5.0), fake("b", 20 * MIB, offload_s=5.0), settings=tier())
        await use(built, "b")
        tasks.append(asyncio.create_task(built.registry.park("b")))
        tasks.append(asyncio.create_task(built.registry.load("a")))
        await built.until(lambda: built.states() == {"a": "loading", "b": "parking"})

    with asyncio.Runner(loop_factory=lambda: VirtualClockLoop(0)) as runner:
        runner.run(scene())
        loop = runner.get_loop()
        assert isinstance(loop, VirtualClockLoop)
        left = asyncio.all_tasks(loop)
        assert left > set(tasks)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        assert not asyncio.all_tasks(loop)
        assert loop.unhandled == []
