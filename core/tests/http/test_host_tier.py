"""Parking and waking over HTTP: what clients and operators see of it."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import httpx
import pytest
from sie_core.config import TelemetryConfig
from sie_core.telemetry import Telemetry
from sie_testing import FaultPoints, expected_vector
from website import Served, Start, until

MIB = 1024 * 1024
TIER: dict[str, Any] = {"host_cache_bytes": 64 * MIB}


async def act(s: Served, action: str, model: str = "mini", **body: Any) -> httpx.Response:
    return await s.http.post(f"/v1/admin/models/{model}/{action}", json=body)


async def residency(s: Served, model: str = "mini") -> str:
    return str((await row(s, model))["residency"])


async def row(s: Served, model: str = "mini") -> dict[str, Any]:
    body = (await s.http.get("/v1/status")).json()
    return dict(next(entry for entry in body["models"] if entry["name"] == model))


async def test_a_parked_model_answers_as_if_it_had_never_left(served: Start) -> None:
    async with served(tier=TIER) as s:
        before = (await s.encode()).json()["items"]
        parked = await act(s, "park")
        held = await row(s)
        status = (await s.http.get("/v1/status")).json()
        listed = (await s.http.get("/v1/models/mini")).json()
        after = await s.encode()
        awake = await row(s)
        assert FaultPoints.of("mini").hits("load") == 1
    assert (parked.status_code, parked.json()["residency"]) == (200, "parked")
    assert (held["device_bytes"], held["host_bytes"]) == (0, MIB)
    assert held["park_s"] >= 0
    assert status["host_cache"] == {"budget": 64 * MIB, "used": MIB, "idle": 0}
    assert (listed["state"], listed["residency"], listed["host_bytes"]) == ("available", "parked", MIB)
    assert (after.status_code, after.json()["items"]) == (200, before)
    assert (awake["residency"], awake["device_bytes"], awake["host_bytes"]) == ("resident", MIB, 0)
    assert awake["wake_s"] >= 0


async def test_the_status_says_which_wakes_are_checked(served: Start, fault_points: Any) -> None:
    """A12: what `auto` chose, and what it was chosen from."""
    fault_points("mini").delay("probe", 0.05)
    keys = ("wake_check", "wake_checked", "wake_check_s")
    async with served(tier=TIER) as s:
        before = await row(s)
        await s.encode()
        await act(s, "park")
        await act(s, "wake")
        costly = await row(s)
        told = (await s.http.get("/v1/admin/models/mini/explain")).json()["explanation"]
    assert [before[key] for key in keys] == ["auto", None, None]
    assert [costly[key] for key in keys[:2]] == ["auto", "first"]
    assert costly["wake_check_s"] >= 0.05
    assert costly["wake_s"] >= costly["wake_check_s"]
    assert any(line.startswith("Only its first wake is checked, as wake_check: auto has it") for line in told)


async def test_the_status_says_that_wakes_are_unchecked(served: Start) -> None:
    """A12: an engine without a probe looked as if it were checked."""
    async with served(tier=TIER) as s:
        probing = s.registry.status("mini").spec
        s.registry.apply([attrs.evolve(probing, options=attrs.evolve(probing.options, probes=False))])
        await s.encode()
        shown = await row(s)
        told = (await s.http.get("/v1/admin/models/mini/explain")).json()["explanation"]
    assert (shown["wake_check"], shown["wake_checked"], shown["wake_check_s"]) == ("auto", "never", None)
    assert "Its wakes are unchecked: its engine has no probe." in told


async def test_a_model_that_no_device_could_hold_is_refused_with_the_figures_and_nobody_leaves(served: Start) -> None:
    # Scenario 2.
    async with served(tier=TIER) as s:
        await s.encode("org/mini")
        await act(s, "park", "org/mini")
        await s.encode("mini")
        before = (await s.http.get("/v1/status")).json()
        refused = await s.encode("huge")
        again = await s.encode("huge")
        assert FaultPoints.of("huge").hits("load") == 0
        after = (await s.http.get("/v1/status")).json()
        decisions = (await s.http.get("/v1/admin/decisions")).json()["decisions"]
    for answer in (refused, again):
        assert answer.status_code == 502
        assert "retry-after" not in answer.headers
        assert "needs 1.0 GiB on emulated:0, which has 256.0 MiB in all" in answer.json()["detail"]["message"]
    states = [[(one["name"], one["residency"]) for one in status["models"]] for status in (before, after)]
    assert states[1] == [(name, "failed" if name == "huge" else state) for name, state in states[0]]
    assert after["host_cache"] == before["host_cache"]
    assert [one["model"] for one in decisions] == ["org/mini", "huge", "huge"]


@pytest.mark.parametrize("budget", [900 * 1024, MIB])
async def test_a_budget_for_no_model_and_for_exactly_one(served: Start, budget: int) -> None:
    async with served(tier={"host_cache_bytes": budget}) as s:
        for model in ("mini", "org/mini"):
            await s.encode(model)
        replies = [await act(s, "park", model) for model in ("mini", "org/mini")]
        states = [await residency(s, model) for model in ("mini", "org/mini")]
        answers = [await s.encode(model) for model in ("mini", "org/mini")]
    assert [answer.status_code for answer in answers] == [200, 200]
    if budget < MIB:
        assert [reply.status_code for reply in replies] == [400, 400]
        assert "1.0 MiB are over the budget of 900.0 KiB" in replies[0].text
        assert states == ["resident", "resident"]
    else:
        assert [reply.status_code for reply in replies] == [200, 200]
        assert states == ["unloaded", "parked"]


async def test_requests_before_during_and_after_a_park_are_answered(served: Start) -> None:
    # Scenario 10.
    async with served(tier=TIER) as s:
        await s.embed()
        run, offload, restore = (FaultPoints.of("mini").hold(point) for point in ("run", "offload", "restore"))
        before = asyncio.create_task(s.embed())
        await run.arrival()
        parking = asyncio.create_task(act(s, "park"))
        await until(lambda: s.registry.status("mini").residency == "draining")
        draining = asyncio.create_task(s.embed())
        run.release()
        await offload.arrival()
        during = asyncio.create_task(s.embed())
        offload.release()
        await restore.arrival()
        waking = asyncio.create_task(s.embed())
        restore.release()
        answers = await asyncio.gather(before, draining, during, waking, s.embed())
        assert (await parking).status_code == 200
        assert FaultPoints.of("mini").hits("load") == 1
    assert [answer.status_code for answer in answers] == [200] * 5
    assert len({answer.content for answer in answers}) == 1


async def test_park_twice_wake_twice_and_wake_while_waking_are_no_ops(served: Start) -> None:
    # Scenario 12.
    async with served(tier=TIER) as s:
        await s.embed()
        both = await asyncio.gather(act(s, "park"), act(s, "park"))
        again = await act(s, "park")
        assert [reply.json()["residency"] for reply in (*both, again)] == ["parked"] * 3
        restore = FaultPoints.of("mini").hold("restore")
        first = asyncio.create_task(act(s, "wake"))
        await restore.arrival()
        second = asyncio.create_task(act(s, "wake"))
        restore.release()
        awake = [*await asyncio.gather(first, second), await act(s, "wake")]
        assert (FaultPoints.of("mini").hits("offload"), FaultPoints.of("mini").hits("restore")) == (1, 1)
    assert [reply.json()["residency"] for reply in awake] == ["resident"] * 3


async def test_a_second_park_joins_one_that_waits_for_requests(served: Start) -> None:
    async with served(tier=TIER) as s:
        run = FaultPoints.of("mini").hold("run")
        asked = asyncio.create_task(s.embed())
        await run.arrival()
        parks = [asyncio.create_task(act(s, "park")) for _ in range(2)]
        await until(lambda: s.registry.status("mini").residency == "draining")
        run.release()
        assert [reply.json().get("residency") for reply in await asyncio.gather(*parks)] == ["parked"] * 2
        assert (await asked).status_code == 200


async def test_weights_that_come_back_corrupted_are_noticed_counted_and_loaded_cold(served: Start) -> None:
    # Scenario 13.
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(tier=TIER, telemetry=telemetry) as s:
        before = (await s.encode("corrupt")).json()["items"]
        await act(s, "park", "corrupt")
        after = await s.encode("corrupt")
        decisions = (await s.http.get("/v1/admin/decisions?model=corrupt")).json()["decisions"]
        metrics = (await s.http.get("/metrics")).text
        assert FaultPoints.of("corrupt").hits("load") == 2
    telemetry.shutdown()
    assert (after.status_code, after.json()["items"]) == (200, before)
    assert "does not answer as it did" in next(one["reason"] for one in decisions if one["action"] == "wake failed")
    wakes = 'sie_worker_model_host_cache_wake_duration_seconds_count{model="corrupt",outcome="WakeCheckFailed"}'
    assert f"{wakes} 1.0" in metrics


async def test_a_wake_that_fails_and_loads_cold_is_one_look_up_and_a_miss(served: Start) -> None:
    """A7: it counted one hit and one miss. A wake that succeeds is one hit, a load that succeeds one miss."""
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(tier=TIER, telemetry=telemetry) as s:
        await s.encode("corrupt")
        await act(s, "park", "corrupt")
        await s.encode("corrupt")
        await s.embed()
        FaultPoints.of("mini").fail("restore", RuntimeError("no"), times=1)
        for _ in range(2):
            await act(s, "park")
            await s.embed()
        text = (await s.http.get("/metrics")).text
    telemetry.shutdown()
    lines = (line.rpartition(" ") for line in text.splitlines() if "host_cache_lookups_total{" in line)
    shown = {name.partition("{")[2]: float(value) for name, _, value in lines}
    assert shown == {
        'model="corrupt",result="miss"}': 2,
        'model="mini",result="miss"}': 2,
        'model="mini",result="hit"}': 1,
    }


async def test_metrics_of_the_tier_count_each_thing_once(served: Start) -> None:
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with served(tier=TIER, telemetry=telemetry) as s:
        await s.embed()
        await act(s, "park")
        await s.embed()
        await act(s, "park")
        text = (await s.http.get("/metrics")).text
    telemetry.shutdown()

    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("sie_worker_model_host_cache"))
    shown = {name.removeprefix("sie_worker_model_host_cache_"): float(value) for name, _, value in lines}
    assert shown['memory_bytes{model="mini"}'] == MIB
    assert shown['memory_bytes{model="wide"}'] == 0
    assert shown['lookups_total{model="mini",result="miss"}'] == 1
    assert shown['lookups_total{model="mini",result="hit"}'] == 1
    assert shown['park_duration_seconds_count{model="mini",outcome="ok"}'] == 2
    assert shown['wake_duration_seconds_count{model="mini",outcome="ok"}'] == 1
    assert 'account_promised_bytes{account="emulated:0"} 0.0' in text


async def test_a_request_waits_for_a_wake_as_long_as_it_may_and_is_told_when_to_come_back(served: Start) -> None:
    async with served(tier={**TIER, "wake_wait_s": 0.05}) as s:
        await s.embed()
        await act(s, "park")
        restore = FaultPoints.of("mini").hold("restore")
        late = await s.encode()
        restore.release()
        await until(lambda: s.registry.status("mini").residency == "resident")
        in_time = await s.encode()
    assert (late.status_code, late.json()["detail"]["code"]) == (503, "MODEL_LOADING")
    assert late.headers["retry-after"] == "1"
    assert in_time.status_code == 200


@pytest.mark.parametrize(
    ("model", "status", "code", "says"),
    [("tuples", 400, "INVALID_INPUT", "its tensors sit in tuples"), ("org/mini", 400, "INVALID_INPUT", "is unloaded")],
)
async def test_a_model_that_can_not_be_parked_says_why(
    served: Start, model: str, status: int, code: str, says: str
) -> None:
    async with served(tier=TIER) as s:
        await s.encode("tuples")
        reply = await act(s, "park", model)
    assert (reply.status_code, reply.json()["detail"]["code"]) == (status, code)
    assert says in reply.json()["detail"]["message"]
    assert reply.headers["x-should-retry"] == "false"


async def test_a_park_that_fails_says_that_the_model_was_unloaded(served: Start) -> None:
    async with served(tier=TIER) as s:
        await s.encode()
        FaultPoints.of("mini").fail("offload", RuntimeError("the bus broke"), times=1)
        reply = await act(s, "park")
        assert await residency(s) == "unloaded"
        why = (await s.http.get("/v1/admin/models/mini/explain")).json()
    assert (reply.status_code, reply.json()["detail"]["code"]) == (503, "RESOURCE_EXHAUSTED")
    assert "was unloaded" in reply.json()["detail"]["message"]
    assert "the bus broke" in why["departure"]["why_not_parked"]


async def test_parking_waits_no_longer_than_it_is_told_to(served: Start) -> None:
    async with served(tier=TIER) as s:
        run = FaultPoints.of("mini").hold("run")
        asked = asyncio.create_task(s.embed())
        await run.arrival()
        reply = await act(s, "park", wait_s=0.02)
        run.release()
        assert (await asked).status_code == 200
        await until(lambda: s.registry.status("mini").residency == "parked")
    assert (reply.status_code, reply.json()["detail"]["code"]) == (504, "DEADLINE_EXCEEDED")


async def test_why_a_model_left_can_be_asked(served: Start) -> None:
    async with served(tier=TIER) as s:
        await s.encode("org/mini")
        stays = (await s.http.get("/v1/admin/models/org%2Fmini/explain")).json()
        await act(s, "park", "org/mini")
        left = (await s.http.get("/v1/admin/models/org/mini/explain")).json()
        packed = await s.http.get("/v1/admin/models/org/mini/explain", headers={"accept": "application/msgpack"})
        unknown = await s.http.get("/v1/admin/models/none/such/explain")
    assert (stays["residency"], stays["parks"], stays["departure"]) == ("resident", True, None)
    assert left.keys() == stays.keys() == {
        *("model", "residency", "explanation", "departure", "would_have_kept_it", "parks", "why_not_parked"),
        "decisions",
    }  # fmt: skip
    assert (left["departure"]["how"], left["departure"]["reason"]) == ("parked", "park requested")
    assert left["departure"]["freed_bytes"] == left["departure"]["promised_bytes"] == MIB
    assert left["decisions"][-1]["action"] == "park"
    assert packed.headers["content-type"] == "application/msgpack"
    assert unknown.status_code == 404


async def test_decisions_of_one_model(served: Start) -> None:
    async with served(tier=TIER) as s:
        for model in ("mini", "org/mini"):
            await s.encode(model)
            await act(s, "park", model)
        found = (await s.http.get("/v1/admin/decisions?model=org/mini")).json()["decisions"]
    assert [(one["model"], one["action"]) for one in found] == [("org/mini", "park")]


async def test_the_answers_are_those_of_the_model(served: Start) -> None:
    async with served(tier=TIER) as s:
        await s.encode("wide")
        await act(s, "park", "wide")
        values = (await s.encode("wide")).json()["items"][0]["dense"]["values"]
    assert values == pytest.approx(expected_vector("hello", 384).tolist(), abs=1e-7)


HALVES: dict[str, Any] = {"host_cache_bytes": 1024 * MIB}


async def test_a_request_for_a_victim_is_served_at_every_step_of_its_leaving(served: Start) -> None:
    # Scenario 1: between its choice as a victim and its end on the host, and after.
    async with served(tier=HALVES) as s:
        want = {model: (await s.encode(model)).json()["items"] for model in ("half", "other-half")}
        victim, needer = "half", "other-half"  # the one that is away now wakes, the one that is there has to leave
        for point in ("offload", "restore"):
            await s.encode(needer)
            victim, needer = needer, victim
            at = FaultPoints.of(victim if point == "offload" else needer).hold(point)
            evicting = asyncio.create_task(s.encode(needer))
            await at.arrival()
            late = asyncio.create_task(s.encode(victim))
            await until(lambda: s.registry.status(victim).queued == 1)  # noqa: B023 - awaited in this turn
            at.release()
            answers = await asyncio.gather(evicting, late)
            assert [answer.status_code for answer in answers] == [200, 200]
            assert [answer.json()["items"] for answer in answers] == [want[needer], want[victim]]
            victim, needer = needer, victim
        assert (await s.http.get("/readyz")).status_code == 200
        assert [FaultPoints.of(model).hits("load") for model in want] == [1, 1]


async def test_an_engine_that_dies_in_its_park_is_never_recorded_as_parked(served: Start) -> None:
    # Scenario 11, and 25 where it dies later.
    async with served(tier=TIER) as s:
        want = (await s.encode()).json()["items"]
        engine: Any = s.registry._roster.records["mini"].seat.engine  # type: ignore[union-attr]
        at = FaultPoints.of("mini").hold("offload")
        parking = asyncio.create_task(act(s, "park"))
        await at.arrival()
        engine.die("killed in its park")
        at.release()
        refused = await parking
        assert refused.status_code in (400, 503), refused.text
        assert await residency(s) == "unloaded"
        assert (await row(s))["host_bytes"] == 0
        answer = await s.encode()
        assert (answer.status_code, answer.json()["items"]) == (200, want)

        await act(s, "park")
        parked: Any = s.registry._roster.records["mini"].seat.engine  # type: ignore[union-attr]
        parked.die("killed while parked")
        await until(lambda: s.registry.status("mini").residency == "unloaded")
        assert (await row(s))["host_bytes"] == 0
        answer = await s.encode()
        assert (answer.status_code, answer.json()["items"]) == (200, want)
        assert FaultPoints.of("mini").hits("load") == 3


async def test_an_engine_that_frees_a_third_is_credited_with_a_third_and_not_parked_again(served: Start) -> None:
    # Scenario 14.
    async with served(tier=HALVES) as s:
        await s.encode("third")
        await act(s, "park", "third")
        parked = await row(s, "third")
        assert 20 * MIB <= parked["device_bytes"] <= 21 * MIB
        assert (await s.encode("third")).status_code == 200
        explained = (await s.http.get("/v1/admin/models/third/explain")).json()
        assert not explained["parks"]
        assert "gave back" in explained["why_not_parked"]
        assert (await act(s, "park", "third")).status_code == 400


async def test_a_device_below_every_model_refuses_all_and_moves_nobody(served: Start) -> None:
    async with served(tier={**TIER, "device_bytes": 64 * 1024}) as s:
        answers = [await s.encode(model) for model in ("mini", "org/mini", "half")]
        again = await s.encode("mini")
        status = (await s.http.get("/v1/status")).json()
        for answer in (*answers, again):
            assert answer.status_code == 502
            assert "which has 64.0 KiB in all" in answer.json()["detail"]["message"]
            assert "retry-after" not in answer.headers
        assert status["host_cache"]["used"] == 0
        assert not any(model["device_bytes"] for model in status["models"])
        assert (await s.http.get("/readyz")).status_code == 200
