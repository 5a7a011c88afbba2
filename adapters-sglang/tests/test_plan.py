"""What an engine is booked for, from its first launch to the next, and the flags of its launch."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from sie_adapters_sglang import plugin
from sie_core import Declined, DeviceGrant, Grant, LoadError, NeverFits, ResourceExhausted, TransitionContext

GIB = 1 << 30


def words(engine: Any) -> list[str]:
    return psutil.Process(engine.pid).cmdline()


def after(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_the_first_launch_sizes_itself_and_the_next_ones_have_a_cap(home: Any, start: Any, helpers: Any) -> None:
    model = home.model()
    views = [helpers.view("cuda:0", total=24 * GIB)]
    first = plugin.admission_reserve(model, views)
    assert first is not None
    assert first.self_sizing
    engine = start(model, ctx=helpers.context("cuda:0"))
    assert "--max-total-tokens" not in words(engine)
    again = plugin.admission_reserve(model, views)
    assert again is not None
    assert not again.self_sizing
    assert again.ranks[0].min_bytes > 3 * GIB  # 1 of weights, 2 of the smallest cache: as it said itself
    engine = start(model, ctx=helpers.context("cuda:0"))
    assert int(after(words(engine), "--max-total-tokens")) > 4096


def test_what_a_small_card_has_shown_is_nothing_to_go_by_on_a_large_one(home: Any, start: Any, helpers: Any) -> None:
    model = home.model()
    small, large = ([helpers.view("cuda:0", total=size * GIB)] for size in (24, 80))
    assert plugin.admission_reserve(model, small) is not None
    start(model, ctx=helpers.context("cuda:0"))
    known = plugin.admission_reserve(model, small)
    unknown = plugin.admission_reserve(model, large)
    assert known is not None
    assert unknown is not None
    assert (known.self_sizing, unknown.self_sizing) == (False, True)


def test_what_is_set_aside_for_graphs_goes_by_the_models_own_flags(home: Any, helpers: Any) -> None:
    def beside(*extra: str) -> int:
        told = plugin.admission_reserve(
            home.model(extra_args=extra, version="0.5.23"), [helpers.view("cuda:0", total=24 * GIB)]
        )
        assert told is not None
        return told.ranks[0].context_bytes

    plain = beside()
    for extra in (("--speculative-algorithm", "STANDALONE"), ("--speculative-algorithm=STANDALONE",)):
        assert beside(*extra) == plain + 6 * GIB
    for extra in (("--disable-cuda-graph",), ("--disable-decode-cuda-graph",)):
        assert beside(*extra) < plain
    assert beside("--cuda-graph-max-bs-decode", "1000") > plain > beside("--cuda-graph-max-bs-decode=1")


def test_the_fraction_leaves_what_was_promised_to_others(home: Any, start: Any) -> None:
    """22.5 GiB free, of it 3.6 headroom: the worked example of the documentation."""
    fractions = []
    # Another setting each time: nothing has been measured for it yet.
    for unrealised, length in ((0, 100), (4 * GIB, 101)):
        grant = DeviceGrant(
            static_bytes=17 * GIB,
            headroom_bytes=int(3.6 * GIB),
            free_bytes=int(22.5 * GIB),
            others_unrealised_bytes=unrealised,
        )
        model = home.model(context_length=length)
        engine = start(model, ctx=TransitionContext(grant=Grant({"cuda:0": grant})))
        fractions.append(float(after(words(engine), "--mem-fraction-static")))
    assert 0.3 < fractions[1] < fractions[0] < 1 - 3.6 / 22.5


def test_devices_are_handed_on_as_the_server_sees_them(home: Any, start: Any, helpers: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    engine = start(home.model(), ctx=helpers.context("cuda:1"))
    assert psutil.Process(engine.pid).environ()["CUDA_VISIBLE_DEVICES"] == "6"
    assert after(words(engine), "--device") == "cuda"
    engine = start(home.model(), ctx=helpers.context("cpu"))
    assert after(words(engine), "--device") == "cpu"


def test_the_memory_saver_is_on_where_parking_is(home: Any, start: Any, helpers: Any) -> None:
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({"saver": "0.0.9"}, "cuda:0", True),
        ({"saver": "0.0.9", "park": False}, "cuda:0", False),
        ({}, "cuda:0", False),
        ({"saver": "0.0.9"}, "cpu", False),
    ]
    for options, account, on in cases:
        engine = start(home.model(**options), ctx=helpers.context(account))
        argv, env = words(engine), psutil.Process(engine.pid).environ()
        assert ("--enable-memory-saver" in argv) is on
        assert ("--enable-weights-cpu-backup" in argv) is on
        assert (env.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == "1") is on
        # Prefill graphs of these releases would refuse to run with it.
        assert ("--cuda-graph-backend-prefill" in argv) is on


def test_a_profile_with_several_ranks(home: Any, start: Any) -> None:
    grants = {f"cuda:{n}": DeviceGrant(static_bytes=8 * GIB, free_bytes=64 * GIB) for n in (0, 2)}
    engine = start(home.model(tp_size=2, saver="0.0.9"), ctx=TransitionContext(grant=Grant(grants)))
    assert after(words(engine), "--tp-size") == "2"
    assert psutil.Process(engine.pid).environ()["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert set(engine.memory().devices) == {"cuda:0", "cuda:2"}
    assert plugin.host_offload_bytes(engine) == 2 * GIB  # each rank has a share of its own


HOST = {"total": 64 * GIB, "available": 56 * GIB}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 GiB, of which 56 are free."""
    import sie_core

    class Machine:
        def available(self, *, reclaim: bool = True) -> int:
            return HOST["available"]

        def total(self) -> int:
            return HOST["total"]

    monkeypatch.setattr(sie_core, "HostMemory", Machine)


@pytest.mark.parametrize(
    ("version", "ranks", "options", "flags"),
    [
        ("0.5.10.post1", 1, {"hicache_size": 25}, ["--hicache-size", "25"]),
        ("0.5.20", 1, {"hicache_ratio": 2.0}, ["--hicache-ratio", "2.0"]),
        ("0.5.20", 1, {}, ["--hicache-size"]),
        ("0.5.23", 2, {}, ["--hicache-host-memory-fraction"]),
        ("0.5.23", 1, {"hicache_fraction": 0.25}, ["--hicache-host-memory-fraction", "0.25"]),
    ],
)
def test_a_hicache_pool_is_booked_and_handed_over(
    home: Any, start: Any, helpers: Any, host: None, version: str, ranks: int, options: Any, flags: list[str]
) -> None:
    model = home.model("sglang-hicache", version=version, tp_size=ranks, **options)
    reserve = plugin.admission_reserve(model, [helpers.view("cuda:0", total=24 * GIB) for _ in range(ranks)])
    assert reserve is not None
    assert 0 < reserve.host_bytes < 46 * GIB
    grants = {
        f"cuda:{rank}": DeviceGrant(static_bytes=need.want_bytes, free_bytes=24 * GIB)
        for rank, need in enumerate(reserve.ranks)
    }
    ctx = TransitionContext(grant=Grant(grants, host_bytes=reserve.host_bytes))
    engine = start(model, ctx=ctx)
    argv = words(engine)
    assert "--enable-hierarchical-cache" in argv
    assert " ".join(flags) in " ".join(argv)
    assert 0 < engine.memory().host <= reserve.host_bytes
    # Parked it keeps its pool, which stays booked as it is: what is announced is the copy of the weights alone.
    assert isinstance(plugin.host_offload_bytes(engine), Declined)


def test_a_hicache_pool_above_the_host_is_refused(home: Any, helpers: Any, host: None) -> None:
    views = [helpers.view("cuda:0", total=24 * GIB)]
    for options in ({"hicache_size": 100}, {"hicache_ratio": 50.0}):
        with pytest.raises((NeverFits, ResourceExhausted), match="host"):
            plugin.admission_reserve(home.model("sglang-hicache", **options), views)
    with pytest.raises(LoadError, match="fraction"):
        plugin.admission_reserve(home.model("sglang-hicache", version="0.5.20", hicache_fraction=0.5), views)
