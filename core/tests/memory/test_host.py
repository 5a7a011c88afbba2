"""Host memory on made-up machines: cgroups of both versions, nested, in containers or not."""

from __future__ import annotations

from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from attrs import frozen
from sie_core.errors import HostMemoryError, SieError
from sie_core.memory.host import HostMemory, host_cache_budget

GIB = 2**30
V1_UNLIMITED = 9223372036854771712


@frozen
class Ram:
    """Stands in for ``psutil.virtual_memory()``: the RAM of a machine that is made up."""

    total: int = 256 * GIB
    available: int = 200 * GIB


class Machine:
    """A root directory with a process in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._mounts: list[str] = ["22 1 0:20 / /proc rw,nosuid - proc proc rw"]
        self._own: list[str] = []
        self.write("proc/self/mountinfo", self._mounts[0] + "\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, version: int, at: str, subtree: str = "/", controller: str = "memory") -> None:
        kind = "cgroup2 cgroup rw,memory_recursiveprot" if version == 2 else f"cgroup cgroup rw,{controller}"
        self._mounts.append(f"31 24 0:{27 + len(self._mounts)} {subtree} {at} rw,relatime shared:9 - {kind}")
        self.write("proc/self/mountinfo", "\n".join(self._mounts) + "\n")
        (self.root / at.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def own(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines) + "\n")

    def v2(
        self, path: str, *, limit: str | int = "max", high: str | int = "max", used: int = 0, cache: int = 0
    ) -> None:
        self.write(f"{path}/memory.max", f"{limit}\n")
        self.write(f"{path}/memory.high", f"{high}\n")
        self.write(f"{path}/memory.current", f"{used}\n")
        self.write(f"{path}/memory.stat", f"anon {used - cache}\nactive_file {cache // 4}\n")
        with (self.root / path / "memory.stat").open("a") as stat:
            stat.write(f"inactive_file {cache - cache // 4}\nunevictable 7\n")

    def v1(self, path: str, *, limit: int = V1_UNLIMITED, used: int = 0, cache: int = 0) -> None:
        self.write(f"{path}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{path}/memory.usage_in_bytes", f"{used}\n")
        own = "cache 1\nactive_file 1\ninactive_file 1\n"
        self.write(
            f"{path}/memory.stat", f"{own}total_active_file {cache // 4}\ntotal_inactive_file {cache - cache // 4}\n"
        )

    def memory(self, ram: Ram | None = None) -> HostMemory:
        return HostMemory(self.root, virtual_memory=lambda: ram or Ram())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def v2(machine: Machine) -> Machine:
    """A process in ``/pod/app`` of a unified hierarchy."""
    machine.mount(2, "/sys/fs/cgroup")
    machine.own("0::/pod/app")
    machine.v2("sys/fs/cgroup/pod/app")
    machine.v2("sys/fs/cgroup/pod")
    return machine


@pytest.fixture
def v1(machine: Machine) -> Machine:
    """A process in ``/docker/app`` of the memory controller, beside other controllers."""
    machine.mount(1, "/sys/fs/cgroup/cpu", controller="cpu,cpuacct")
    machine.mount(1, "/sys/fs/cgroup/memory")
    machine.own("5:cpu,cpuacct:/elsewhere", "4:memory:/docker/app", "1:name=systemd:/")
    machine.v1("sys/fs/cgroup/memory/docker/app")
    machine.v1("sys/fs/cgroup/memory/docker")
    machine.v1("sys/fs/cgroup/memory")
    return machine


# --- this machine ------------------------------------------------------------------------------------


def test_this_machine() -> None:
    host = HostMemory()
    assert 0 < host.available() <= psutil.virtual_memory().total
    assert host.total() <= host.physical() == psutil.virtual_memory().total
    assert host.limit() is None or host.limit() >= host.total()  # type: ignore[operator]


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    host = HostMemory(tmp_path, virtual_memory=Ram)
    assert (host.available(), host.limit(), host.total(), host.levels()) == (200 * GIB, None, 256 * GIB, [])


# --- version 2 ---------------------------------------------------------------------------------------


def test_page_cache_is_not_lost_memory(v2: Machine) -> None:
    """Scenario 16: 60 of 64 GiB in use, 50 of them file cache."""
    v2.v2("sys/fs/cgroup/pod/app", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    assert v2.memory().available() == 54 * GIB
    assert v2.memory().limit() == v2.memory().total() == 64 * GIB


def test_the_machines_own_memory_binds_where_it_is_less(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=64 * GIB, used=4 * GIB)
    assert v2.memory(Ram(available=3 * GIB)).available() == 3 * GIB
    assert v2.memory(Ram(total=32 * GIB)).total() == 32 * GIB


@pytest.mark.parametrize("tight", ["sys/fs/cgroup/pod", "sys/fs/cgroup/pod/app"])
def test_the_smallest_headroom_of_all_levels_counts(v2: Machine, tight: str) -> None:
    """Scenario 17, version 2."""
    for path in ("sys/fs/cgroup/pod", "sys/fs/cgroup/pod/app"):
        used = 30 * GIB if path == tight else 8 * GIB
        v2.v2(path, limit=32 * GIB, used=used, cache=GIB)
    assert v2.memory().available() == 3 * GIB
    assert {Path(level.path).name for level in v2.memory().levels()} == {"pod", "app"}


def test_a_larger_limit_with_more_in_use_can_be_the_tighter_one(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=16 * GIB, used=2 * GIB)
    v2.v2("sys/fs/cgroup/pod", limit=64 * GIB, used=60 * GIB)
    assert (v2.memory().available(), v2.memory().limit()) == (4 * GIB, 16 * GIB)


def test_memory_high_is_a_limit(v2: Machine) -> None:
    """The kernel throttles above it: a server that runs there stands still."""
    v2.v2("sys/fs/cgroup/pod/app", limit=64 * GIB, high=32 * GIB, used=20 * GIB)
    assert (v2.memory().available(), v2.memory().limit()) == (12 * GIB, 32 * GIB)
    v2.v2("sys/fs/cgroup/pod/app", high=16 * GIB, used=20 * GIB)
    assert v2.memory().available() == 0, "over it there is nothing, and not less than nothing"


@pytest.mark.parametrize("protected", ["max", str(GIB)])
def test_protected_cache_of_a_descendant_is_not_reclaimable(v2: Machine, protected: str) -> None:
    v2.v2("sys/fs/cgroup/pod", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    v2.write("sys/fs/cgroup/pod/sidecar/memory.min", "0\n")
    assert v2.memory().available() == 54 * GIB
    v2.write("sys/fs/cgroup/pod/sidecar/memory.min", f"{protected}\n")
    assert v2.memory().available() == 4 * GIB


def test_what_a_parent_does_not_protect_its_children_cant(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    v2.write("sys/fs/cgroup/pod/sidecar/memory.min", "0\n")
    v2.write("sys/fs/cgroup/pod/sidecar/deep/memory.min", f"{GIB}\n")
    assert v2.memory().available() == 54 * GIB


def test_only_what_is_right_below_is_looked_at(v2: Machine) -> None:
    """It is asked once a second, and the tree below may be that of a whole machine."""
    v2.v2("sys/fs/cgroup/pod", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    v2.write("sys/fs/cgroup/pod/sidecar/deep/memory.min", "what nobody reads does no harm\n")
    assert v2.memory().available() == 54 * GIB


def test_a_levels_own_protection_does_not_bind_its_own_limit(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    v2.write("sys/fs/cgroup/pod/app/memory.min", f"{GIB}\n")
    assert v2.memory().available() == 54 * GIB


def test_cache_never_counts_for_more_than_what_is_used(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=8 * GIB, used=2 * GIB, cache=2 * GIB)
    v2.write("sys/fs/cgroup/pod/app/memory.current", f"{GIB}\n")
    assert v2.memory().available() == 8 * GIB


def test_a_level_without_the_memory_controller_has_no_limit(v2: Machine) -> None:
    (v2.root / "sys/fs/cgroup/pod/app/memory.max").unlink()
    (v2.root / "sys/fs/cgroup/pod/app/memory.high").unlink()
    (v2.root / "sys/fs/cgroup/pod/app/memory.current").unlink()
    v2.v2("sys/fs/cgroup/pod", limit=8 * GIB, used=GIB)
    assert v2.memory().available() == 7 * GIB


def test_without_statistics_no_cache_counts(v2: Machine) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=8 * GIB, used=6 * GIB, cache=5 * GIB)
    (v2.root / "sys/fs/cgroup/pod/app/memory.stat").unlink()
    assert v2.memory().available() == 2 * GIB


def test_a_container_with_a_namespace_sees_itself_as_the_root(machine: Machine) -> None:
    machine.mount(2, "/sys/fs/cgroup")
    machine.own("0::/")
    machine.v2("sys/fs/cgroup", limit=4 * GIB, used=GIB)
    assert machine.memory().available() == 3 * GIB


@pytest.mark.parametrize("own", ["/system.slice/docker-abc.scope", "/../../other", "/not/there"])
def test_a_container_that_is_told_its_hosts_path(machine: Machine, own: str) -> None:
    machine.mount(2, "/sys/fs/cgroup")
    machine.own(f"0::{own}")
    machine.v2("sys/fs/cgroup", limit=4 * GIB, used=GIB)
    assert machine.memory().available() == 3 * GIB


def test_a_mounted_subtree(machine: Machine) -> None:
    machine.mount(2, "/sys/fs/cgroup", subtree="/kubepods/pod7")
    machine.own("0::/kubepods/pod7/app")
    machine.v2("sys/fs/cgroup", limit=4 * GIB, used=GIB)
    machine.v2("sys/fs/cgroup/app", limit=2 * GIB, used=GIB)
    assert machine.memory().available() == GIB


def test_a_subtree_that_is_somebody_elses_does_not_count(machine: Machine) -> None:
    machine.mount(2, "/sys/fs/cgroup")
    machine.mount(2, "/mnt/other", subtree="/other")
    machine.own("0::/app")
    machine.v2("sys/fs/cgroup/app", limit=8 * GIB, used=GIB)
    machine.v2("mnt/other", limit=GIB, used=GIB)
    assert machine.memory().available() == 7 * GIB


def test_a_mount_point_with_a_space(machine: Machine) -> None:
    machine.mount(2, "/sys/fs/c\\040group")
    machine.own("0::/app")
    machine.v2("sys/fs/c group/app", limit=8 * GIB, used=GIB)
    assert machine.memory().available() == 7 * GIB


def test_a_process_that_is_moved_is_followed(v2: Machine) -> None:
    memory = v2.memory()
    assert memory.limit() is None
    v2.v2("sys/fs/cgroup/small", limit=2 * GIB, used=GIB)
    v2.own("0::/small")
    assert memory.limit() == 2 * GIB


# --- version 1 ---------------------------------------------------------------------------------------


def test_version_1_counts_the_cache_of_the_whole_subtree(v1: Machine) -> None:
    v1.v1("sys/fs/cgroup/memory/docker/app", limit=64 * GIB, used=60 * GIB, cache=50 * GIB)
    assert v1.memory().available() == 54 * GIB


@pytest.mark.parametrize("tight", ["", "/docker", "/docker/app"])
def test_version_1_limit_on_an_ancestor(v1: Machine, tight: str) -> None:
    """Scenario 17, version 1."""
    v1.v1(f"sys/fs/cgroup/memory{tight}", limit=16 * GIB, used=15 * GIB, cache=2 * GIB)
    assert (v1.memory().available(), v1.memory().limit()) == (3 * GIB, 16 * GIB)


def test_version_1_without_a_limit(v1: Machine) -> None:
    assert (v1.memory().available(), v1.memory().limit()) == (200 * GIB, None)


def test_version_1_without_a_namespace(machine: Machine) -> None:
    """The container's own cgroup is mounted, and its path is the host's."""
    machine.mount(1, "/sys/fs/cgroup/memory", subtree="/docker/abc")
    machine.own("4:memory:/docker/abc")
    machine.v1("sys/fs/cgroup/memory", limit=4 * GIB, used=GIB)
    assert machine.memory().available() == 3 * GIB


def test_both_versions_side_by_side(v1: Machine) -> None:
    v1.mount(2, "/sys/fs/cgroup/unified")
    v1.own("4:memory:/docker/app", "0::/user")
    v1.v1("sys/fs/cgroup/memory/docker", limit=8 * GIB, used=GIB)
    v1.write("sys/fs/cgroup/unified/user/cgroup.procs", "1\n")
    assert v1.memory().available() == 7 * GIB
    v1.v2("sys/fs/cgroup/unified/user", limit=2 * GIB, used=GIB)
    assert v1.memory().available() == GIB


def test_without_mountinfo_the_usual_places_are_looked_at(tmp_path: Path) -> None:
    first, second = Machine(tmp_path / "v1"), Machine(tmp_path / "v2")
    first.own("4:memory:/app")
    first.v1("sys/fs/cgroup/memory/app", limit=4 * GIB, used=GIB)
    second.own("0::/app")
    second.write("sys/fs/cgroup/cgroup.controllers", "memory\n")
    second.v2("sys/fs/cgroup/app", limit=4 * GIB, used=GIB)
    for machine in (first, second):
        (machine.root / "proc/self/mountinfo").unlink()
        assert machine.memory().available() == 3 * GIB


# --- what can't be read ------------------------------------------------------------------------------


def unreadable(file: Path) -> None:
    """As an unreadable file is to everybody, root included: a directory of its name."""
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("name", ["memory.current", "memory.max", "memory.high", "memory.stat"])
@pytest.mark.parametrize("how", ["unreadable", "garbage"])
def test_a_limit_that_cant_be_measured_is_an_error(v2: Machine, name: str, how: str) -> None:
    v2.v2("sys/fs/cgroup/pod/app", limit=8 * GIB, used=GIB)
    file = v2.root / "sys/fs/cgroup/pod/app" / name
    if how == "unreadable":
        unreadable(file)
    else:
        file.write_text("active_file many\n" if name == "memory.stat" else "-1\n")
    with pytest.raises(HostMemoryError) as caught:
        v2.memory().available()
    assert caught.value.path == str(file) and str(file) in caught.value.message
    assert isinstance(caught.value, SieError)


def test_a_limit_whose_usage_is_missing_is_an_error_and_not_no_limit(v2: Machine, tmp_path: Path) -> None:
    v2.v2("sys/fs/cgroup/pod", limit=8 * GIB)
    (v2.root / "sys/fs/cgroup/pod/memory.current").unlink()
    with pytest.raises(HostMemoryError, match=r"memory\.current"):
        v2.memory().available()
    assert v2.memory().limit() == 8 * GIB


def test_a_missing_usage_without_a_limit_does_not_matter(v2: Machine) -> None:
    (v2.root / "sys/fs/cgroup/pod/memory.current").unlink()
    assert v2.memory().available() == 200 * GIB


def test_version_1_usage_that_cant_be_read(v1: Machine) -> None:
    v1.v1("sys/fs/cgroup/memory/docker", limit=8 * GIB)
    unreadable(v1.root / "sys/fs/cgroup/memory/docker/memory.usage_in_bytes")
    with pytest.raises(HostMemoryError):
        v1.memory().available()


def test_a_process_whose_cgroup_cant_be_read(v2: Machine) -> None:
    unreadable(v2.root / "proc/self/cgroup")
    with pytest.raises(HostMemoryError):
        v2.memory().limit()


# --- the budget of the host tier ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "accelerator", "limit", "budget"),
    [
        ("auto", True, 64 * GIB, 16 * GIB),
        ("auto", True, None, 32 * GIB),
        ("auto", True, 1024 * GIB, 32 * GIB),
        ("auto", False, 64 * GIB, 0),
        ("auto", False, None, 0),
        (0, True, 64 * GIB, 0),
        (8 * GIB, True, 64 * GIB, 8 * GIB),
        (8 * GIB, False, None, 8 * GIB),
    ],
)
def test_the_budget(setting: str | int, accelerator: bool, limit: int | None, budget: int) -> None:
    assert host_cache_budget(setting, accelerator=accelerator, limit=limit, physical=128 * GIB) == budget  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["8GiB", -1, True, None, 1.5])
def test_a_budget_that_is_no_number_of_bytes(setting: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        host_cache_budget(setting, accelerator=True, limit=None, physical=GIB)  # type: ignore[arg-type]


# --- pressure ----------------------------------------------------------------------------------------

PRESSURE = """\
some avg10={} avg60=1.00 avg300=0.50 total=123456
full avg10=99.00 avg60=0.00 avg300=0.00 total=7
"""


@pytest.mark.parametrize(("shown", "read"), [("0.00", 0.0), ("12.75", 12.75), ("100.00", 100.0), ("7", 7.0)])
def test_pressure_is_the_share_of_time_in_which_some_task_waited(v2: Machine, shown: str, read: float) -> None:
    v2.write("proc/pressure/memory", PRESSURE.format(shown))
    assert v2.memory().pressure() == read


@pytest.mark.parametrize("text", ["", "full avg10=99.00 avg60=0.00 avg300=0.00 total=7\n", "some avg10=much\n"])
def test_pressure_that_the_kernel_does_not_tell(v2: Machine, text: str) -> None:
    assert v2.memory().pressure() is None  # no such file
    v2.write("proc/pressure/memory", text)
    assert v2.memory().pressure() is None


def test_pressure_that_cant_be_read_is_no_error(v2: Machine) -> None:
    v2.write("proc/pressure/memory", PRESSURE.format("50.00"))
    unreadable(v2.root / "proc/pressure/memory")
    assert v2.memory().pressure() is None


def test_the_own_cgroup_tells_more_than_the_machine(v2: Machine) -> None:
    v2.write("proc/pressure/memory", PRESSURE.format("50.00"))
    v2.write("sys/fs/cgroup/pod/memory.pressure", PRESSURE.format("20.00"))
    assert v2.memory().pressure() == 20.0
    v2.write("sys/fs/cgroup/pod/app/memory.pressure", PRESSURE.format("3.00"))
    assert v2.memory().pressure() == 3.0, "the others' containers may wait for what is not ours to give"


@pytest.mark.parametrize("how", ["unreadable", "empty"])
def test_a_cgroup_that_keeps_no_count_leaves_it_to_the_next(v2: Machine, how: str) -> None:
    v2.write("proc/pressure/memory", PRESSURE.format("50.00"))
    v2.write("sys/fs/cgroup/pod/app/memory.pressure", "")
    if how == "unreadable":
        unreadable(v2.root / "sys/fs/cgroup/pod/app/memory.pressure")
    assert v2.memory().pressure() == 50.0


def test_version_1_leaves_it_to_the_machine(v1: Machine) -> None:
    v1.write("proc/pressure/memory", PRESSURE.format("50.00"))
    v1.write("sys/fs/cgroup/memory/docker/app/memory.pressure", PRESSURE.format("3.00"))
    assert v1.memory().pressure() == 50.0


def test_huge_pages_that_were_set_aside_are_not_the_hosts(tmp_path: Path) -> None:
    """B9: of 256 GiB, 150 GiB are huge pages: `auto` is a quarter of the 106 that anybody can have, 26.5 GiB."""
    gib, mib = 1 << 30, 1 << 20
    for size, count, free, reserved in ((2048, 25600, 20480, 1024), (1048576, 100, 30, 0)):
        folder = tmp_path / f"sys/kernel/mm/hugepages/hugepages-{size}kB"
        folder.mkdir(parents=True)
        for name, number in (("nr", count), ("free", free), ("resv", reserved)):
            (folder / f"{name}_hugepages").write_text(f"{number}\n")

    class Ram:
        total = 256 * gib
        available = 90 * gib

    host = HostMemory(tmp_path, virtual_memory=Ram)
    assert host.physical() == host.total() == 106 * gib
    budget = host_cache_budget("auto", accelerator=True, limit=host.limit(), physical=host.physical())
    assert budget == 26.5 * gib
    assert host.free_huge_pages(2 * mib) == 38 * gib
    assert host.free_huge_pages(gib) == 30 * gib
    assert HostMemory(tmp_path / "none", virtual_memory=Ram).physical() == 256 * gib
