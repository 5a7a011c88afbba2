"""What every engine has to keep to with memory: what it takes was reserved, and what it gives back is really free.

Nothing here believes ``memory()``: what an engine holds is counted in the buffers of an emulated device, in the host
buffers, and in the memory of this process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from sie_core import Adapter, AdmissionReserve, Declined, Device, Engine, ModelSpec

from sie_testing._lifecycle import LifecycleConformance, call_hook
from sie_testing._rig import Rig, process_memory, process_peak, shown, start_of_peak

__all__ = ["BooksConformance"]

_MIB = 1 << 20
_PAGE = 4096


class BooksConformance(LifecycleConformance):
    """The tests of memory. Inherited with every suite."""

    cycles: ClassVar[int] = 20
    """How often an engine is parked and woken to see that nothing is left behind."""
    loads: ClassVar[int] = 3
    """How often a model is loaded and closed for the same."""
    host_slack: ClassVar[int] = 8 * _MIB
    """Bytes by which the process's own memory may grow for other reasons than the engine's."""
    load_slack: ClassVar[int] = 32 * _MIB
    """The same for the most that it has while a model loads; files that are mapped then count, too."""

    # --- what an author overrides ---

    @pytest.fixture
    def own_host_memory(self) -> bool:
        """Whether a parked engine keeps its copy in a process of its own, where the core's buffers can't be used."""
        return False

    # --- what the tests use ---

    @pytest.fixture
    def rig(
        self,
        adapter: Adapter,
        model: ModelSpec,
        plugin: Any,
        reserve: AdmissionReserve,
        device: Device | None,
    ) -> Iterator[Rig]:
        rig = Rig(type(self), adapter, model, plugin, reserve, device)
        gc.freeze()  # what is there already need not be looked through at each count
        try:
            yield rig
            self.bounded("close", rig.close)
        finally:
            gc.unfreeze()

    # --- device memory ---

    def test_memory_says_what_the_device_holds(self, rig: Rig) -> None:
        """`MemoryReport.devices` against the buffers that were taken and not freed."""
        rig.load()
        self._compare(rig, "after it was loaded")
        rig.probe()
        self._compare(rig, "after a probe")
        if self._parks(rig):
            rig.park()
            self._compare(rig, "while it is parked")
            rig.wake()
            self._compare(rig, "after it was woken")

    def test_the_device_memory_taken_was_reserved(self, rig: Rig) -> None:
        rig.load()
        held, allowed = rig.on_device(), rig.promised + rig.slack
        assert held <= allowed, (
            f"the engine holds {shown(held)} of the device, and admission_reserve asked for {shown(rig.promised)} "
            "(want_bytes, or min_bytes if that is more, and context_bytes)"
        )
        at_most = allowed + sum(need.headroom_bytes for need in rig.reserve.ranks)
        assert rig.peak <= at_most, (
            f"the load took {shown(rig.peak)} of the device at once; {shown(at_most)} were reserved with the headroom"
        )
        if self._parks(rig):
            rig.park()
            rig.wake()
            assert rig.on_device() <= rig.promised + rig.slack, "a woken engine holds more than was reserved for it"

    def test_a_park_frees_the_device_buffers(self, rig: Rig) -> None:
        rig.load()
        rig.announce()
        retained = sum(rig.park().retained.values())
        held = rig.on_device()
        assert held <= retained + rig.slack, (
            f"a parked engine holds {shown(held)} of the device, and offload_to_host said that it retains "
            f"{shown(retained)}: free the device buffers, or let go of every view of them"
        )

    def test_close_frees_the_device_buffers(self, rig: Rig) -> None:
        rig.load()
        rig.close()
        held = rig.on_device()
        assert held == 0, f"a closed engine holds {shown(held)} of the device: free the device buffers in close()"

    def test_close_frees_what_a_parked_engine_holds(self, rig: Rig) -> None:
        rig.load()
        rig.announce()
        rig.park()
        rig.close()
        host, device = rig.on_host(), rig.on_device()
        assert host == 0, f"{shown(host)} of host buffers are in use after a parked engine was closed"
        assert device == 0, f"{shown(device)} of the device are in use after a parked engine was closed"

    # --- host memory ---

    def test_a_load_takes_no_more_host_memory_than_was_reserved(self, rig: Rig, engine: Engine) -> None:
        """The process's memory while a model loads and afterwards. ``engine`` has paid what only a first load costs."""
        reserve = rig.reserve
        on_cpu = 0
        if rig.device is None or rig.device.kind == "cpu":
            on_cpu = rig.promised + sum(need.headroom_bytes for need in reserve.ranks)
        grown: list[int] = []
        rose: list[int] = []
        for _ in range(self.loads):  # the least counts: allocators take more than they need now and then
            before, start = process_memory(), start_of_peak()
            rig.load()
            rose.append(process_peak() - start)
            grown.append(process_memory() - before)
            rig.close()
        held, allowed = min(grown), on_cpu + reserve.host_bytes
        assert held <= allowed + self.host_slack, (
            f"the process has {shown(held)} more after a load, and {shown(allowed)} were reserved as host_bytes"
        )
        most, allowed = min(rose), allowed + reserve.host_load_bytes
        assert most <= allowed + self.load_slack, (
            f"the process took {shown(most)} while the model loaded, and {shown(allowed)} were reserved as "
            "host_bytes and host_load_bytes"
        )

    def test_loads_and_closes_leave_no_memory_behind(self, rig: Rig, engine: Engine) -> None:
        rig.load()
        rig.close()
        before = process_memory()
        for _ in range(self.loads):
            rig.load()
            rig.close()
        grown = process_memory() - before
        assert grown <= self.host_slack, f"{self.loads} loads and closes left {shown(grown)} in the process's memory"

    def test_parks_and_wakes_leave_no_memory_behind(self, rig: Rig) -> None:
        """Twenty cycles: the device to the byte, the host buffers, and the process's memory."""
        rig.load()
        rig.announce()
        emulated = rig.device is not None and rig.device.kind == "emulated"
        rig.park()
        parked = rig.on_device() if emulated else 0
        rig.wake()
        awake = rig.on_device() if emulated else 0
        before = process_memory()
        for cycle in range(1, self.cycles + 1):
            rig.park()
            assert not emulated or rig.on_device() == parked, f"park {cycle} left more on the device than the first"
            residue = rig.wake()
            assert not emulated or rig.on_device() == awake, f"wake {cycle} took more of the device than the first"
            left = rig.on_host()
            assert left <= -(-residue.host_bytes // _PAGE) * _PAGE, (
                f"{shown(left)} of host buffers are in use after wake {cycle}, which said {shown(residue.host_bytes)}"
            )
        grown = process_memory() - before
        assert grown <= self.host_slack, f"{self.cycles} parks and wakes left {shown(grown)} in the process's memory"

    # --- the host copy ---

    def test_host_offload_bytes_answers_bytes_declined_or_none(self, plugin: Any, rig: Rig) -> None:
        """Anything else would pass for an engine that can't park."""
        rig.load()
        answer = call_hook(plugin, "host_offload_bytes", engine=rig.engine)
        fits = answer is None or isinstance(answer, Declined) or (type(answer) is int and answer >= 0)
        assert fits, f"host_offload_bytes answered {answer!r}: an int (bytes, 0 or more), Declined(reason) or None"
        if isinstance(answer, int):
            missing = [name for name in ("offload_to_host", "restore_from_host") if getattr(plugin, name, None) is None]
            assert not missing, f"the plugin answers host_offload_bytes and has no {' and no '.join(missing)}"

    def test_the_host_copy_is_in_the_buffers_of_the_core(self, rig: Rig, own_host_memory: bool) -> None:
        """The core books those and no others."""
        if own_host_memory:
            pytest.skip("the fixture `own_host_memory` says that the copy is in another process")
        rig.load()
        rig.announce()
        rig.park()
        if rig.wake().droppable:
            rig.drop()
        before = process_memory()
        offload = rig.park()
        booked = rig.on_host()
        assert booked >= offload.host_bytes, (
            f"offload_to_host said that it holds {shown(offload.host_bytes)} on the host, and {shown(booked)} of that "
            "are in buffers of ctx.host_buffer"
        )
        own = process_memory() - before - booked
        assert own <= self.host_slack, f"a park took {shown(own)} of memory beside the buffers of ctx.host_buffer"

    def test_the_host_copy_takes_no_more_than_was_announced(self, rig: Rig) -> None:
        rig.load()
        announced = rig.announce()
        held = rig.park().host_bytes
        booked = -(-announced // _PAGE) * _PAGE
        assert held <= booked, f"a park took {shown(held)}, and host_offload_bytes announced {shown(announced)}"
        assert rig.taken <= booked, (
            f"a park asked for {shown(rig.taken)} of host buffers, and host_offload_bytes announced {shown(announced)}"
        )

    def test_a_dropped_backup_is_let_go_of(self, rig: Rig) -> None:
        rig.load()
        rig.announce()
        rig.park()
        residue = rig.wake()
        if not residue.host_bytes:
            left = rig.on_host()
            assert left == 0, f"restore_from_host said that it holds nothing on the host, and {shown(left)} are in use"
            pytest.skip("the engine keeps no backup")
        if not residue.droppable:
            pytest.skip("the engine's backup can't be dropped")
        dropped = rig.drop()
        assert dropped == residue.host_bytes, f"drop_backup freed {shown(dropped)} of {shown(residue.host_bytes)}"
        left = rig.on_host()
        assert left == 0, f"drop_backup said that {shown(dropped)} are free, and {shown(left)} of them are in use"

    def test_the_probe_sees_damaged_weights(self, rig: Rig) -> None:
        """Else the wake check would let any damage pass. What raises has seen it, too."""
        rig.load()
        rig.announce()
        before = rig.probe()
        if before is None:
            pytest.skip("the engine has no probe: what it answers after a wake is not checked")
        rig.park()
        if not rig.damage_copy():
            pytest.skip("the copy is not in the host buffers, where the suite could damage it")
        try:
            rig.wake()
            after = rig.probe()
        except Exception:
            return
        assert after is None or not rig.engine.probe_matches(before, after), (
            "the probe answers the same after every weight was changed: it must depend on the weights"
        )

    def test_a_woken_engine_shows_that_it_lives(self, rig: Rig) -> None:
        """The core asks after every wake, and loads a model again that does not answer ``True``."""
        rig.load()
        rig.announce()
        for wake in (1, 2):
            rig.park()
            rig.wake()
            answer = rig.alive()
            assert answer is True, f"alive() answered {answer!r} after wake {wake}, where True was due"

    # --- inside ---

    @staticmethod
    def _compare(rig: Rig, when: str) -> None:
        said, held = rig.said(), rig.on_device()
        if said is not None:
            assert abs(said - held) <= rig.slack, (
                f"{when}, memory() says {shown(said)}, and the engine's device buffers hold {shown(held)}"
            )

    @staticmethod
    def _parks(rig: Rig) -> bool:
        return type(call_hook(rig.plugin, "host_offload_bytes", engine=rig.engine)) is int
