"""Why a model was evicted: what is told from status and decisions."""

from __future__ import annotations

import attrs
import pytest
from sie_core import Cause, Decision, ModelSpec, Residency
from sie_core.memory.ledger import AccountState
from sie_core.residency import HostTierStatus, ModelStatus
from sie_core.serving.explain import Explanation, Facts, explain

MIB = 1024 * 1024
NOTHING = "as far back as decisions are kept"


def status(residency: Residency = Residency.UNLOADED, **fields: object) -> ModelStatus:
    plain = ModelStatus(
        name="a", adapter="fake", residency=residency, devices=("cuda:0",), device_bytes=0, host_bytes=0, pinned=False,
        leases=0, queued=0, epoch=1, failure=None, capabilities=None, load_s=None, park_s=None,
        wake_s=None, progress=None, spec=ModelSpec(name="a", adapter="fake"),
    )  # fmt: skip
    return attrs.evolve(plain, **fields)


def decided(
    action: str, reason: str, model: str = "a", cause: Cause | None = None, **fields: int | tuple[str, ...]
) -> Decision:
    return Decision(at=1000.0, model=model, action=action, reason=reason, cause=cause, **fields)  # type: ignore[arg-type]


ROOM = decided(
    "evict",
    "room for another model",
    "b",
    Cause.ROOM_FOR_ANOTHER,
    needed_bytes=46 * MIB,
    promised_bytes=87 * MIB,
    victims=("a",),
)


def told(
    *decisions: Decision, model: ModelStatus | None = None, budget: int = 1024 * MIB, why_not: str | None = None
) -> Explanation:
    account = AccountState("cuda:0", 128 * MIB, None, 0, 0, 0, 0, 0, 0)
    facts = Facts(
        status=model or status(),
        decisions=decisions,
        host_tier=HostTierStatus(budget=budget, used=0, idle=0),
        accounts={"cuda:0": account},
        why_not_parked=why_not,
    )
    return explain(facts)


def test_a_model_that_made_room_by_parking() -> None:
    gone = decided("park", "room for b", cause=Cause.ROOM_FOR_ANOTHER, promised_bytes=87 * MIB, freed_bytes=87 * MIB)
    found = told(ROOM, gone, model=status(Residency.PARKED, host_bytes=87 * MIB))
    assert found.sentences == (
        "a is parked and charged 87.0 MiB of host memory.",
        "It was parked to make room for b, which was 46.0 MiB short.",
        "It freed 87.0 MiB of the 87.0 MiB that were promised to it.",
    )
    assert found.departure is not None
    assert (found.departure.how, found.departure.for_model, found.departure.needed_bytes) == ("parked", "b", 46 * MIB)
    assert found.keep[0].startswith("pin it (`sie pin a`")
    assert found.keep[1].startswith("46.0 MiB more on the device (cuda:0 has 128.0 MiB)")
    assert len(found.keep) == 2


def test_one_that_was_unloaded_rather_than_parked_says_what_stood_in_the_way() -> None:
    no = decided("not parked", "quantized weights")
    found = told(
        ROOM,
        no,
        decided("unload", "room for b", cause=Cause.ROOM_FOR_ANOTHER, promised_bytes=87 * MIB, freed_bytes=30 * MIB),
    )
    assert "It was unloaded rather than parked: quantized weights." in found.sentences
    assert found.sentences[-1].endswith("That is less than it was charged for.")
    assert found.keep[-1] == "to be parked, what stood in the way has to go: quantized weights"
    assert found.why_not_parked == "quantized weights"


def test_without_a_host_tier_one_would_have_helped() -> None:
    found = told(ROOM, decided("unload", "room for b", cause=Cause.ROOM_FOR_ANOTHER), budget=0)
    assert any("memory.host_cache_bytes" in line for line in found.keep)
    assert found.why_not_parked == "there is no host tier (memory.host_cache_bytes)"


def test_host_offload_false_is_named() -> None:
    model = status(spec=ModelSpec(name="a", adapter="fake", host_offload=False))
    no = decided("not parked", "its configuration says host_offload: false")
    found = told(ROOM, no, decided("unload", "room for b", cause=Cause.ROOM_FOR_ANOTHER), model=model)
    assert any(line.startswith("host_offload: true") for line in found.keep)


def test_an_idle_time_out_names_its_length() -> None:
    model = status(Residency.PARKED, spec=ModelSpec(name="a", adapter="fake", idle_evict_s=30.0))
    found = told(decided("park", "idle time-out", cause=Cause.IDLE), model=model)
    assert found.keep == ("a longer idle_evict_s (it is 30 s), or none",)


def test_a_dropped_copy_names_the_budget_that_would_have_held_it() -> None:
    parked = decided("park", "room for b", cause=Cause.ROOM_FOR_ANOTHER, promised_bytes=87 * MIB, freed_bytes=87 * MIB)
    full = decided(
        "drop", "the host tier is full", cause=Cause.TIER_FULL, promised_bytes=87 * MIB, freed_bytes=87 * MIB
    )
    found = told(ROOM, parked, full, budget=200 * MIB)
    assert found.departure is not None
    assert (found.departure.how, found.departure.for_model) == ("dropped", None)
    assert found.keep == ("a memory.host_cache_bytes of 287.0 MiB instead of 200.0 MiB",)


@pytest.mark.parametrize("cause", [Cause.HOST_SHORT, Cause.HOST_WAITS])
def test_a_host_that_ran_short_is_named(cause: Cause) -> None:
    """A13: sentences were compared; the cause is data, and the words may be any."""
    found = told(decided("park", "park requested", cause=Cause.REQUESTED), decided("drop", "any words", cause=cause))
    assert found.keep and "memory.host_floor" in found.keep[0]


def test_other_programs_that_took_the_device() -> None:
    took = decided(
        "evict", "other processes took cuda:0", cause=Cause.MEMORY_PRESSURE, needed_bytes=MIB, promised_bytes=87 * MIB
    )
    found = told(
        took,
        decided("park", "memory pressure from other processes", cause=Cause.MEMORY_PRESSURE),
        model=status(Residency.PARKED),
    )
    assert "It was parked: other processes took cuda:0." in found.sentences
    assert "memory.device_reserve" in found.keep[0]


@pytest.mark.parametrize("reason", ["unload requested", "configuration changed", "the engine died: signal 9"])
def test_what_was_asked_for_needs_no_advice(reason: str) -> None:
    found = told(decided("unload", reason))
    assert f"It was unloaded: {reason}." in found.sentences
    assert found.keep == ()


def test_only_the_last_departure_counts() -> None:
    first = decided("unload", "room for b", cause=Cause.ROOM_FOR_ANOTHER)
    found = told(ROOM, first, decided("unload", "unload requested", cause=Cause.REQUESTED))
    assert found.departure is not None
    assert (found.departure.reason, found.departure.for_model) == ("unload requested", None)


def test_an_eviction_that_was_called_off_is_not_why_it_left() -> None:
    """A13: a model that was let off and left for another cause later was said to have made room."""
    found = told(ROOM, decided("park", "idle time-out", cause=Cause.IDLE))
    assert found.departure is not None
    assert (found.departure.cause, found.departure.for_model) == (Cause.IDLE, None)


def test_a_plan_of_the_models_own_is_not_why_it_left() -> None:
    # "a" evicted "b" when it was loaded; later it left for another reason.
    mine = decided("evict", "room for another model", cause=Cause.ROOM_FOR_ANOTHER, needed_bytes=MIB, victims=("b",))
    found = told(mine, decided("unload", "unload requested", cause=Cause.REQUESTED))
    assert found.departure is not None
    assert (found.departure.reason, found.departure.needed_bytes) == ("unload requested", 0)


def test_a_resident_model_says_what_an_eviction_would_do() -> None:
    there = status(Residency.RESIDENT, device_bytes=87 * MIB, wake_s=0.012)
    parks, unloads = told(model=there), told(model=there, why_not="graphs can't be moved")
    assert parks.sentences[:2] == (
        "a is resident on cuda:0 and charged 87.0 MiB of device memory.",
        "An eviction would park it (the last wake took 0.012 s).",
    )
    assert NOTHING in parks.sentences[2]
    assert (parks.parks, parks.departure, parks.keep) == (True, None, ())
    assert "An eviction would unload it: graphs can't be moved." in unloads.sentences
    assert (unloads.parks, unloads.why_not_parked) == (False, "graphs can't be moved")
    pinned = told(model=attrs.evolve(there, pinned=True))
    assert pinned.sentences[1].startswith("It is pinned")


def test_decisions_about_others_are_left_out_and_the_newest_kept() -> None:
    noise = [decided("unload", "unload requested", "c") for _ in range(20)]
    found = told(*noise, *[decided("refused", f"no room {number}") for number in range(20)])
    assert [one.reason for one in found.decisions] == [f"no room {number}" for number in range(10, 20)]
