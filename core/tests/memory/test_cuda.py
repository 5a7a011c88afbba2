"""CUDA devices through a made-up NVML: it stands in for hardware that the machines of the test suite don't have."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sie_core.memory.device import CudaDevice, probe_all, probe_cuda

GIB = 2**30


class NVMLError(Exception):
    """As the library's: ``value`` is the driver's return code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class Nvml:
    """The part of ``pynvml`` that is used, over a list of made-up devices."""

    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    nvmlMemory_v2 = 0x2000028

    def __init__(self, *devices: SimpleNamespace, error: int | None = None) -> None:
        self.devices = devices
        self.error = error

    def nvmlInit(self) -> None:
        if self.error is not None:
            raise NVMLError(self.error)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> SimpleNamespace:
        if not 0 <= index < len(self.devices):
            raise NVMLError(2)
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> SimpleNamespace:
        for device in self.devices:
            slices: dict[str, SimpleNamespace] = getattr(device, "slices", {})
            if uuid in slices:
                return slices[uuid]
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, device: SimpleNamespace) -> str:
        return str(device.uuid)

    def nvmlDeviceGetName(self, device: SimpleNamespace) -> str:
        return str(device.name)

    def nvmlDeviceGetMemoryInfo(self, device: SimpleNamespace, version: int | None = None) -> SimpleNamespace:
        if device.free is None:
            raise NVMLError(3)
        reserved = GIB // 2 if version else 0
        used = device.total - device.free - reserved
        return SimpleNamespace(total=device.total, free=device.free, used=used, reserved=reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, device: SimpleNamespace) -> list[SimpleNamespace]:
        if device.processes is None:
            raise NVMLError(3)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in device.processes]


def gpu(number: int, *, name: str = "NVIDIA H200", total: int = 140 * GIB, free: int | None = None) -> SimpleNamespace:
    uuid = f"GPU-{number}5a1b2c3-0000-0000-0000-00000000000{number}"
    return SimpleNamespace(uuid=uuid, name=name, total=total, free=total if free is None else free, processes=[])


def names(devices: list[CudaDevice]) -> list[tuple[str, str]]:
    return [(device.name, device.uuid[4]) for device in devices]


def test_a_machine_without_a_driver_has_no_devices(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert probe_cuda({}, nvml=Nvml(error=12)) == []
    assert not caplog.records


def test_a_broken_driver_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert probe_cuda({}, nvml=Nvml(error=18)) == []
    assert "code 18" in caplog.text


def test_the_real_library_never_raises() -> None:
    assert isinstance(probe_cuda(), list)


def test_a_device_and_its_figures() -> None:
    nvml = Nvml(gpu(0, free=100 * GIB))
    [device] = probe_cuda({}, nvml=nvml)
    assert (device.name, device.kind, device.description) == ("cuda:0", "cuda", "NVIDIA H200, 140.0 GiB")
    assert device.total() == 140 * GIB
    assert device.used() == 40 * GIB, "what the driver keeps for itself is in use too"
    nvml.devices[0].free = 90 * GIB
    assert device.used() == 50 * GIB


def test_an_older_driver_or_binding() -> None:
    class Old(Nvml):
        def nvmlDeviceGetMemoryInfo(self, device: Any, version: int | None = None) -> SimpleNamespace:
            if version:
                raise NVMLError(25)
            return super().nvmlDeviceGetMemoryInfo(device)

        def nvmlDeviceGetName(self, device: Any) -> Any:
            return device.name.encode()

    class Older(Old):
        nvmlMemory_v2 = None  # type: ignore[assignment]

    for nvml in (Old(gpu(0, free=100 * GIB)), Older(gpu(0, free=100 * GIB))):
        [device] = probe_cuda({}, nvml=nvml)
        assert (device.used(), device.description) == (40 * GIB, "NVIDIA H200, 140.0 GiB")


def test_a_driver_that_stops_telling() -> None:
    nvml = Nvml(gpu(0))
    [device] = probe_cuda({}, nvml=nvml)
    nvml.devices[0].free = None
    assert device.used() is None and device.total() == 140 * GIB


def test_one_process() -> None:
    nvml = Nvml(gpu(0))
    [device] = probe_cuda({}, nvml=nvml)
    nvml.devices[0].processes = [(7, 5 * GIB), (8, GIB), (7, GIB), (9, None)]
    assert device.process_used(7) == 6 * GIB
    assert device.process_used(9) is None, "a container is not told"
    assert device.process_used(10) is None, "nor can it find its own number"
    nvml.devices[0].processes = None
    assert device.process_used(7) is None


def test_frameworks_allocate_there_themselves() -> None:
    [device] = probe_cuda({}, nvml=Nvml(gpu(0)))
    with pytest.raises(TypeError):
        device.allocate(1)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2", "2"),
        ("3,1", "31"),
        (" 1 , 0 ", "10"),
        ("1,7,0", "1"),
        ("1,-1,0", "1"),
        ("1,1", ""),
        ("GPU-25a1b2c3-0000-0000-0000-000000000002", "2"),
        ("GPU-25,GPU-05a1", "20"),
        ("GPU-", ""),
        ("GPU-9", ""),
        ("1,GPU-1", ""),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible: str | None, expected: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    devices = probe_cuda(environ, nvml=Nvml(*(gpu(number) for number in range(4))))
    assert names(devices) == [(f"cuda:{place}", number) for place, number in enumerate(expected)]


def test_a_slice_of_a_device() -> None:
    whole = gpu(0)
    whole.slices = {"MIG-7": SimpleNamespace(**{**vars(gpu(1, total=20 * GIB)), "uuid": "MIG-7"})}
    [device] = probe_cuda({"CUDA_VISIBLE_DEVICES": "MIG-7"}, nvml=Nvml(whole))
    assert (device.name, device.uuid, device.total()) == ("cuda:0", "MIG-7", 20 * GIB)
    assert probe_cuda({"CUDA_VISIBLE_DEVICES": "MIG-8"}, nvml=Nvml(whole)) == []


def test_a_device_that_cant_be_read_shifts_no_names(caplog: pytest.LogCaptureFixture) -> None:
    nvml = Nvml(gpu(0), gpu(1), gpu(2))
    nvml.devices[1].free = None
    with caplog.at_level(logging.WARNING):
        assert names(probe_cuda({}, nvml=nvml)) == [("cuda:0", "0")]
    assert "number 1" in caplog.text


@pytest.mark.parametrize(("order", "warned"), [(None, True), ("FASTEST_FIRST", True), ("PCI_BUS_ID", False)])
def test_different_devices_need_an_order(order: str | None, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    with caplog.at_level(logging.WARNING):
        probe_cuda(environ, nvml=Nvml(gpu(0), gpu(1, name="NVIDIA L4", total=24 * GIB)))
    assert ("PCI_BUS_ID" in caplog.text) == warned


# --- all devices -------------------------------------------------------------------------------------


def test_accelerators_come_first_and_the_cpu_last() -> None:
    devices = probe_all(environ={}, nvml=Nvml(gpu(0), gpu(1)))
    assert [device.name for device in devices] == ["cuda:0", "cuda:1", "cpu"]


@pytest.mark.parametrize("emulate", [None, 0])
def test_without_accelerators_there_is_the_cpu(emulate: int | None) -> None:
    [cpu] = probe_all(emulate=emulate, environ={}, nvml=Nvml(error=12))
    assert (cpu.name, cpu.kind, cpu.used()) == ("cpu", "cpu", None)
    assert cpu.total() > 0 and cpu.description.startswith("CPU, ")
    with pytest.raises(TypeError):
        cpu.allocate(1)


def test_an_emulated_device_takes_the_place_of_the_others() -> None:
    devices = probe_all(emulate=2**20, environ={}, nvml=Nvml(gpu(0)))
    assert [(device.name, device.kind) for device in devices] == [("emulated:0", "emulated"), ("cpu", "cpu")]
    assert devices[0].total() == 2**20
