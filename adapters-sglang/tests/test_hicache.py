"""The host pool of a HiCache engine, by version: sized from one snapshot, booked, and handed over."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from attrs import frozen
from sie_adapters_sglang._errors import BadOptions
from sie_adapters_sglang._flags import version_key
from sie_adapters_sglang._hicache import HOST_RESERVE, HostPool, PoolTerms, PoolWish
from sie_adapters_sglang._hicache import size_pool as size_pool_or_none
from sie_adapters_sglang._options import HiCacheOptions
from sie_core import NeverFits, ResourceExhausted
from sie_core.memory.host import HostMemory

GB, GIB, MIB = 10**9, 2**30, 2**20
V10, V20, V21, V22, V23 = (0, 5, 10), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23)
NONE = PoolWish()


def terms(version: tuple[int, ...] = V23, ranks: int = 1, available: int = 100 * GIB, **fields: Any) -> PoolTerms:
    base: dict[str, Any] = {"total": 256 * GIB, "device_pools": (12 * GIB,), "page_bytes": 8 * MIB}
    return PoolTerms(name="chat", version=version, ranks=ranks, available=available, **base | fields)


def size_pool(wish: PoolWish, terms: PoolTerms) -> HostPool:
    pool = size_pool_or_none(wish, terms)
    assert pool is not None
    return pool


# --- one rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [V10, V20, V22, V23])
def test_one_rank_gets_whole_gigabytes(version: tuple[int, ...]) -> None:
    pool = size_pool(NONE, terms(version))
    assert pool.flags == ("--hicache-size", "25"), "twice the device's 12 GiB, in whole GB"
    assert pool.booked_bytes == 25 * GB + 8 * MIB


@pytest.mark.parametrize("version", [V10, V20, V23])
def test_one_rank_takes_no_more_than_its_share_of_the_host(version: tuple[int, ...]) -> None:
    tight = terms(version, available=HOST_RESERVE + 20 * GIB, device_pools=(10 * GIB,))
    pool = size_pool(NONE, tight)
    assert pool.flags == ("--hicache-size", "16"), "0.95 of 0.8 of 20 GiB is 16.3 GB"
    assert pool.booked_bytes + HOST_RESERVE <= tight.available


def test_the_ledgers_share_binds_where_it_is_less() -> None:
    assert size_pool(NONE, terms(share=10 * GB)).flags == ("--hicache-size", "9")
    assert size_pool(NONE, terms(ranks=4, share=16 * GB)).booked_bytes <= 16 * GB
    with pytest.raises(ResourceExhausted, match=r"no host memory is left.*the ledger gives 4\.0 MiB"):
        size_pool(NONE, terms(share=4 * MIB))


def test_buffer_only_needs_less() -> None:
    assert size_pool(PoolWish(mode="buffer_only"), terms()).flags == ("--hicache-size", "15")


@pytest.mark.parametrize("version", [V10, V20, V22, V23])
def test_a_pool_below_a_gigabyte_is_a_ratio(version: tuple[int, ...]) -> None:
    """B6: a device pool of 400 MiB and 200 GiB available: twice that is no whole GB, and fits all the same."""
    pool = size_pool(NONE, terms(version, available=200 * GIB, device_pools=(400 * MIB,)))
    assert pool.flags == ("--hicache-ratio", "2.0")
    assert pool.booked_bytes == 2 * 400 * MIB + 8 * MIB


def test_a_pool_that_the_host_bounds_below_a_gigabyte_is_a_ratio() -> None:
    """B6: 10 GiB and 500 MB available: 0.8 × 0.95 of 500 MB, 380 MB, are 0.0294 of the device's 12 GiB."""
    pool = size_pool(NONE, terms(V23, available=HOST_RESERVE + GB // 2))
    assert pool.flags == ("--hicache-ratio", "0.0294")
    assert pool.booked_bytes == math.ceil(0.0294 * 12 * GIB) + 8 * MIB


@pytest.mark.parametrize("version", [V10, V20, V21, V23])
def test_a_host_that_is_too_small_for_any_pool_has_none(version: tuple[int, ...], caplog: Any) -> None:
    """B6: no retry would ever help on a machine of 8 GiB, of which 10 GiB have to be left."""
    assert size_pool_or_none(NONE, terms(version, available=6 * GIB, total=8 * GIB)) is None
    assert "runs without a HiCache pool" in caplog.text
    with pytest.raises(NeverFits):
        size_pool_or_none(PoolWish(size_gb=1), terms(version, available=6 * GIB, total=8 * GIB))


def test_a_host_where_the_pool_can_never_exceed_the_devices_has_none(caplog: Any) -> None:
    """B6: 0.5.10 on 20 GiB: 10 GiB are left for a pool that has to be more than 12 GiB."""
    assert size_pool_or_none(NONE, terms(V10, available=18 * GIB, total=20 * GIB)) is None
    assert "would not exceed" in caplog.text


def test_what_the_ledger_gives_is_used_whole_at_launch() -> None:
    """B2: the share is what was booked: 25 GB and a page. Taken twice, the slack would make 23 GB of it."""
    booked = size_pool(NONE, terms()).booked_bytes
    assert size_pool(NONE, terms(share=booked)).flags == ("--hicache-size", "25")


@pytest.mark.parametrize("version", [V10, V20, V23])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("available", [0, GIB, HOST_RESERVE, HOST_RESERVE + GB // 2])
def test_no_host_memory_is_left_says_the_figures(version: tuple[int, ...], ranks: int, available: int) -> None:
    if available > HOST_RESERVE and version >= V20 and (version, ranks) != (V23, 4):
        pool = size_pool(NONE, terms(version, ranks, available))  # a ratio may be small
        assert pool.booked_bytes <= available - HOST_RESERVE
        return
    if available > HOST_RESERVE and version == V10:
        with pytest.raises(ResourceExhausted, match="would not exceed"):
            size_pool(NONE, terms(version, ranks, available))
        return
    with pytest.raises(ResourceExhausted, match="no host memory is left") as caught:
        size_pool(NONE, terms(version, ranks, available))
    assert "10.0 GiB have to be left" in caught.value.message


def test_a_share_leaves_room_for_its_pages() -> None:
    """B3: of 0.8 × 125 MB a rank, 0.95 go to the pool, 5 MB are left: no page of 8 MiB fits, and SGLang dies."""
    with pytest.raises(ResourceExhausted, match="one page a pool included"):
        size_pool(NONE, terms(V23, 8, HOST_RESERVE + GB))
    pool = size_pool(NONE, terms(V23, 8, HOST_RESERVE + GB, page_bytes=4 * MIB))
    assert pool.booked_bytes == 800_000_000


# --- several ranks -----------------------------------------------------------------------------------


def test_new_releases_divide_a_fraction_themselves() -> None:
    """What they do with it: ratio = min(2, fraction × (available - 10 GiB) / ranks × 0.95 / device bytes)."""
    for available in (60 * GIB, 100 * GIB, 400 * GIB):
        several = terms(V21, 4, available, total=512 * GIB)
        pool = size_pool(NONE, several)
        flag, value = pool.flags
        assert flag == "--hicache-host-memory-fraction"
        assert 0 < float(value) <= 1
        budget = int(several.room // 4 * float(value))
        ratio = min(2.0, budget * 0.95 / several.device_bytes)
        wanted = min(2.0, several.room // 4 * 0.8 * 0.95 / several.device_bytes)
        assert ratio == pytest.approx(wanted, rel=0.003)
        assert 4 * ratio * several.device_bytes <= pool.booked_bytes <= several.room
        assert pool.rank_bytes == pytest.approx(budget, abs=1)


def test_0_5_20_lets_the_last_rank_see_its_share() -> None:
    several = terms(V20, 4, HOST_RESERVE + 70 * GB)
    pool = size_pool(NONE, several)
    assert pool.flags == ("--hicache-size", "9"), "a seventh of 70 GB, less a page"
    pinned = 3 * pool.rank_bytes
    assert (several.available - pinned - HOST_RESERVE) // 4 >= pool.rank_bytes, (
        "its own check, once its peers have pinned"
    )
    greedy = PoolWish(size_gb=11)
    with pytest.raises(ResourceExhausted, match=r"4 ranks, 10\.3 GiB each"):
        size_pool(greedy, several)
    assert (several.available - 3 * 11 * GB - HOST_RESERVE) // 4 < 11 * GB


def test_0_5_10_divides_nothing() -> None:
    """B5: 4 × 135 GB in 860 GB. Of 849.3 GB beside the reserve the last rank finds 849.3 - 405 = 444.3 GB."""
    four = {"ranks": 4, "available": 860 * GB, "total": 1000 * GB, "device_pools": (60 * GB,)}
    pool = size_pool(PoolWish(size_gb=135), terms(V10, **four))
    assert pool.booked_bytes == 4 * (135 * GB + 8 * MIB)
    with pytest.raises(ResourceExhausted, match=r"each rank can have 197\.7 GiB"):  # 849.3 GB / 4
        size_pool(PoolWish(size_gb=213), terms(V10, **four))
    with pytest.raises(ResourceExhausted, match=r"each rank can have 113\.0 GiB"):  # 849.3 GB / 7
        size_pool(PoolWish(size_gb=135), terms(V20, **four))
    chosen = size_pool(NONE, terms(V10, **four | {"device_pools": (100 * GB,)}))
    assert chosen.flags == ("--hicache-size", "161"), "0.8 × 0.95 of 212.3 GB"


def test_0_5_10_wants_a_pool_that_exceeds_the_devices() -> None:
    small: dict[str, Any] = {"ranks": 4, "available": HOST_RESERVE + 50 * GB, "device_pools": (10 * GB,)}
    with pytest.raises(ResourceExhausted, match=r"would not exceed the device's pool \(9\.3 GiB\)"):
        size_pool(NONE, terms(V10, **small))
    assert size_pool(NONE, terms(V20, **small)).flags == ("--hicache-size", "7")
    assert size_pool(NONE, terms(V10, **small | {"device_pools": (8 * GB,)})).flags == ("--hicache-size", "9")
    with pytest.raises(ResourceExhausted, match="would not exceed"):
        size_pool(PoolWish(ratio=0.5), terms(V10))
    assert size_pool(PoolWish(ratio=0.5), terms(V20)).flags == ("--hicache-ratio", "0.5")


def test_four_ranks_that_each_pass_their_own_check() -> None:
    """Scenario 20: each pool is under what is free, together they are over the host. Refused before any starts."""
    for version in (V10, V20, V21, V23):
        several = terms(version, 4, HOST_RESERVE + 100 * GB, total=200 * GB, device_pools=(10 * GB,))
        asked = PoolWish(size_gb=40)
        assert 40 * GB + several.page_bytes <= several.available - HOST_RESERVE, "each by itself"
        with pytest.raises(ResourceExhausted) as caught:
            size_pool(asked, several)
        for figure in ("4 ranks", "149.0 GiB", "37.3 GiB each", "103.1 GiB"):
            assert figure in caught.value.message
        with pytest.raises(NeverFits) as never:
            size_pool(PoolWish(size_gb=60), several)
        assert never.value.account == "host"
        assert never.value.needed > never.value.capacity == 200 * GB


# --- hybrid models -----------------------------------------------------------------------------------


def test_old_releases_give_every_pool_of_a_hybrid_the_size() -> None:
    """B8: a size of 10 GB is 20 GB there; a ratio is what it says, however the pools are divided."""
    pools = (8 * GB, 2 * GB)
    old = size_pool(NONE, terms(V10, device_pools=pools))
    assert old.flags == ("--hicache-ratio", "2.0")
    assert old.booked_bytes == 2 * 10 * GB + 2 * 8 * MIB
    asked = size_pool(PoolWish(size_gb=10), terms(V10, device_pools=pools))
    assert asked.booked_bytes == 2 * 10 * GB + 2 * 8 * MIB
    new = size_pool(NONE, terms(V20, device_pools=pools))
    assert new.flags == ("--hicache-size", "20")
    assert new.booked_bytes == 20 * GB + 2 * 8 * MIB, "newer ones divide it"
    with pytest.raises(ResourceExhausted, match="would not exceed"):
        size_pool(PoolWish(size_gb=7), terms(V10, device_pools=pools))


def test_pools_of_a_draft_model_are_in_the_share_or_refused() -> None:
    """B8: they come on top of a size or ratio, and nothing says how large they are."""
    for wish in (NONE, PoolWish(size_gb=20), PoolWish(ratio=2.0)):
        for version in (V10, V20):
            with pytest.raises(BadOptions, match="draft model can't be booked"):
                size_pool(wish, terms(version, drafts=True))
    for wish in (PoolWish(size_gb=20), PoolWish(ratio=2.0)):
        with pytest.raises(BadOptions, match="come on top"):
            size_pool(wish, terms(V23, drafts=True))
    pool = size_pool(NONE, terms(V23, available=HOST_RESERVE + 20 * GB, drafts=True))
    assert pool.flags == ("--hicache-host-memory-fraction", "0.8000")
    assert pool.booked_bytes == 16 * GB, "of 20 GB, with whatever the draft's pools take of them"


# --- 0.5.21, which takes the page cache for used -----------------------------------------------------


def test_0_5_21_is_told_a_share_and_takes_less_once_it_has_read_its_weights() -> None:
    """B4: 40 GiB available by its own rule, 12 GiB of weights to read: an explicit 24 GB would be refused then."""
    tight = terms(V21, available=40 * GIB, reads=12 * GIB)
    pool = size_pool(NONE, tight)
    assert pool.flags == ("--hicache-host-memory-fraction", "0.8000")
    assert pool.booked_bytes == 24 * GIB, "0.8 of 30 GiB; it finds 18 GiB and takes 0.8 of those"
    with pytest.raises(ResourceExhausted, match=r"each rank can have 18\.0 GiB"):
        size_pool(PoolWish(size_gb=24), tight)
    assert size_pool(PoolWish(size_gb=19), tight).booked_bytes == 19 * GB + 8 * MIB
    with pytest.raises(ResourceExhausted, match="no host memory is left"):  # 2 GiB less than it reads
        size_pool(NONE, terms(V21, available=20 * GIB, reads=12 * GIB))


# --- huge pages ----------------------------------------------------------------------------------------


def test_a_pool_of_huge_pages_takes_nothing_that_the_ledger_has() -> None:
    """B9: 64 GiB of free huge pages beside 40 GiB of others. The engine asks for 10 GiB of the others all the same."""
    pool = size_pool(NONE, terms(V23, available=40 * GIB, huge=64 * GIB, share=0))
    assert pool.flags == ("--hicache-size", "24"), "0.8 × 0.95 of 30 GiB"
    assert pool.booked_bytes == 0
    assert pool.nbytes == 24 * GB + 8 * MIB
    plain = size_pool(NONE, terms(V23, available=40 * GIB, huge=16 * GIB))
    assert plain.booked_bytes == 24 * GB + 8 * MIB, "too few: it takes others"
    ranks = terms(V20, 4, HOST_RESERVE + 70 * GB, huge=70 * GB)
    assert size_pool(NONE, ranks).flags == ("--hicache-size", "13"), "its peers' pools take nothing of the 70 GB"


# --- what a profile asks for -------------------------------------------------------------------------


def test_what_is_asked_for_is_honoured_or_refused() -> None:
    assert size_pool(PoolWish(size_gb=60), terms()).flags == ("--hicache-size", "60")
    assert size_pool(PoolWish(size_gb=60), terms()).booked_bytes == 60 * GB + 8 * MIB
    with pytest.raises(ResourceExhausted, match="--hicache-size 97"):
        size_pool(PoolWish(size_gb=97), terms())
    with pytest.raises(NeverFits):
        size_pool(PoolWish(size_gb=300), terms())
    assert size_pool(PoolWish(ratio=1.5), terms()).flags == ("--hicache-ratio", "1.5")
    assert size_pool(PoolWish(ratio=1.5), terms()).booked_bytes == 18 * GIB + 8 * MIB
    with pytest.raises(ResourceExhausted, match=r"--hicache-ratio 8\.0"):
        size_pool(PoolWish(ratio=8.0), terms())
    with pytest.raises(ResourceExhausted, match=r"the ledger has 18\.6 GiB"):
        size_pool(PoolWish(size_gb=21), terms(share=20 * GB))


def test_a_fraction_that_is_asked_for() -> None:
    pool = size_pool(PoolWish(fraction=0.5), terms(V23))
    assert pool.flags == ("--hicache-host-memory-fraction", "0.5")
    assert pool.booked_bytes == 45 * GIB
    several = size_pool(PoolWish(fraction=0.12345), terms(V23, 2))
    assert several.flags[1] == "0.12345", "handed on as it was written"
    with pytest.raises(BadOptions, match=r"0\.5\.20 does not support hicache_fraction"):
        size_pool(PoolWish(fraction=0.5), terms(V20))
    with pytest.raises(BadOptions, match="at most 1"):
        size_pool(PoolWish(fraction=1.5), terms(V23))


def test_a_fraction_may_be_the_whole() -> None:
    """B7: (0, 1], as the engine has it."""
    assert HiCacheOptions(hicache_fraction=1.0).hicache_fraction == 1.0
    whole = size_pool(PoolWish(fraction=1.0), terms(V23))
    assert whole.flags == ("--hicache-host-memory-fraction", "1.0")
    assert whole.booked_bytes == 90 * GIB
    for wrong in (0.0, 1.01, -1.0):
        with pytest.raises(ValueError, match="more than 0 and at most 1"):
            HiCacheOptions(hicache_fraction=wrong)


def test_what_cant_be_meant() -> None:
    with pytest.raises(BadOptions, match="one of size_gb, ratio"):
        size_pool(PoolWish(size_gb=1, ratio=2.0), terms())
    for wish in (PoolWish(size_gb=0), PoolWish(ratio=0.0), PoolWish(ratio=-1.0), PoolWish(fraction=0.0)):
        with pytest.raises(BadOptions, match="more than 0"):
            size_pool(wish, terms())


@pytest.mark.parametrize("version", [V10, V20, V21, V23])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pools", [(GB,), (12 * GB,), (40 * GB,), (9 * GB, 3 * GB)])
def test_whatever_is_chosen_fits_the_host(version: tuple[int, ...], ranks: int, pools: tuple[int, ...]) -> None:
    for available in range(8 * GB, 400 * GB, 13 * GB):
        several = terms(version, ranks, available, device_pools=pools, total=512 * GB)
        try:
            pool = size_pool_or_none(NONE, several)
        except ResourceExhausted:
            continue
        if pool is None:
            assert version == V10
            assert sum(pools) * ranks > several.total - HOST_RESERVE
            continue
        assert 0 < pool.booked_bytes <= available - HOST_RESERVE
        assert pool.booked_bytes == ranks * pool.rank_bytes


# --- the newest release's own view of the host -------------------------------------------------------


ASK = """
import importlib.metadata as m, importlib.util as u
print(m.version("sglang"), u.find_spec("sglang").submodule_search_locations[0])
"""


def host_memory_file() -> Path | None:
    """An engine's own ``host_memory.py``, where the variable says or in the environment that has SGLang."""
    named = os.environ.get("SIE_TEST_SGLANG_HOST_MEMORY")
    if named:
        return Path(named)
    python = os.environ.get("SIE_SGLANG_PYTHON")
    if not python:
        return None
    told = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True).stdout
    version, _, folder = told.strip().partition(" ")
    if version_key(version) < (0, 5, 21):
        return None
    return Path(folder, "srt/mem_cache/host_memory.py")


@pytest.fixture(scope="module")
def theirs() -> Iterator[ModuleType]:
    """Loaded by itself, into this process: psutil is all that it wants."""
    file = host_memory_file()
    if file is None:
        pytest.skip("neither SIE_SGLANG_PYTHON nor SIE_TEST_SGLANG_HOST_MEMORY leads to an SGLang from 0.5.21 on")
    assert file.is_file(), "the engine has moved it: what its view of the host is has to be looked up again"
    spec = importlib.util.spec_from_file_location("sglang_host_memory", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    # Since 0.5.22 it knows what the kernel gives back.
    module.reclaims = hasattr(module, "_memory_stat")  # type: ignore[attr-defined]
    yield module
    del sys.modules[spec.name]


@frozen
class Ram:
    """Stands in for ``psutil.virtual_memory()``."""

    total: int = 512 * GIB
    available: int = 300 * GIB


class Tree:
    """A made-up machine that both can read: mounts are named by where they really are, and by where ours looks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts: list[tuple[str, str, str, str]] = []
        self.own: list[str] = []

    def mount(self, at: str, kind: str = "cgroup2", subtree: str = "/", options: str = "rw") -> None:
        self.mounts.append((at, kind, subtree, options))
        (self.root / at).mkdir(parents=True, exist_ok=True)

    def v2(self, path: str, limit: Any = "max", high: Any = "max", used: int = 0, cache: int = 0) -> None:
        self.files(path, **{"memory.max": limit, "memory.high": high, "memory.current": used})
        self.files(
            path,
            **{"memory.stat": f"anon 5\nfile {cache}\nactive_file {cache // 3}\ninactive_file {cache - cache // 3}"},
        )

    def v1(self, path: str, limit: int = 9223372036854771712, used: int = 0, cache: int = 0) -> None:
        self.files(path, **{"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used})
        stat = (
            f"active_file 1\ninactive_file 2\ntotal_active_file {cache // 3}\ntotal_inactive_file {cache - cache // 3}"
        )
        self.files(path, **{"memory.stat": stat})

    def files(self, path: str, **texts: Any) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (self.root / path / name).write_text(f"{text}\n")

    def ours(self, *, reclaim: bool = True) -> int:
        self._write("")
        return HostMemory(self.root, virtual_memory=Ram).available(reclaim=reclaim)

    def theirs(self, module: ModuleType) -> int:
        self._write(f"{self.root}/")
        headroom = module._cgroup_memory_headroom(self.root / "proc")
        return Ram().available if headroom is None else min(Ram().available, headroom)

    def _write(self, prefix: str) -> None:
        proc = self.root / "proc/self"
        proc.mkdir(parents=True, exist_ok=True)
        (proc / "cgroup").write_text("".join(f"{line}\n" for line in self.own))
        lines = ["22 1 0:20 / /proc rw - proc proc rw"]
        for number, (at, kind, subtree, options) in enumerate(self.mounts):
            where = prefix + at if prefix else f"/{at}"
            lines.append(
                f"{30 + number} 24 0:{40 + number} {subtree} {where} rw,relatime shared:9 - {kind} {kind} {options}"
            )
        (proc / "mountinfo").write_text("\n".join(lines) + "\n")


def unified(tree: Tree) -> None:
    tree.mount("sys/fs/cgroup")
    tree.own = ["0::/pod/app"]
    tree.v2("sys/fs/cgroup/pod")
    tree.v2("sys/fs/cgroup/pod/app")


def legacy(tree: Tree) -> None:
    tree.mount("sys/fs/cgroup/cpu", "cgroup", options="rw,cpu,cpuacct")
    tree.mount("sys/fs/cgroup/memory", "cgroup", options="rw,memory")
    tree.own = ["5:cpu,cpuacct:/else", "4:memory:/docker/app", "1:name=systemd:/"]
    for path in ("", "/docker", "/docker/app"):
        tree.v1(f"sys/fs/cgroup/memory{path}")


def _plain(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod/app", limit=32 * GIB, used=20 * GIB, cache=8 * GIB)


def _throttled(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod/app", limit=32 * GIB, high=24 * GIB, used=20 * GIB, cache=8 * GIB)


def _over_high(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod/app", high=16 * GIB, used=20 * GIB, cache=GIB)


def _ancestor(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    tree.v2("sys/fs/cgroup/pod/app", limit=128 * GIB, used=4 * GIB)
    tree.files("sys/fs/cgroup/pod/app", **{"memory.min": 0})


def _protected(tree: Tree) -> None:
    _ancestor(tree)
    tree.files("sys/fs/cgroup/pod/app", **{"memory.min": 7 * GIB})


def _own_protection(tree: Tree) -> None:
    _plain(tree)
    tree.files("sys/fs/cgroup/pod/app", **{"memory.min": GIB})


def _no_limit(tree: Tree) -> None:
    unified(tree)


def _no_controller(tree: Tree) -> None:
    unified(tree)
    for name in ("memory.max", "memory.high", "memory.current", "memory.stat"):
        (tree.root / "sys/fs/cgroup/pod/app" / name).unlink()
    tree.v2("sys/fs/cgroup/pod", limit=8 * GIB, used=GIB)


def _namespace(tree: Tree) -> None:
    tree.mount("sys/fs/cgroup")
    tree.own = ["0::/"]
    tree.v2("sys/fs/cgroup", limit=24 * GIB, used=9 * GIB, cache=3 * GIB)


def _subtree(tree: Tree) -> None:
    tree.mount("sys/fs/cgroup", subtree="/kubepods/pod7")
    tree.own = ["0::/kubepods/pod7/app"]
    tree.v2("sys/fs/cgroup", limit=40 * GIB, used=39 * GIB, cache=5 * GIB)
    tree.files("sys/fs/cgroup/app", **{"memory.min": 0})
    tree.v2("sys/fs/cgroup/app", limit=50 * GIB, used=2 * GIB)


def _blanks(tree: Tree) -> None:
    tree.mount("sys/fs/c\\040group")
    (tree.root / "sys/fs/c\\040group").rmdir()
    tree.own = ["0::/app"]
    tree.v2("sys/fs/c group/app", limit=6 * GIB, used=GIB)


def _v1_plain(tree: Tree) -> None:
    legacy(tree)
    tree.v1("sys/fs/cgroup/memory/docker/app", limit=16 * GIB, used=12 * GIB, cache=7 * GIB)


def _v1_ancestor(tree: Tree) -> None:
    legacy(tree)
    tree.v1("sys/fs/cgroup/memory/docker", limit=20 * GIB, used=19 * GIB, cache=2 * GIB)
    tree.v1("sys/fs/cgroup/memory/docker/app", limit=64 * GIB, used=3 * GIB)


def _v1_unlimited(tree: Tree) -> None:
    legacy(tree)


def _both(tree: Tree) -> None:
    legacy(tree)
    tree.v1("sys/fs/cgroup/memory/docker/app", limit=16 * GIB, used=12 * GIB)
    tree.mount("sys/fs/cgroup/unified")
    tree.own.append("0::/docker/app")
    (tree.root / "sys/fs/cgroup/unified/docker/app").mkdir(parents=True)


def _cache_over_usage(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod/app", limit=8 * GIB, used=GIB, cache=2 * GIB)


def _host_is_less(tree: Tree) -> None:
    unified(tree)
    tree.v2("sys/fs/cgroup/pod/app", limit=900 * GIB, used=GIB)


TREES: dict[Callable[[Tree], None], int] = {
    _plain: 20 * GIB,
    _throttled: 12 * GIB,
    _over_high: 0,
    _ancestor: 54 * GIB,
    _protected: 4 * GIB,
    _own_protection: 20 * GIB,
    _no_limit: 300 * GIB,
    _no_controller: 7 * GIB,
    _namespace: 18 * GIB,
    _subtree: 6 * GIB,
    _blanks: 5 * GIB,
    _v1_plain: 11 * GIB,
    _v1_ancestor: 3 * GIB,
    _v1_unlimited: 300 * GIB,
    _both: 4 * GIB,
    _cache_over_usage: 8 * GIB,
    _host_is_less: 300 * GIB,
}


@pytest.mark.parametrize("build", TREES, ids=lambda build: build.__name__.strip("_"))
def test_what_the_host_gives(tmp_path: Path, build: Callable[[Tree], None]) -> None:
    tree = Tree(tmp_path)
    build(tree)
    assert tree.ours() == TREES[build]


@pytest.mark.parametrize("build", TREES, ids=lambda build: build.__name__.strip("_"))
def test_the_engine_sees_the_same(theirs: ModuleType, tmp_path: Path, build: Callable[[Tree], None]) -> None:
    """B4: each release by its own source."""
    tree = Tree(tmp_path)
    build(tree)
    assert tree.theirs(theirs) == tree.ours(reclaim=theirs.reclaims)


def test_what_0_5_21_sees_of_a_container(tmp_path: Path) -> None:
    """B4: a limit of 32 GiB, 20 GiB used, of them 8 GiB page cache: 12 GiB to 0.5.21, 20 GiB to those after it."""
    tree = Tree(tmp_path)
    _plain(tree)
    assert (tree.ours(reclaim=False), tree.ours()) == (12 * GIB, 20 * GIB)


def test_the_engine_sees_the_same_here(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own cgroups; memory in use moves between the two looks."""
    ram = psutil.virtual_memory()
    monkeypatch.setattr(theirs.psutil, "virtual_memory", lambda: ram)
    ours = HostMemory(virtual_memory=lambda: ram).available(reclaim=theirs.reclaims)
    assert theirs.available_host_memory_bytes() == pytest.approx(ours, rel=0.05)
