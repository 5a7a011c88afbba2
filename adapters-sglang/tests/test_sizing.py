"""From bytes to flags: what an engine is booked for, and what makes it take that and no more."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from sie_adapters_sglang._checkpoint import read_checkpoint
from sie_adapters_sglang._costs import CostCache, Costs, Graphs, Measured, default_costs
from sie_adapters_sglang._sizing import Demand, claim_overrun, promise, reserve, size_launch
from sie_core import DeviceGrant, DeviceOutOfMemory, DeviceView, ModelSourceInvalid, NeverFits, ResourceExhausted

MIB, GIB = 2**20, 2**30
FREE_COSTS = Costs(context=0, graphs=0, activations=0)


def gib(value: float) -> int:
    return int(value * GIB)


def demand(**fields: Any) -> Demand:
    base: dict[str, Any] = {"name": "chat", "weights_bytes": 8 * GIB, "kv_bytes_per_token": 128 * 1024}
    return Demand(**base | fields)


def view(total: float, free: float | None = None, name: str = "cuda:0", **fields: Any) -> DeviceView:
    left = gib(total if free is None else free)
    return DeviceView(name, "cuda", gib(total), left, fields.pop("available", left), **fields)


def grant(free: float, static: float = 1000.0, headroom: float = 0.0, others: float = 0.0) -> DeviceGrant:
    return DeviceGrant(gib(static), gib(headroom), gib(free), gib(others))


# --- F -----------------------------------------------------------------------------------------------


def test_a_headroom_that_a_plain_share_would_not_leave() -> None:
    """22.5 GiB free, 3.6 of them headroom, a context of 0.35, 0.4 of graphs and activations."""
    costs = Costs(context=gib(0.35), graphs=gib(0.2), activations=gib(0.2))
    launch = size_launch(demand(mem_fraction_static=0.85), costs, {"cuda:0": grant(22.5, headroom=3.6)})
    assert launch.flags() == ("--mem-fraction-static", "0.819")

    def peak(fraction: float) -> float:
        return 0.35 + fraction * (22.5 - 0.35) + 0.4 + 3.6

    assert round(peak(0.85), 1) == 23.2, "what the profile asks for runs out of memory"
    assert peak(1 - 3.6 / 22.5) > 22.5, "so does 1 - (x + h) / free"
    assert peak(launch.fraction) <= 22.5


@pytest.mark.parametrize("free", [10.0, 17.3, 22.5, 79.1, 139.7])
@pytest.mark.parametrize("others", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("headroom", [0.0, 1.1])
def test_what_the_engine_takes_leaves_everybody_their_own(free: float, others: float, headroom: float) -> None:
    costs = Costs(context=gib(0.4), graphs=gib(0.3), activations=gib(0.5))
    small = demand(weights_bytes=GIB)
    launch = size_launch(small, costs, {"cuda:0": grant(free, headroom=headroom, others=others)})
    pre = gib(free) - costs.context
    taken = launch.fraction * pre
    peak = promise(costs.context, int(taken), costs.beside, gib(headroom)) + gib(others)
    assert peak <= gib(free)
    assert gib(free) - peak < pre / 1000 + 3, "and no more than the rounding is left over"
    assert launch.static_bytes <= taken + 1


def test_no_more_than_granted_is_taken_of_a_device_that_has_more() -> None:
    launch = size_launch(demand(weights_bytes=GIB), FREE_COSTS, {"cuda:0": grant(40.0, static=10.0)})
    assert launch.fraction == 0.25
    assert launch.static_bytes == 10 * GIB


def test_a_profiles_own_fraction_is_an_upper_bound() -> None:
    small = demand(weights_bytes=GIB)
    assert size_launch(small, FREE_COSTS, {"cuda:0": grant(20.0, others=4.0)}).fraction == 0.8
    for bound, got in ((0.9, 0.8), (0.7, 0.7), (0.29, 0.29), (0.5559, 0.555)):
        launch = size_launch(attrs.evolve(small, mem_fraction_static=bound), FREE_COSTS, {"a": grant(20.0, others=4.0)})
        assert launch.fraction == got


def test_several_ranks_share_one_fraction_that_suits_the_tightest() -> None:
    costs = Costs(context=GIB, graphs=gib(0.5), activations=gib(0.5))
    grants = {"cuda:0": grant(21.0, headroom=2.0), "cuda:1": grant(23.0, headroom=2.0, others=4.0)}
    launch = size_launch(demand(weights_bytes=GIB, ranks=2), costs, grants)
    assert launch.fraction == 1 - (4 + 2 + 1) / (21 - 1)
    for one in grants.values():
        static = launch.fraction * 20 * GIB
        peak = promise(costs.context, int(static), costs.beside, one.headroom_bytes) + one.others_unrealised_bytes
        assert peak <= one.free_bytes
    assert launch.environment == {}


def test_ranks_with_unlike_memory_are_not_killed_for_it() -> None:
    launch = size_launch(demand(weights_bytes=GIB, ranks=2), FREE_COSTS, {"a": grant(16.0), "b": grant(20.0)})
    assert launch.environment == {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    assert launch.static_bytes <= 16 * GIB


def test_less_than_weights_and_the_smallest_pool_is_refused_with_the_figures() -> None:
    costs = Costs(context=gib(0.5), graphs=gib(0.2), activations=gib(0.3))
    with pytest.raises(ResourceExhausted) as caught:
        size_launch(demand(), costs, {"cuda:0": grant(14.0, headroom=2.0, others=3.0)})
    for figure in ("8.0 GiB", "512.0 MiB", "14.0 GiB", "3.0 GiB", "2.0 GiB", "1.0 GiB"):
        assert figure in caught.value.message
    enough = 0.5 + 8 + 0.5 + 0.5 + 2 + 3 + 0.02
    assert size_launch(demand(), costs, {"cuda:0": grant(enough, headroom=2.0, others=3.0)}).static_bytes >= gib(8.5)


def test_a_bound_that_is_too_low_says_so() -> None:
    with pytest.raises(ResourceExhausted, match="raise mem_fraction_static"):
        size_launch(demand(mem_fraction_static=0.3), FREE_COSTS, {"cuda:0": grant(20.0)})
    with pytest.raises(NeverFits, match=r"mem_fraction_static 0\.3") as caught:
        reserve(demand(mem_fraction_static=0.3), FREE_COSTS, [view(24)])
    assert caught.value.needed == gib(8.5)


# --- what is asked of the ledger ---------------------------------------------------------------------


def test_the_first_launch_sizes_itself_and_a_later_one_has_a_cap() -> None:
    costs = default_costs((0, 5, 20), 24 * GIB, "cuda")
    first = reserve(demand(), costs, [view(24)])
    assert first.self_sizing
    assert size_launch(demand(), costs, {"cuda:0": grant(24.0)}).max_total_tokens is None
    seen = Measured.from_usage({"weight": 8.0, "kvcache": 4.0, "token_capacity": 32768, "graph": 0.5}, gib(13.2))
    later = costs.with_measured(seen)
    assert not reserve(demand(), later, [view(24)]).self_sizing
    launch = size_launch(demand(page_tokens=64), later, {"cuda:0": grant(24.0, static=12.0)})
    assert launch.max_total_tokens is not None
    assert launch.max_total_tokens % 64 == 0
    assert later.weights is not None and later.bytes_per_token is not None
    taken = later.weights + launch.max_total_tokens * later.bytes_per_token
    assert 12 * GIB - 64 * MIB < taken <= 12 * GIB
    assert launch.static_bytes == taken


@pytest.mark.parametrize("headroom", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("static", [9.0, 12.0, 17.5])
def test_a_capped_engine_gets_its_share_whatever_others_take_meanwhile(static: float, headroom: float) -> None:
    """Others can take all but what was promised to it: F suits that, and the cap all the rest."""
    costs = Costs(GIB, gib(0.5), gib(0.5), weights=8 * GIB, bytes_per_token=128 * 1024)
    launch = size_launch(demand(), costs, {"cuda:0": grant(24.0, static=static, headroom=headroom)})
    assert launch.max_total_tokens is not None
    wanted = 8 * GIB + launch.max_total_tokens * 128 * 1024
    assert wanted == launch.static_bytes == gib(static)
    for pre in (gib(static + headroom + 1.0), 23 * GIB):
        profiled = int(launch.fraction * pre)
        assert min(profiled, wanted) == pytest.approx(wanted, rel=0.001)


def test_a_profiles_own_fraction_bounds_the_bytes_of_a_capped_one() -> None:
    costs = Costs(GIB, 0, 0, weights=8 * GIB, bytes_per_token=128 * 1024)
    launch = size_launch(demand(mem_fraction_static=0.5), costs, {"cuda:0": grant(24.0, static=20.0)})
    assert launch.static_bytes <= 0.5 * 23 * GIB
    assert launch.max_total_tokens == (23 * GIB // 2 - 8 * GIB) // (128 * 1024)


def test_what_was_taken_beyond_the_promise_is_claimed_before_the_load_ends() -> None:
    costs = Costs(context=GIB, graphs=0, activations=0)
    grants, asked = {"cuda:0": grant(24.0, static=12.0)}, []

    def grow(account: str, nbytes: int) -> bool:
        asked.append((account, nbytes))
        return len(asked) < 2

    claim_overrun("chat", costs, grants, {"cuda:0": 13 * GIB}, grow)
    assert asked == [], "a context that is smaller than assumed leaves its bytes to the KV cache"
    claim_overrun("chat", costs, grants, {"cuda:0": 15 * GIB}, grow)
    assert asked == [("cuda:0", 2 * GIB)]
    with pytest.raises(DeviceOutOfMemory, match=r"took 15\.0 GiB on cuda:0 and was promised 13\.0 GiB"):
        claim_overrun("chat", costs, grants, {"cuda:0": 15 * GIB}, grow)
    claim_overrun("chat", costs, grants, {"cuda:0": 13 * GIB + 10 * MIB}, grow)
    assert len(asked) == 3, "what rounding may have added is asked for, and no reason to end it"


def test_what_a_cap_does_not_bound_is_always_alone() -> None:
    known = Costs(GIB, 0, 0, weights=8 * GIB, bytes_per_token=1000)
    assert not reserve(demand(), known, [view(24)]).self_sizing
    assert reserve(demand(capped=False), known, [view(24)]).self_sizing


def test_a_profiles_own_cap_is_kept_and_wanted() -> None:
    costs = Costs(GIB, 0, 0, weights=8 * GIB, bytes_per_token=128 * 1024)
    profile = demand(max_total_tokens=16384)
    need = reserve(profile, costs, [view(24)]).ranks[0]
    assert need.want_bytes == 8 * GIB + 2 * GIB + 24 * GIB // 1000 + 1
    launch = size_launch(profile, costs, {"cuda:0": grant(24.0, static=need.want_bytes / GIB)})
    assert launch.max_total_tokens == 16384
    assert size_launch(profile, costs, {"cuda:0": grant(24.0, static=9.0)}).max_total_tokens == 8192
    assert size_launch(profile, FREE_COSTS, {"cuda:0": grant(24.0)}).flags()[2:] == ("--max-total-tokens", "16384")


@pytest.mark.parametrize("total", [12.0, 24.0, 80.0, 141.0])
def test_the_least_that_is_booked_is_enough_to_launch(total: float) -> None:
    """F is rounded down, and what that loses must not be the smallest pool's."""
    costs = Costs(context=gib(0.4), graphs=gib(0.3), activations=gib(0.3))
    tiny = demand(weights_bytes=gib(1.234567), kv_bytes_per_token=3000, headroom_bytes=GIB)
    need = reserve(tiny, costs, [view(total)]).ranks[0]
    assert need.min_bytes - tiny.least(costs) < 0.0011 * total * GIB
    launch = size_launch(tiny, costs, {"cuda:0": DeviceGrant(need.min_bytes, GIB, gib(total))})
    assert launch.static_bytes >= tiny.least(costs)


def test_the_promise_has_all_four_parts() -> None:
    costs = Costs(context=gib(0.4), graphs=gib(0.3), activations=gib(0.5))
    need = reserve(demand(headroom_bytes=4 * GIB), costs, [view(20, available=gib(3))]).ranks[0]
    assert need.context_bytes == costs.context + costs.beside, "a configured headroom must not replace g"
    assert need.headroom_bytes == 4 * GIB
    assert need.want_bytes == gib(20) - need.context_bytes - need.headroom_bytes
    assert promise(costs.context, need.want_bytes, costs.beside, 4 * GIB) == gib(20)


def test_what_an_empty_device_could_not_hold_is_refused_for_good() -> None:
    costs = default_costs((0, 5, 23), 24 * GIB, "cuda")
    with pytest.raises(NeverFits) as caught:
        reserve(demand(weights_bytes=20 * GIB), costs, [view(16, name="cuda:1"), view(24)])
    assert caught.value.account == "cuda:0"
    assert caught.value.capacity == 24 * GIB < caught.value.needed
    assert "20.0 GiB" in caught.value.message
    with pytest.raises(NeverFits, match="runtime_headroom"):
        reserve(demand(headroom_bytes=20 * GIB), costs, [view(24)])


def test_ranks_are_alike_and_the_hosts_share_is_asked_for() -> None:
    asked = reserve(demand(ranks=2, host_bytes=5, host_load_bytes=7), FREE_COSTS, [view(24), view(24, name="cuda:1")])
    assert len(asked.ranks) == 2
    assert asked.ranks[0] == asked.ranks[1]
    assert (asked.host_bytes, asked.host_load_bytes) == (5, 7)


def test_on_a_cpu_the_machines_ram_is_not_taken() -> None:
    costs = default_costs((0, 5, 23), 64 * GIB, "cpu")
    small = demand(weights_bytes=MIB, kv_bytes_per_token=1024)
    cpu = DeviceView("cpu", "cpu", 64 * GIB, 60 * GIB, 60 * GIB)
    need = reserve(small, costs, [cpu]).ranks[0]
    assert need.want_bytes < 100 * MIB
    launch = size_launch(small, costs, {"cpu": DeviceGrant(need.want_bytes, 0, 60 * GIB)}, kinds=["cpu"])
    assert launch.flags() == ("--mem-fraction-static", "0.900", "--max-total-tokens", "16384")
    small = attrs.evolve(small, mem_fraction_static=0.3)
    launch = size_launch(small, costs, {"cpu": DeviceGrant(need.want_bytes, 0, 60 * GIB)}, kinds=["cpu"])
    assert launch.flags() == ("--mem-fraction-static", "0.300", "--max-total-tokens", "16384")


# --- c and g -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "total", "ranks", "graphs", "mib"),
    [
        ((0, 5, 20), 24, 1, Graphs(), 512 + 4096 * 1.5 + 128 + 2 * 48 + 8 * 50),
        ((0, 5, 10), 24, 1, Graphs(), 512 + 2048 * 1.5 + 128 + 2 * 24 + 8 * 42),
        ((0, 5, 23), 16, 1, Graphs(prefill_graphs=False), 512 + 2048 * 1.5 + 128 + 2 * 8),
        ((0, 5, 23), 48, 4, Graphs(prefill_graphs=False), 512 + 4096 * 1.5 + 512 + 2 * 160),
        ((0, 5, 23), 80, 1, Graphs(chunked_prefill=2048), 10 * 1024),
        ((0, 5, 23), 141, 1, Graphs(), 512 + 8192 * 1.5 + 128 + 2 * 256 + 8 * 58),
        ((0, 5, 10), 24, 1, Graphs(prefill_graphs=False, speculative="EAGLE"), 512 + 2048 * 1.5 + 128 + 48 + 4096),
    ],
)
def test_before_a_launch_was_measured_the_engines_own_reserve_counts(
    version: tuple[int, ...], total: int, ranks: int, graphs: Graphs, mib: float
) -> None:
    costs = default_costs(version, total * GIB, "cuda", ranks, graphs)
    assert costs.context == GIB
    assert costs.beside == int(mib * MIB)


def test_measured_figures_replace_assumed_ones() -> None:
    usage = {"weight": 7.5, "kvcache": 4.0, "token_capacity": 32768, "graph": {"prefill": 0.25, "decode": 0.5}}
    seen = Measured.from_usage(usage, process_bytes=gib(13.0))
    assert seen.weights == int(7.505 * GIB)
    assert seen.graphs == pytest.approx(gib(0.76), abs=2)
    assert seen.bytes_per_token == -(-int(4.005 * GIB) // 32768)
    assert seen.context == pytest.approx(gib(13.0 - 7.505 - 4.005 - 0.76), abs=4)
    costs = default_costs((0, 5, 23), 24 * GIB, "cuda").with_measured(seen)
    assert costs.graphs == seen.graphs
    assert costs.activations == default_costs((0, 5, 23), 24 * GIB, "cuda").activations, "not seen at start"
    assert costs.with_measured(Measured(activations=5)).activations == 5
    assert costs.with_measured(None) == costs


def test_what_is_no_figure_is_not_measured() -> None:
    assert Measured.from_usage({}) == Measured()
    assert Measured.from_usage({"weight": None, "kvcache": "4", "token_capacity": 0}) == Measured()
    assert Measured.from_usage({"kvcache": 4.0, "token_capacity": 0}).bytes_per_token is None


def test_the_cache_survives_the_process_and_keeps_the_largest_cost(tmp_path: Path) -> None:
    key = CostCache.key("path:/m", "0.5.20", ["--tp-size", "1"], "cuda 25769803776")
    assert key != CostCache.key("path:/m", "0.5.20", ["--tp-size", "2"], "cuda 25769803776")
    assert key != CostCache.key("path:/m", "0.5.23", ["--tp-size", "1"], "cuda 25769803776")
    cache = CostCache(tmp_path / "deep" / "costs.json")
    assert cache.get(key) is None
    cache.record(key, Measured(context=5, graphs=7, weights=100, bytes_per_token=3))
    cache.record(key, Measured(context=4, graphs=9, weights=90))
    again = CostCache(tmp_path / "deep" / "costs.json")
    assert again.get(key) == Measured(context=5, graphs=9, weights=90, bytes_per_token=3)
    again.record("other", Measured(context=1))
    assert CostCache(cache.path).get(key) is not None
    assert [file.name for file in cache.path.parent.iterdir()] == ["costs.json"], "no half-written file is left"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2, "entries": {"k": {"context": 1}}}',
        '{"format": 1, "entries": []}',
        '{"format": 1, "entries": {"k": {"context": -1}}}',
        '{"format": 1, "entries": {"k": {"context": "1"}}}',
        '{"format": 1, "entries": {"k": {"context": true}}}',
        '{"format": 1, "entries": {"k": {"contekst": 1}}}',
        "\udcff",
    ],
)
def test_a_damaged_cache_is_no_cache(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    cache = CostCache(file)
    assert cache.get("k") is None
    cache.record("k", Measured(context=2))
    assert CostCache(file).get("k") == Measured(context=2)


def test_a_cache_that_cant_be_written_costs_no_launch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CostCache(tmp_path / "file" / "costs.json")
    cache.record("k", Measured(context=2))
    assert cache.get("k") == Measured(context=2)


def test_many_threads_record_at_once(tmp_path: Path) -> None:
    cache = CostCache(tmp_path / "costs.json")
    threads = [
        threading.Thread(target=cache.record, args=(f"k{number % 4}", Measured(context=number))) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {CostCache(cache.path).get(f"k{n}") for n in range(4)} == {Measured(context=12 + n) for n in range(4)}


# --- checkpoints -------------------------------------------------------------------------------------


def write_model(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int], int]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


LLAMA = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "torch_dtype": "bfloat16",
}
TENSORS = {
    "model.embed_tokens.weight": ("BF16", [100, 64], 12800),
    "model.layers.0.self_attn.q_proj.weight": ("BF16", [64, 64], 8192),
    "model.layers.0.self_attn.k_proj.weight": ("BF16", [16, 64], 2048),
    "model.norm.weight": ("BF16", [64], 128),
}


def test_weights_and_tokens_from_the_headers(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_model(tmp_path / "m", LLAMA, TENSORS))
    assert checkpoint.weight_bytes() == 12800 + 8192 + 2048 + 128
    assert checkpoint.kv_bytes_per_token() == 2 * 3 * 2 * 8 * 2
    assert checkpoint.weight_bytes(2) == 6400 + 4096 + 1024 + 128
    assert checkpoint.weight_bytes(4) == 3200 + 2048 + 1024 + 128, "a rank holds no less than one key head"
    assert checkpoint.kv_bytes_per_token(2) == checkpoint.kv_bytes_per_token(4) == 3 * 2 * 8 * 2
    assert checkpoint.kv_bytes_per_token(1, "fp8_e5m2") == 3 * 2 * 2 * 8
    assert not checkpoint.has_state
    assert not checkpoint.has_windows


def test_dtypes_count_as_they_are_loaded(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "m", {**LLAMA, "torch_dtype": "float32"}, {"a": ("F32", [10, 10], 400), "b": ("I32", [10, 10], 400)}
    )
    assert read_checkpoint(folder).weight_bytes() == 200 + 400, "full precision is loaded as half, integers stay"
    assert read_checkpoint(folder, "float32").weight_bytes() == 800
    with pytest.raises(ModelSourceInvalid, match="float8"):
        read_checkpoint(folder, "float8")


def test_other_architectures(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 48, "n_head": 4, "n_layer": 2}
    assert read_checkpoint(write_model(tmp_path / "a", gpt2, TENSORS)).kv_bytes_per_token() == 2 * 48 * 2 * 2
    latent = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    checkpoint = read_checkpoint(write_model(tmp_path / "b", latent, TENSORS))
    assert checkpoint.kv_bytes_per_token(1) == checkpoint.kv_bytes_per_token(4) == 576 * 3 * 2
    mixed = {**LLAMA, "mamba_d_state": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    checkpoint = read_checkpoint(write_model(tmp_path / "c", mixed, TENSORS))
    assert checkpoint.has_state
    assert checkpoint.kv_bytes_per_token() == 2 * 2 * 8 * 2
    windows = {"text_config": {**LLAMA, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}}
    assert read_checkpoint(write_model(tmp_path / "d", windows, TENSORS)).has_windows


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match=r"config\.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelSourceInvalid, match="no model configuration"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelSourceInvalid, match="no JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceInvalid, match="no weights"):
        read_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(1000))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.weight_bytes(2) == 500
    with pytest.raises(ModelSourceInvalid, match="can't be sized"):
        checkpoint.kv_bytes_per_token()


@pytest.mark.parametrize("damage", ["short", "long", "header", "empty"])
def test_damaged_weights_are_named(tmp_path: Path, damage: str) -> None:
    folder = write_model(tmp_path / "m", LLAMA, TENSORS)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {"short": whole[:-9], "long": whole + b"x", "header": whole[:8] + b"}" + whole[9:], "empty": b""}[damage]
    )
    with pytest.raises(ModelSourceInvalid, match=r"model\.safetensors"):
        read_checkpoint(folder)
