"""The figures of ``docs/sglang-memory.md`` are what the code comes to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from sie_adapters_sglang._costs import Graphs, default_costs
from sie_adapters_sglang._hicache import HOST_RESERVE, HostPool, PoolTerms, PoolWish, size_pool
from sie_adapters_sglang._sizing import Demand, Launch, promise, reserve, size_launch
from sie_core import DeviceGrant, DeviceView, format_bytes, parse_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sglang-memory.md"
MIB, GIB = 2**20, 2**30
VERSION = (0, 5, 23)

# The worked example: a card of 24 GiB with two encoders, and a model of 3B parameters in half precision.
CARD = 24 * GIB
HELD, PROMISED, RESERVE = 3584 * MIB, 1024 * MIB, 512 * MIB
RAM, FLOOR, TIER, POOL_GB = 64 * GIB, 2 * GIB, 16 * GIB, 8
COSTS = default_costs(VERSION, CARD, "cuda", graphs=Graphs(chunked_prefill=2048))
CHAT = Demand(name="chat", weights_bytes=6 * GIB, kv_bytes_per_token=28 * 8 * 128 * 2 * 2, headroom_bytes=4 * GIB)


def launch() -> Launch:
    free = CARD - HELD
    view = DeviceView("cuda:0", "cuda", CARD, free, free - PROMISED - RESERVE, PROMISED)
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
        ("`memory.device_reserve`", "r", RESERVE),
        (
            "left for weights and KV cache",
            "free - c - x - h - g - r",
            free - COSTS.context - PROMISED - COSTS.beside - 4 * GIB - RESERVE,
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


RELEASES = (
    ("0.5.10.post1", (0, 5, 10)),
    ("0.5.20", (0, 5, 20)),
    ("0.5.21", (0, 5, 21)),
    ("0.5.22 and later", VERSION),
)


def pool_table() -> str:
    lines = ["| ranks | SGLang | flag | booked, all ranks |", "|---|---|---|---|"]
    for ranks in (1, 2, 4):
        for name, version in RELEASES:
            pool = size_pool(PoolWish(), pool_terms(version, ranks))
            if pool is None:
                lines.append(f"| {ranks} | {name} | no pool: it can't exceed the device's | |")
                continue
            lines.append(f"| {ranks} | {name} | `{' '.join(pool.flags)}` | {format_bytes(pool.booked_bytes)} |")
    return "\n".join(lines)


def host_pool() -> HostPool:
    pool = size_pool(PoolWish(size_gb=POOL_GB), pool_terms(VERSION, 1))
    assert pool is not None
    return pool


def host_need() -> int:
    return FLOOR + HOST_RESERVE + host_pool().booked_bytes + TIER


def host_table() -> str:
    pool = host_pool()
    rows = [
        ("`memory.host_floor`", FLOOR),
        ("SGLang's own reserve", HOST_RESERVE),
        ("the HiCache pool, `hicache_size: 8` and a page", pool.booked_bytes),
        ("`memory.host_cache_bytes`: weights of the engine, twice, and of two encoders", TIER),
        ("needed in all", host_need()),
        ("the engine's charge while it is parked: weights and pool", CHAT.weights_bytes + pool.booked_bytes),
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


def test_the_steps_count_as_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    requests, length = 8, 4096
    nbytes = format_bytes(requests * length * CHAT.kv_bytes_per_token)
    told = re.search(r"(\d+) requests of ([\d,]+)\s+tokens are ([\d,]+) tokens, .*? are ([\d.]+ GiB)", page, re.DOTALL)
    assert told
    assert told.groups() == (str(requests), f"{length:,}", f"{requests * length:,}", nbytes)


def test_the_configuration_is_that_of_the_tables(tmp_path: Path) -> None:
    """And what it leaves of the machine is what the text says."""
    page = PAGE.read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    config = yaml.safe_load(text)
    memory, chat = config["memory"], config["models"][0]
    sizes = [memory[name] for name in ("host_cache_bytes", "host_floor", "device_reserve")]
    assert [parse_bytes(size) for size in sizes] == [TIER, FLOOR, RESERVE]
    assert parse_bytes(chat["runtime_headroom"]) == CHAT.headroom_bytes
    assert chat["options"] == {"chunked_prefill_size": 2048, "hicache_size": POOL_GB}
    assert len(config["models"]) == 3
    given = promise(COSTS.context, launch().static_bytes, COSTS.beside, CHAT.headroom_bytes)
    parts = (given, HELD, PROMISED, RESERVE)
    in_gib = [f"{part / GIB:.1f}" for part in parts]
    assert f"{' + '.join(in_gib)} = {CARD / GIB:.1f} GiB" in page
    assert CARD - sum(parts) < 20 * MIB  # what rounding F down leaves
    copies = 2 * CHAT.weights_bytes + HELD
    assert copies <= TIER
    assert f"2 × {CHAT.weights_bytes / GIB:.1f} + {HELD / GIB:.1f} = {copies / GIB:.1f} GiB" in page
    assert f"leaves {(RAM - host_need()) / GIB:.1f} GiB of the {RAM // GIB}" in page
