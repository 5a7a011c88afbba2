"""What broke other servers of this kind, on engines that keep SGLang's rules, as clients and operators see it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import types
from typing import Any

import psutil
import pytest
from attrs import define, evolve, field

GIB, MIB = 1 << 30, 1 << 20
SMALL = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}
"""Sizes for an emulated device, which is made of real memory."""
WEIGHTS, ALL = 16 * MIB, 48 * MIB
QUIET = ["/flush_cache", "/v1/loads", "/release_memory_occupation"]
RESUME = "/resume_memory_occupation"
ABORTED = ["/flush_cache", "/abort_request", *QUIET]


@pytest.fixture
def tiny(home: Any, helpers: Any) -> Any:
    """A model whose files say what the stand-in says: 16 MiB of weights, and 4,096 tokens of 8 KiB."""
    helpers.save_model(home.model_folder, width=2048, rows=2048)

    def make(adapter: str = "sglang-generation", *, name: str = "tiny", how: Any = None, **options: Any) -> Any:
        limits = {"max_total_tokens": 4096, "mem_fraction_static": 0.9}
        return evolve(home.model(adapter, how=SMALL | (how or {}), **limits | options), name=name)

    return make


async def embed(server: Any, model: str = "tiny", **body: Any) -> Any:
    return await server.http.post("/v1/embeddings", json={"model": model, "input": "abc", **body})


def calls(helpers: Any, server: Any) -> list[str]:
    """What the engine was asked besides inference, since it was ready."""
    return [path for path in helpers.told(server.engine())["calls"] if path not in INFERENCE]


INFERENCE = ("/server_info", "/generate", "/encode", "/v1/chat/completions", "/v1/embeddings")


async def running(helpers: Any, server: Any, count: int = 1) -> None:
    async with asyncio.timeout(10):
        while helpers.told(server.engine())["running"] < count:
            await asyncio.sleep(0.005)


# --- 7: two that size themselves -----------------------------------------------------------------------


async def test_two_engines_that_start_at_once_are_each_as_large_as_if_alone(tiny: Any, front: Any) -> None:
    """Scenario 7. Each measures what is free: the second does so when the first has gone."""

    def size(server: Any, name: str) -> list[str]:
        words = psutil.Process(server.engine(name).pid).cmdline()
        return [words[words.index(flag) + 1] for flag in ("--mem-fraction-static", "--max-total-tokens")]

    alone, together = {}, {}
    for number, name in enumerate(("one", "two")):
        async with front(tiny(name=name, context_length=300 + number), tier=0) as server:
            assert (await server.chat(name)).status_code == 200
            alone[name] = size(server, name)
    # Other settings: nothing has been measured for them yet.
    both = [tiny(name=name, context_length=400 + number) for number, name in enumerate(("one", "two"))]
    most = 0

    def watch(event: Any) -> None:
        nonlocal most
        states = [str(server.registry.status(name).residency) for name in ("one", "two")]
        most = max(most, states.count("loading"))
        for name in ("one", "two"):
            if str(server.registry.status(name).residency) == "resident":
                together[name] = size(server, name)

    async with front(*both, devices=None, tier=0) as server:
        server.registry.subscribe(watch)
        answers = await asyncio.gather(server.chat("one"), server.chat("two"))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert most == 1
    assert together == alone


# --- 11, 25: parked under load, killed while parked ----------------------------------------------------


@pytest.mark.parametrize("adapter", ["sglang-generation", "sglang-embedding", "sglang-hicache"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_kind_parks_and_wakes_alone_and_as_a_group(
    tiny: Any, front: Any, helpers: Any, roomy_host: None, adapter: str, ranks: int
) -> None:
    """In the order that SGLang survives, one release for the group; what is on the host and on devices is booked."""
    more: dict[str, Any] = {"hicache_ratio": 2.0} if adapter == "sglang-hicache" else {}
    devices = [helpers.emulated(f"emulated:{number}") for number in range(ranks)]
    async with front(tiny(adapter, tp_size=ranks, **more), devices=devices) as server:
        ask = embed if adapter == "sglang-embedding" else lambda server: server.chat()
        first = await ask(server)
        assert first.status_code == 200, first.text
        engine = server.engine()
        pool = server.booked().get("host", 0)
        assert (pool > 0) is (adapter == "sglang-hicache")
        assert [device.used() for device in devices] == [ALL] * ranks
        assert (await server.act("park")).json()["residency"] == "parked"
        assert calls(helpers, server) == QUIET
        assert [device.used() for device in devices] == [0] * ranks
        # A pool outlives the park: the engine is charged for both.
        assert server.booked() == {"host": ranks * WEIGHTS + pool}
        assert (await server.row())["host_bytes"] == ranks * WEIGHTS + pool
        again = await ask(server)
        assert again.status_code == 200
        assert server.engine() is engine
        assert calls(helpers, server) == [*QUIET, RESUME]
        assert [device.used() for device in devices] == [ALL] * ranks
        assert server.booked().get("host", 0) == pool
        assert again.json().get("data") == first.json().get("data")


async def test_a_park_under_load_waits_for_what_runs(tiny: Any, front: Any, helpers: Any) -> None:
    """Scenario 11: the request that runs ends as it would have, and the one that comes meanwhile wakes the engine."""
    async with front(tiny(how={"token_s": 0.01})) as server:
        await server.chat()
        asked = asyncio.create_task(server.chat(max_tokens=60))
        await running(helpers, server)
        parking = asyncio.create_task(server.act("park"))
        assert (await asked).json()["choices"][0]["finish_reason"] == "length"
        assert (await parking).status_code == 200
        assert calls(helpers, server) == QUIET
        assert helpers.told(server.engine())["aborted"] == 0
        assert (await server.chat()).status_code == 200


@pytest.mark.parametrize("step", ["/flush_cache", "/v1/loads", "/release_memory_occupation"])
async def test_an_engine_that_dies_in_its_park_is_never_recorded_as_parked(tiny: Any, front: Any, step: str) -> None:
    """Scenario 11."""
    states = []
    async with front(tiny(how={"dies_in": step})) as server:
        await server.chat()
        server.registry.subscribe(lambda event: states.append(str(server.registry.status("tiny").residency)))
        refused = await server.act("park")
        assert refused.status_code == 503, refused.text
        assert "parked" not in states
        assert await server.residency() == "unloaded"
        assert server.booked() == {}
        assert (await server.chat()).status_code == 200


async def test_a_parked_engine_that_is_killed_loads_cold(tiny: Any, front: Any) -> None:
    """Scenario 25: noticed, its claims released, and nobody has to wait for it."""
    async with front(tiny()) as server:
        await server.chat()
        await server.act("park")
        pid = server.engine().pid
        os.kill(pid, signal.SIGKILL)
        await server.until("unloaded")
        assert server.booked() == {}
        decisions = (await server.http.get("/v1/admin/models/tiny/explain")).json()
        assert "signal 9" in str(decisions)
        answer = await server.chat()
        assert answer.status_code == 200
        assert server.engine().pid != pid


# --- 14, 15: what came free, and what stays ------------------------------------------------------------


@define
class Driver:
    """A CUDA driver's view of one engine: what its processes hold, until a release gives ``frees`` of it back.

    The memory comes back ``late`` looks after the release, as it does on a device.
    """

    frees: float = 1.0
    late: int = 0
    by_process: bool = True
    engine: Any = None
    context: int = GIB
    size: int = 24 * GIB
    name: str = "cuda:0"
    kind: str = "cuda"
    description: str = "pretend"
    looks: int = field(default=0, init=False)

    def total(self) -> int:
        return self.size

    def used(self) -> int:
        if self.engine is None or not self.engine.pid:
            return 0
        return self.held()

    def allocate(self, nbytes: int) -> Any:
        raise TypeError("no emulated device")

    def held(self) -> int:
        pools = 3 * GIB
        if self.engine.parking.parked is False:
            self.looks = 0
            return pools + self.context
        self.looks += 1
        return self.context + (pools if self.looks <= self.late else int(pools * (1 - self.frees)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device of ``Driver``, and a ``pynvml`` that tells of it."""
    made = Driver()

    def processes(handle: int) -> list[Any]:
        if not made.by_process or made.engine is None:
            return []
        return [types.SimpleNamespace(pid=made.engine.pid, usedGpuMemory=made.held())]

    module = types.ModuleType("pynvml")
    told: Any = module
    told.NVMLError = type("NVMLError", (Exception,), {})
    told.nvmlInit = told.nvmlShutdown = lambda: None
    told.nvmlDeviceGetHandleByIndex = lambda number: number
    told.nvmlDeviceGetComputeRunningProcesses = processes
    told.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=made.used())
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return made


async def park_on(driver: Driver, home: Any, front: Any) -> tuple[dict[str, int], Any]:
    """Load on the driver's device, park and wake: the book while it was parked, and what is said of it."""
    model = evolve(home.model(saver="0.0.10"), host_offload=True)
    async with front(model, devices=[driver], tier=8 * GIB) as server:
        assert (await server.chat()).status_code == 200
        driver.engine = server.engine()
        # What it holds is known from here on, as on a machine where the driver tells.
        server.registry._roster.records["tiny"].resident_bytes["cuda:0"] = driver.held()
        assert (await server.act("park")).status_code == 200
        booked = server.booked()
        assert (await server.chat()).status_code == 200
        return booked, (await server.http.get("/v1/admin/models/tiny/explain")).json()


@pytest.mark.parametrize("by_process", [True, False], ids=["told by process", "told as a whole"])
async def test_memory_that_comes_back_late_is_waited_for(
    home: Any, front: Any, driver: Driver, by_process: bool
) -> None:
    """A release may return before the memory is back; credited at once, the engine would pass for a liar."""
    driver.late, driver.by_process = 8, by_process
    booked, explained = await park_on(driver, home, front)
    assert booked["cuda:0"] <= driver.context + 8 * MIB
    assert explained["parks"], explained


async def test_an_engine_that_frees_a_third_is_credited_with_a_third(home: Any, front: Any, driver: Driver) -> None:
    """Scenario 14: it said all, gave a third, and is not parked again."""
    driver.frees = 1 / 3
    booked, explained = await park_on(driver, home, front)
    assert booked["cuda:0"] == driver.context + 2 * GIB
    assert not explained["parks"]
    assert "gave back 1.0 GiB" in explained["why_not_parked"]


@pytest.mark.parametrize(("saver", "kept"), [("0.0.9", WEIGHTS), ("0.0.9.post1", WEIGHTS), ("0.0.10", 0)])
async def test_what_stays_on_the_host_after_a_wake_stands_in_the_book(
    tiny: Any, front: Any, saver: str, kept: int
) -> None:
    """Scenario 15: one release of the memory saver keeps its copy, the next lets it go."""
    async with front(tiny(saver=saver)) as server:
        await server.chat()
        for _ in range(2):
            assert (await server.act("park")).status_code == 200
            assert server.booked() == {"host": WEIGHTS}
            assert (await server.chat()).status_code == 200
            assert (await server.row())["host_bytes"] == kept
            assert server.booked().get("host", 0) == kept


async def test_a_profile_may_opt_out_of_parking(tiny: Any, front: Any) -> None:
    async with front(tiny(park=False)) as server:
        await server.chat()
        refused = await server.act("park")
        assert refused.status_code == 400
        assert "park: false" in refused.text
        assert await server.residency() == "resident"


# --- 26: a control call that fails ---------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 502])
@pytest.mark.parametrize("step", ["/flush_cache", "/abort_request", "/release_memory_occupation"])
async def test_a_park_that_fails_at_any_step_unloads(
    tiny: Any, front: Any, helpers: Any, step: str, status: int
) -> None:
    """Scenario 26: nothing is left half parked. A flush is repeated; a busy one (400) leads to an abort."""
    async with front(tiny(how={"fail_once": {step: status}, "token_s": 0.01})) as server:
        await server.chat()
        before = server.engine()
        busy = None
        if step == "/abort_request":
            before.parking.pace = evolve(before.parking.pace, drain_s=0.05, flush_s=0.05)
            busy = asyncio.create_task(before.generate(helpers.request(5000)))
            await running(helpers, server)
        answer = await server.act("park")
        if step == "/flush_cache":
            assert answer.status_code == 200
            wanted = ["/flush_cache", *QUIET] if status == 502 else ABORTED
            assert [path for path in calls(helpers, server) if path != "/abort_request"] == [
                path for path in wanted if path != "/abort_request"
            ]
            assert (await server.chat()).status_code == 200
            return
        assert answer.status_code == 503, answer.text
        assert await server.residency() == "unloaded"
        assert server.booked() == {}
        assert not psutil.pid_exists(before.pid)
        if busy is not None:
            with pytest.raises(Exception, match="engine"):
                await busy
        assert (await server.chat()).status_code == 200


@pytest.mark.parametrize(
    "how", [{"fail_once": {"/resume_memory_occupation": 502}}, {"dies_in": "/resume_memory_occupation"}]
)
async def test_a_wake_that_fails_loads_cold_and_answers(
    tiny: Any, front: Any, how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(tiny(how=how)) as server:
        await server.chat()
        await server.act("park")
        before = server.engine().pid
        assert (await server.chat()).status_code == 200
        assert server.engine().pid != before
        assert not psutil.pid_exists(before)
        assert set(server.booked()) == {"emulated:0"}
    # And that was the reason: no probe has touched memory that is not there.
    assert f"can't be woken, is loaded again: {RESUME}" in caplog.text


# --- 20: ranks that each pass their own check ----------------------------------------------------------


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.20", "0.5.23"])
async def test_four_ranks_whose_pools_are_together_over_the_host_are_refused_before_any_starts(
    tiny: Any, front: Any, helpers: Any, roomy_host: None, version: str
) -> None:
    """Scenario 20: 40 GB are there, for each of the four."""
    devices = [helpers.emulated(f"emulated:{number}") for number in range(4)]
    model = tiny("sglang-hicache", version=version, tp_size=4, hicache_size=40)
    children = psutil.Process().children()
    async with front(model, devices=devices) as server:
        refused = await server.chat()
        assert refused.status_code == 502, refused.text
        for figure in ("4 ranks", "149.0 GiB", "37.3 GiB each"):
            assert figure in refused.text
        assert server.booked() == {}
        assert psutil.Process().children() == children
    one = tiny("sglang-hicache", version=version, hicache_size=40)
    async with front(one) as server:
        assert (await server.chat()).status_code == 200


# --- 27, 28: health and starts -------------------------------------------------------------------------


async def test_health_that_answers_503_under_load_is_not_taken_for_death(tiny: Any, front: Any, helpers: Any) -> None:
    """Scenario 27."""
    async with front(tiny(how={"unhealthy": True, "token_s": 0.005})) as server:
        await server.chat()
        engine = server.engine()
        answers = await asyncio.gather(*(server.chat(max_tokens=40) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        await server.act("park")
        assert (await server.chat()).status_code == 200
        assert (await server.http.get("/readyz")).status_code == 200
        assert server.engine() is engine
        assert helpers.told(engine)["aborted"] == 0


async def test_a_start_that_stands_still_ends_with_the_logs_last_lines(tiny: Any, front: Any) -> None:
    """Scenario 28: weights reach 100% and nothing happens."""
    how = {"start_s": 3600, "silent": True, "say": "Loading safetensors: 100% 4/4"}
    async with front(tiny(how=how, stall_timeout_s=0.6)) as server:
        failed = await server.chat()
        assert failed.status_code == 502
        assert "said nothing for" in failed.text
        assert "Loading safetensors: 100% 4/4" in failed.text
        assert server.booked() == {}
        again = await server.chat()
        assert again.status_code == 503
        assert int(again.headers["retry-after"]) > 20
        assert "Loading safetensors: 100% 4/4" in (await server.row())["last_error"]["details"]
