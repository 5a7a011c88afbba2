"""The emulated device: real bytes of a fixed budget, never more and never less."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from random import Random

import hypothesis.strategies as st
import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
from hypothesis import given, settings
from sie_core.adapter import Device, DeviceBuffer
from sie_core.errors import DeviceOutOfMemory, HostOutOfMemory
from sie_core.memory.emulated import EmulatedBuffer, EmulatedDevice

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice("emulated:0", 4 * MIB)
    yield device
    device.close()


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def test_it_is_a_device(device: EmulatedDevice) -> None:
    checked: Device = device
    assert (checked.name, checked.kind, checked.total(), checked.used()) == ("emulated:0", "emulated", 4 * MIB, 0)
    assert checked.description == "emulated accelerator, 4.0 MiB of RAM"
    buffer = checked.allocate(5)
    assert isinstance(buffer, DeviceBuffer)
    buffer.free()


def test_a_buffer_is_writable_aligned_and_as_long_as_asked(device: EmulatedDevice) -> None:
    buffer = device.allocate(PAGE + 1)
    assert len(buffer.view) == buffer.nbytes == PAGE + 1
    buffer.view[:] = b"\x07" * (PAGE + 1)
    assert bytes(buffer.view[-2:]) == b"\x07\x07" and not buffer.view.readonly
    assert device.used() == 2 * PAGE, "charged by pages"
    buffer.free()
    assert device.used() == 0


def test_buffers_do_not_overlap(device: EmulatedDevice) -> None:
    first, second = device.allocate(MIB), device.allocate(MIB)
    first.view[:] = b"a" * MIB
    second.view[:] = b"b" * MIB
    assert bytes(first.view) == b"a" * MIB
    first.free()
    second.free()


def test_freeing_twice_is_once(device: EmulatedDevice) -> None:
    first, second = device.allocate(MIB), device.allocate(MIB)
    first.free()
    first.free()
    assert device.used() == MIB
    with pytest.raises(ValueError, match="released"):
        first.view[0]
    second.free()


def test_a_buffer_that_is_let_go_of_is_freed_with_its_last_view(device: EmulatedDevice) -> None:
    """D3: no byte is lost with a buffer whose owner forgot to free it, and none is taken from under a view."""
    view = device.allocate(MIB).view
    array = np.frombuffer(view, dtype=np.uint8)
    view[:] = b"\x05" * MIB
    del view
    gc.collect()
    assert device.used() == MIB, "an array looks into it"
    assert array.sum() == 5 * MIB
    del array
    assert device.used() == 0
    for _ in range(20):
        device.allocate(4 * MIB)
        assert device.used() == 0
    device.allocate(4 * MIB).free()
    assert device.used() == 0


def test_buffers_lost_in_a_cycle_come_back_whenever_they_are_collected(device: EmulatedDevice) -> None:
    """D3: the collector may run inside an allocation, in the thread that holds the device's lock."""
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(1)
    try:
        for _ in range(100):
            cycle: list[object] = [device.allocate(MIB)]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
        if not enabled:
            gc.disable()
    gc.collect()
    assert device.used() == 0


def test_the_process_keeps_its_size_when_buffers_are_let_go_of() -> None:
    """D3: what is dropped goes back into the reserve."""
    device = EmulatedDevice("emulated:0", 64 * MIB)
    before = rss()
    for _ in range(5):
        device.allocate(32 * MIB).view[:] = bytes(32 * MIB)
    device.allocate(PAGE).free()
    assert abs(rss() - before) < 4 * MIB
    device.close()


def test_the_last_byte_can_be_had_and_no_more(device: EmulatedDevice) -> None:
    buffer = device.allocate(4 * MIB - PAGE)
    with pytest.raises(DeviceOutOfMemory) as caught:
        device.allocate(PAGE + 1)
    assert (caught.value.account, caught.value.needed, caught.value.free) == ("emulated:0", 2 * PAGE, PAGE)
    assert "emulated:0" in caught.value.message
    last = device.allocate(PAGE)
    assert device.used() == 4 * MIB
    buffer.free()
    last.free()
    device.allocate(4 * MIB).free()


def test_a_buffer_of_nothing(device: EmulatedDevice) -> None:
    buffer = device.allocate(0)
    assert (len(buffer.view), device.used()) == (0, 0)
    buffer.free()
    with pytest.raises(ValueError, match="-1"):
        device.allocate(-1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_device_needs_a_size(nbytes: int) -> None:
    with pytest.raises(ValueError, match="size"):
        EmulatedDevice("emulated:0", nbytes)


def test_a_device_larger_than_the_address_space() -> None:
    with pytest.raises(HostOutOfMemory):
        EmulatedDevice("emulated:0", 2**60)


def test_who_still_looks_into_a_freed_buffer_sees_zeros_and_spoils_nothing(device: EmulatedDevice) -> None:
    buffer = device.allocate(4 * MIB)
    buffer.view[:4] = b"mine"
    looker = buffer.view[:4]
    buffer.free()
    assert device.used() == 0 and bytes(looker) == b"\0\0\0\0"
    other = device.allocate(4 * MIB)
    other.view[:4] = b"ours"
    looker[:] = b"evil"
    assert bytes(other.view[:4]) == b"ours"
    other.free()


def test_fragments_do_not_stand_in_the_way(device: EmulatedDevice) -> None:
    """Every other of a thousand small buffers goes; what is free is had in one piece."""
    small = [device.allocate(PAGE) for _ in range(4 * MIB // PAGE)]
    for buffer in small[::2]:
        buffer.free()
    large = device.allocate(2 * MIB)
    assert device.used() == 4 * MIB
    for buffer in (*small, large):
        buffer.free()


def test_a_closed_device_gives_nothing_and_takes_back_what_lives() -> None:
    device = EmulatedDevice("emulated:0", MIB)
    buffer = device.allocate(PAGE)
    device.close()
    with pytest.raises(DeviceOutOfMemory):
        device.allocate(PAGE)
    buffer.view[0] = 1
    buffer.free()
    assert device.used() == 0
    device.close()


def test_many_threads_never_have_more_than_the_budget(device: EmulatedDevice) -> None:
    start, over = threading.Barrier(8), []

    def churn(seed: int) -> None:
        random = Random(seed)
        held: list[EmulatedBuffer] = []
        start.wait()
        for _ in range(300):
            if held and random.random() < 0.5:
                held.pop(random.randrange(len(held))).free()
                continue
            try:
                buffer = device.allocate(random.choice([PAGE, 3 * PAGE, MIB // 2, MIB]))
            except DeviceOutOfMemory:
                continue
            buffer.view[0] = seed
            held.append(buffer)
            if (device.used() or 0) > device.total():
                over.append(device.used())
        for buffer in held:
            if buffer.view[0] != seed:
                over.append(seed)
            buffer.free()

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over and device.used() == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 80 * 1024), st.booleans()), max_size=60))
def test_the_parts_always_come_to_the_budget(steps: list[tuple[bool, int, bool]]) -> None:
    """Whatever is taken and given back: used() is the live buffers, and the rest can be had in one piece."""
    device = EmulatedDevice("emulated:0", 256 * 1024)
    live: list[EmulatedBuffer] = []
    lookers = []
    for number, (take, nbytes, look) in enumerate(steps):
        size = -(-nbytes // PAGE) * PAGE
        if take:
            free = device.total() - (device.used() or 0)
            if size > free:
                with pytest.raises(DeviceOutOfMemory):
                    device.allocate(nbytes)
                continue
            buffer = device.allocate(nbytes)
            buffer.view[:] = bytes([number % 251]) * nbytes
            live.append(buffer)
        elif live:
            buffer = live.pop(nbytes % len(live))
            assert len(set(buffer.view)) == 1, "somebody else wrote into it"
            if look:
                lookers.append(buffer.view[:1])
            buffer.free()
        assert device.used() == sum(-(-buffer.nbytes // PAGE) * PAGE for buffer in live)
    device.allocate(device.total() - (device.used() or 0)).free()
    device.close()


def test_the_process_stays_as_large_as_the_budget() -> None:
    """Set aside and touched at start, as a device's memory is; no cycle of models makes it grow or shrink."""
    budget, random = 64 * MIB, Random(3)
    before = rss()
    device = EmulatedDevice("emulated:0", budget)
    tolerance = 8 * MIB
    assert budget - tolerance < rss() - before < budget + tolerance
    live: list[EmulatedBuffer] = []
    for _ in range(40):
        nbytes = random.choice([20 * MIB, 9 * MIB + 4096, random.randrange(1, 30 * MIB)])
        while (device.used() or 0) + nbytes + PAGE > budget:
            live.pop(random.randrange(len(live))).free()
        buffer = device.allocate(nbytes)
        buffer.view[:: PAGE // 2] = bytes(len(range(0, nbytes, PAGE // 2)))
        live.append(buffer)
        assert abs(rss() - before - budget) < tolerance
    for buffer in live:
        buffer.free()
    assert abs(rss() - before - budget) < tolerance
    device.close()
    assert rss() - before < tolerance
