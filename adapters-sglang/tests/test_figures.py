"""What operators see of an engine's pool on the host: in status, among the metrics, in the host's account."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from sie_adapters_sglang._costs import default_costs
from sie_adapters_sglang._hicache import told_bytes
from sie_core.config import TelemetryConfig
from sie_core.memory.emulated import EmulatedDevice
from sie_core.telemetry import Telemetry

MIB, GIB = 1 << 20, 1 << 30
GB = 10**9
pytestmark = pytest.mark.usefixtures("roomy_host")
SMALL = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}


def devices(count: int) -> list[EmulatedDevice]:
    return [EmulatedDevice(f"emulated:{number}", 128 * MIB) for number in range(count)]


@pytest.mark.parametrize(
    ("version", "ranks", "options", "handed_over"),
    [
        ("0.5.10.post1", 1, {"hicache_size": 2}, {"host_pool_size_gb": 2}),
        ("0.5.20", 1, {"hicache_ratio": 3.0}, {"host_pool_ratio": 3.0}),
        ("0.5.20", 2, {"hicache_size": 2}, {"host_pool_size_gb": 2}),
        ("0.5.23", 2, {"hicache_fraction": 0.25}, {"host_pool_fraction": 0.25}),
    ],
)
async def test_the_pool_in_status_and_in_the_hosts_account(
    home: Any, front: Any, helpers: Any, version: str, ranks: int, options: Any, handed_over: dict[str, float]
) -> None:
    helpers.save_model(home.model_folder, width=2048, rows=4096)
    how = SMALL | ({"host_pool_gb": 5.0} if "hicache_fraction" in options else {})
    model = home.model("sglang-hicache", version=version, how=how, max_total_tokens=4096, tp_size=ranks, **options)
    async with front(model, devices=devices(ranks)) as server:
        assert (await server.row())["figures"] == {}
        answer = await server.chat()
        assert answer.status_code == 200, answer.text
        row = await server.row()
        figures = row["figures"]
        pool = figures["host_pool_bytes"]
        assert figures["ranks"] == ranks
        assert figures.items() >= handed_over.items()
        assert pool == ranks * figures["host_pool_rank_bytes"] > 90 * MIB
        # As it says itself, in GB with two decimals; a page more is booked for each pool.
        assert figures["host_pool_told_bytes"] <= pool + ranks * 5_000_000
        # Booked before it was known what the launch gets, and shrunk to it.
        booked = server.booked()["host"]
        if "hicache_fraction" in options:  # B2: more than was taken: 5.00 GB a rank, as far as two digits tell
            assert booked == ranks * (5 * GB + 5_000_000) < pool
        else:
            assert booked == pool
        assert row["host_bytes"] == booked
        assert row["overrun_bytes"] == 0
        accounts = {one["account"]: one for one in (await server.http.get("/v1/status")).json()["accounts"]}
        assert accounts["host"]["promised"] == booked
        # Parked it is charged its weights too, and keeps its pool.
        assert (await server.act("park")).status_code == 200
        row = await server.row()
        assert row["host_bytes"] == server.booked()["host"] == booked + ranks * 16 * MIB
        assert row["figures"] == figures
        await server.act("unload")
        assert (await server.row())["figures"] == {}
        assert server.booked() == {}


async def test_the_pool_among_the_metrics(home: Any, front: Any, helpers: Any) -> None:
    helpers.save_model(home.model_folder, width=2048, rows=4096)
    model = home.model("sglang-hicache", how=SMALL, max_total_tokens=4096, hicache_size=2)
    telemetry = Telemetry.create(TelemetryConfig(), environ={})
    async with front(model) as server:
        telemetry.watch(server.registry)
        assert (await server.chat()).status_code == 200
        shown = telemetry.render()[0].decode()
        figures = (await server.row())["figures"]
    telemetry.shutdown()
    series = dict(line.rsplit(" ", 1) for line in shown.splitlines() if not line.startswith("#"))
    for name in ("host_pool_bytes", "host_pool_rank_bytes", "host_pool_size_gb", "host_pool_told_bytes"):
        assert float(series[f'sie_worker_model_figure{{figure="{name}",model="tiny"}}']) == figures[name]
    # B11: a pool is no part of the host tier.
    assert float(series['sie_worker_model_host_memory_bytes{model="tiny"}']) == figures["host_pool_bytes"]
    assert float(series['sie_worker_model_host_cache_memory_bytes{model="tiny"}']) == 0
    assert float(series['sie_worker_account_promised_bytes{account="host"}']) == figures["host_pool_bytes"]


async def test_a_pool_that_is_larger_than_was_booked_is_an_overrun(home: Any, front: Any, helpers: Any) -> None:
    helpers.save_model(home.model_folder, width=2048, rows=4096)
    model = home.model("sglang-hicache", how=SMALL | {"host_pool_gb": 3.0}, max_total_tokens=4096, hicache_size=2)
    async with front(model) as server:
        assert (await server.chat()).status_code == 200
        row = await server.row()
        assert row["figures"]["host_pool_told_bytes"] == 3 * GB
        assert row["overrun_bytes"] == pytest.approx(GB, rel=0.01)
        assert row["host_bytes"] == pytest.approx(3 * GB, rel=0.01), "it is charged what it takes"
        assert [one.model for one in server.registry.decisions() if one.action == "overrun"] == ["tiny"]


LOGS = {
    "[2026-01-01 TP0] Allocating 25.00 GB host memory for hierarchical KV cache.": 25 * GB,
    "Allocating KV hierarchical KV host pool: 4096 tokens, 1.50 GB host memory.": 1_500_000_000,
    "TP0] Allocating SWA hierarchical KV host pool: 1 tokens, 0.25 GB host memory, packed MTP KV layers: x\n"
    "TP1] Allocating 0.50 GB host memory for hierarchical Mamba cache (8 state slots, layout=page_first).": 750_000_000,
    "Requesting 3.00 GB but only have 2.00 GB free": None,
    "": None,
}


@pytest.mark.parametrize("log", LOGS, ids=range(len(LOGS)))
def test_what_each_release_says(log: str) -> None:
    assert told_bytes(log) == LOGS[log]


# --- two cards, one host ---------------------------------------------------------------------------------


class Machine:
    """256 GiB of RAM, of which 200 are free."""

    def available(self, *, reclaim: bool = True) -> int:
        return 200 * GIB

    def total(self) -> int:
        return 256 * GIB

    def limit(self) -> int | None:
        return None


async def test_a_pool_is_booked_for_what_is_launched(
    home: Any, front: Any, helpers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: a card of 80 GiB, of which others hold 55, and 2 MiB of weights at 8 KiB a token.

    25 GiB are free. 512 MiB stay free; SGLang's own reserve for such a card, 1 GiB of context and g, goes off; what is
    left is static, and twice its KV cache is the pool. All of it is far below the 130 GiB of a whole card.
    """
    import sie_core

    monkeypatch.setattr(sie_core, "HostMemory", Machine)
    helpers.save_model(home.model_folder, width=2048, rows=512)
    cards = [helpers.Card(80 * GIB, 55 * GIB, f"cuda:{number}") for number in range(2)]
    models = [
        evolve(home.model("sglang-hicache", version="0.5.23"), name=f"chat{number}", device=f"cuda:{number}")
        for number in range(2)
    ]
    async with front(*models, devices=cards, tier=0, host=200 * GIB) as server:
        for model in models:
            answer = await server.chat(model.name)
            assert answer.status_code == 200, answer.text
        for model in models:
            assert await server.residency(model.name) == "resident", "both pools fit the host"
            row = await server.row(model.name)
            # 25 GiB less 1 of context and 13.6 of graphs and activations: 10.4 GiB, of it 2 MiB of weights.
            static = 25 * GIB - default_costs((0, 5, 23), 80 * GIB, "cuda").context
            static -= default_costs((0, 5, 23), 80 * GIB, "cuda").beside
            assert 10 * GIB < static < 10.5 * GIB
            most = 2 * static
            assert 0.99 * most - GB < row["host_bytes"] <= most
            # To two digits of a GB, and a page of 64 tokens, 512 KiB each.
            assert abs(row["host_bytes"] - row["figures"]["host_pool_bytes"]) < 5_000_000 + 32 * MIB
        assert server.booked()["host"] < 42 * GIB
