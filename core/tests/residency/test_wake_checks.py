"""Which wakes are checked, on the virtual clock: what a check costs beside a wake, and what the status says of it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from sie_core import ModelSpec, Residency, ResourceExhausted, WakeCheck
from sie_core.residency import RegistrySettings
from sie_testing import FaultPoints
from sie_testing.house import MIB, House, close, fake, house, play

AUTO, FIRST, ALWAYS, NEVER = WakeCheck.AUTO, WakeCheck.FIRST, WakeCheck.ALWAYS, WakeCheck.NEVER


def tier(setting: WakeCheck = AUTO, *, probe_s: float = 0.0, **fields: Any) -> House:
    """A model "a" whose wake takes a second and whose probe takes ``probe_s``."""
    FaultPoints.of("a").delay("probe", probe_s)
    spec: ModelSpec = fake("a", wake_check=setting, **({"restore_s": 1.0} | fields))
    return house(spec, settings=RegistrySettings(host_cache_bytes=1024 * MIB))


async def use(built: House) -> Any:
    with await built.registry.acquire("a") as lease:
        return lease.engine


async def turns(built: House, count: int) -> Any:
    """Park and wake so often. Returns the engine."""
    engine = await use(built)
    for _ in range(count):
        await built.registry.park("a")
        engine = await use(built)
    return engine


def checks(built: House) -> tuple[WakeCheck | None, float | None]:
    """What the status says: which wakes are checked, and how long the last check took."""
    status = built.registry.status("a")
    return status.wake_checked, status.wake_check_s


def hits(point: str) -> int:
    return FaultPoints.of("a").hits(point)


def test_a_cheap_check_is_made_at_every_wake_and_finds_damage_at_the_fifth() -> None:
    """A12: damage at the fifth wake was served."""

    async def scene() -> None:
        built = tier(probe_s=0.09)
        assert checks(built) == (None, None)
        await use(built)
        assert checks(built) == (None, None)  # nothing to measure yet
        engine = await turns(built, 1)
        assert checks(built) == (ALWAYS, pytest.approx(0.09))
        await turns(built, 3)
        assert (hits("load"), hits("probe")) == (1, 5)
        FaultPoints.of("a").do("alive", engine.damage, times=1)
        assert await turns(built, 1) is not engine
        assert hits("load") == 2
        failed = [one for one in built.registry.decisions() if one.action == "wake failed"]
        assert "does not answer as it did" in failed[0].reason
        assert checks(built) == (None, None)  # another engine: measured anew
        await close(built)

    play(scene)


def test_a_costly_check_is_made_at_the_first_wake_and_damage_at_the_fifth_is_not_found() -> None:
    """A12: what `auto` leaves out where a check costs a tenth of a wake or more, as the host tier's page says."""

    async def scene() -> None:
        built = tier(probe_s=0.11)
        engine = await turns(built, 4)
        assert checks(built) == (FIRST, pytest.approx(0.11))
        assert (hits("load"), hits("probe")) == (1, 2)
        FaultPoints.of("a").do("alive", engine.damage, times=1)
        assert await turns(built, 1) is engine
        assert (hits("load"), hits("probe")) == (1, 2)
        await close(built)

    play(scene)


def test_a_costly_check_finds_damage_at_the_first_wake() -> None:
    """A12: `auto` checks the first wake whatever it costs."""

    async def scene() -> None:
        built = tier(probe_s=5.0)
        engine = await use(built)
        FaultPoints.of("a").do("alive", engine.damage, times=1)
        assert await turns(built, 1) is not engine
        assert hits("load") == 2
        await close(built)

    play(scene)


@pytest.mark.parametrize(("later_s", "chosen"), [(5.0, ALWAYS), (0.0, FIRST)])
def test_one_slow_or_quick_check_later_does_not_change_the_choice(later_s: float, chosen: WakeCheck) -> None:
    """A12: the first measurement decides."""

    async def scene() -> None:
        built = tier(probe_s=0.0 if chosen is ALWAYS else 0.5)
        await turns(built, 1)
        FaultPoints.of("a").delay("probe", later_s)
        await turns(built, 2)
        assert checks(built)[0] is chosen
        await close(built)

    play(scene)


def test_the_wait_for_room_makes_no_check_look_cheap() -> None:
    """A12: a check is compared with the wake, not with what the wake waited for."""

    async def scene() -> None:
        FaultPoints.of("a").delay("probe", 0.5)
        built = house(
            fake("a", wake_check=AUTO, restore_s=1.0),
            fake("b", offload_s=20.0),
            settings=RegistrySettings(host_cache_bytes=1024 * MIB, wake_wait_s=100.0),
        )
        await use(built)
        with await built.registry.acquire("b", wait_s=100.0):
            pass
        await built.registry.wake("a")
        assert checks(built)[0] is FIRST
        await close(built)

    play(scene)


@pytest.mark.parametrize("setting", [FIRST, ALWAYS, NEVER])
def test_the_other_settings_are_what_the_status_says_whatever_a_check_costs(setting: WakeCheck) -> None:
    """A12: `first`, `always` and `never` stand as they did."""

    async def scene() -> None:
        built = tier(setting, probe_s=5.0 if setting is ALWAYS else 0.0)
        await turns(built, 3)
        assert checks(built)[0] is setting
        assert hits("probe") == {FIRST: 2, ALWAYS: 4, NEVER: 0}[setting]
        await close(built)

    play(scene)


@pytest.mark.parametrize("setting", [AUTO, FIRST, ALWAYS])
def test_a_model_without_a_probe_says_that_its_wakes_are_unchecked(setting: WakeCheck) -> None:
    """A12: it looked as if it were checked."""

    async def scene() -> None:
        built = tier(setting, probes=False)
        await use(built)
        assert checks(built) == (NEVER, None)
        await turns(built, 2)
        assert checks(built) == (NEVER, None)
        assert hits("load") == 1
        await close(built)

    play(scene)


@pytest.mark.parametrize("fields", [{"host_offload": False}, {"decline": "it can't be moved"}])
def test_a_model_that_does_not_park_has_no_wakes_to_check(fields: dict[str, Any]) -> None:
    """A12: neither checked nor unchecked."""

    async def scene() -> None:
        built = tier(**fields)
        await use(built)
        assert checks(built) == (None, None)
        assert hits("probe") == 0
        await close(built)

    play(scene)


def test_checks_that_are_switched_on_for_a_running_engine_begin_with_its_next_park() -> None:
    """A12: `never` that became `always` was without effect until the model was loaded again."""

    async def scene() -> None:
        built = tier(NEVER)
        engine = await turns(built, 2)
        changed = attrs.evolve(built.registry.status("a").spec, wake_check=ALWAYS)
        built.registry.apply([changed])
        assert checks(built) == (None, None)
        await built.registry.park("a")
        assert checks(built) == (ALWAYS, None)
        FaultPoints.of("a").do("alive", engine.damage, times=1)
        assert await use(built) is not engine
        await close(built)

    play(scene)


def test_a_probe_that_fails_before_a_park_unloads_the_model() -> None:
    """A12: as any park that fails."""

    async def scene() -> None:
        built = tier(NEVER)
        await use(built)
        changed = attrs.evolve(built.registry.status("a").spec, wake_check=ALWAYS)
        built.registry.apply([changed])
        FaultPoints.of("a").fail("probe", RuntimeError("no answer"), times=1)
        with pytest.raises(ResourceExhausted):
            await built.registry.park("a")
        assert built.state("a") is Residency.UNLOADED
        await close(built)

    play(scene)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_an_engine_that_says_neither_yes_nor_no_is_named_and_loaded_again(answer: Any) -> None:
    """A12: an `alive` that forgot its return passed for dead without a word of why."""

    async def scene() -> None:
        built = tier()
        engine = await use(built)
        engine.alive = lambda: answer
        assert await turns(built, 1) is not engine
        failed = [one for one in built.registry.decisions() if one.action == "wake failed"]
        assert f"returned {type(answer).__name__}: return True or False" in failed[0].reason
        await close(built)

    play(scene)
