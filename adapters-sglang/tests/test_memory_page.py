"""The figures of ``docs/sglang-memory.md`` are what the code comes to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sie_adapters_sglang._costs import Graphs, default_costs
from sie_adapters_sglang._hicache import HOST_RESERVE, PoolTerms, PoolWish, parked_bytes, size_pool
from sie_adapters_sglang._sizing import Demand, Launch, promise, reserve, size_launch
from sie_core import DeviceGrant, DeviceView, ResourceExhausted, format_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sglang-memory.md"
MIB, GIB = 2**20, 2**30
VERSION = (0, 5, 23)

# The worked example: a card of 24 GiB with two encoders, and a model of 3B parameters in half precision.
CARD = 24 * GIB
HELD, PROMISED = 3584 * MIB, 1536 * MIB
COSTS = default_costs(VERSION, CARD, "cuda", graphs=Graphs(chunked_prefill=2048))
CHAT = Demand(name="chat", weights_bytes=6 * GIB, kv_bytes_per_token=28 * 8 * 128 * 2 * 2, headroom_bytes=4 * GIB)


def launch() -> Launch:
    free = CARD - HELD
    view = DeviceView("cuda:0", "cuda", CARD, free, free - PROMISED, PROMISED)
    need = reserve(CHAT, COSTS, [view]).ranks[0]
    spare = view.available - need.context_bytes - need.headroom_bytes
    assert need.min_bytes <= spare
    grant = DeviceGrant(min(need.want_bytes, spare), need.headroom_bytes, free, PROMISED)
    return size_launch(CHAT, COSTS, {"cuda:0": grant})


def device_table() -> str:
    sized = launch()
    free = CARD - HELD
    rows = [
        ("free, as the driver says", "free", free),
        ("promised to the two encoders, and not taken yet", "x", PROMISED),
        ("the process itself", "c", COSTS.context),
        ("graphs, workspaces, activations", "g", COSTS.beside),
        ("`runtime_headroom`", "h", CHAT.headroom_bytes),
        (
            "left for weights and KV cache",
            "free - c - x - h - g",
            free - COSTS.context - PROMISED - COSTS.beside - 4 * GIB,
        ),
        ("what `--mem-fraction-static` comes to", f"{sized.fraction:.3f} × (free - c)", sized.static_bytes),
        ("of it, KV cache", "less 6.0 GiB of weights", sized.static_bytes - CHAT.weights_bytes),
        ("the promise", "c + static + g + h", promise(COSTS.context, sized.static_bytes, COSTS.beside, 4 * GIB)),
    ]
    lines = ["| | | bytes |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {how} | {format_bytes(nbytes)} |" for what, how, nbytes in rows)])


def reserve_table() -> str:
    lines = ["| card | prefill chunk | g |", "|---|---|---|"]
    for gigabytes, chunk in ((16, None), (24, None), (24, 2048), (48, None), (80, None), (80, 2048), (141, None)):
        costs = default_costs(VERSION, gigabytes * GIB, "cuda", graphs=Graphs(chunked_prefill=chunk))
        shown = "the card's own" if chunk is None else f"{chunk:,}"
        lines.append(f"| {gigabytes} GiB | {shown} | {format_bytes(costs.beside)} |")
    return "\n".join(lines)


def pool_terms(version: tuple[int, ...], ranks: int) -> PoolTerms:
    device = launch().static_bytes - CHAT.weights_bytes
    return PoolTerms(
        name="chat",
        version=version,
        ranks=ranks,
        available=56 * GIB,
        total=64 * GIB,
        device_pools=(device * 4,),
        page_bytes=64 * CHAT.kv_bytes_per_token,
    )


def pool_table() -> str:
    lines = ["| ranks | SGLang | flag | booked, all ranks |", "|---|---|---|---|"]
    for ranks in (1, 2, 4):
        for name, version in (("0.5.10.post1", (0, 5, 10)), ("0.5.20", (0, 5, 20)), ("0.5.21 and later", VERSION)):
            try:
                pool = size_pool(PoolWish(), pool_terms(version, ranks))
            except ResourceExhausted as refusal:
                assert "would not exceed" in refusal.message
                lines.append(f"| {ranks} | {name} | refused: not more than the device's pool | |")
                continue
            lines.append(f"| {ranks} | {name} | `{' '.join(pool.flags)}` | {format_bytes(pool.booked_bytes)} |")
    return "\n".join(lines)


def host_table() -> str:
    pool = size_pool(PoolWish(size_gb=8), pool_terms(VERSION, 1))
    tier = 16 * GIB
    rows = [
        ("`memory.host_floor`", 2 * GIB),
        ("SGLang's own reserve", HOST_RESERVE),
        ("the HiCache pool, `hicache_size: 8` and a page", pool.booked_bytes),
        ("`memory.host_cache_bytes`: weights of the engine, twice, and of two encoders", tier),
        ("needed in all", 2 * GIB + HOST_RESERVE + pool.booked_bytes + tier),
        ("the engine's charge while it is parked: weights and pool", parked_bytes(CHAT.weights_bytes, pool)),
    ]
    return "\n".join(["| | bytes |", "|---|---|", *(f"| {what} | {format_bytes(nbytes)} |" for what, nbytes in rows)])


TABLES = {"device": device_table, "reserve": reserve_table, "pool": pool_table, "host": host_table}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_what_the_code_computes(name: str) -> None:
    assert TABLES[name]() in PAGE.read_text(encoding="utf-8"), f"the table should be\n{TABLES[name]()}"


def test_the_text_has_the_same_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sized = launch()
    assert f"`--mem-fraction-static {sized.fraction:.3f}`" in page
    tokens = (sized.static_bytes - CHAT.weights_bytes) // CHAT.kv_bytes_per_token
    assert f"{tokens:,} tokens" in page
    assert f"{CHAT.kv_bytes_per_token // 1024} KiB" in page
    share = 1 - (PROMISED + CHAT.headroom_bytes) / (CARD - HELD)
    over = promise(COSTS.context, int(share * (CARD - HELD - COSTS.context)), COSTS.beside, 4 * GIB) + PROMISED
    assert re.search(rf"{share:.3f}.*{re.escape(format_bytes(over - (CARD - HELD)))}", page, re.DOTALL)
