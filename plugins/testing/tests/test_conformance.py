"""The fake adapter passes the suite that every adapter has to pass, in each of its shapes."""

from __future__ import annotations

from typing import Any

import pytest
from sie_core import Adapter, DeviceBuffer, DeviceOutOfMemory, ModelSpec
from sie_testing import AdapterConformance, FakeAdapter, FakeOptions, plugin

MIB = 1 << 20


class Buffer:
    def __init__(self, device: PretendDevice, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        self._device: PretendDevice | None = device
        self._nbytes = nbytes

    def free(self) -> None:
        if self._device is not None:
            self._device.taken -= self._nbytes
            self._device = None


class PretendDevice:
    """The least that stands for an emulated device: it counts, and it can be full."""

    name = "emulated:0"
    kind = "emulated"
    description = "64 MiB of made-up device"
    taken = 0

    def total(self) -> int:
        return 64 * MIB

    def used(self) -> int:
        return self.taken

    def allocate(self, nbytes: int) -> DeviceBuffer:
        if self.taken + nbytes > self.total():
            raise DeviceOutOfMemory("full", account=self.name, needed=nbytes, free=self.total() - self.taken)
        self.taken += nbytes
        return Buffer(self, nbytes)


class FakeConformance(AdapterConformance):
    options = FakeOptions()

    @pytest.fixture
    def adapter(self) -> Adapter:
        return FakeAdapter()

    @pytest.fixture
    def model(self) -> ModelSpec:
        return ModelSpec(type(self).__name__, "fake", options=self.options)

    @pytest.fixture
    def plugin(self) -> Any:
        return plugin


class TestMadeUpBytes(FakeConformance):
    options = FakeOptions(weights_bytes=3 * MIB, context_bytes=MIB, host_bytes=1000, want_bytes=4 * MIB)


class TestPool(FakeConformance):
    options = FakeOptions(context_bytes=MIB, headroom_bytes=MIB, pool="torch")


class TestSeveralDevices(FakeConformance):
    options = FakeOptions(ranks=3, context_bytes=MIB)


class TestUnknownBytes(FakeConformance):
    options = FakeOptions(realised=None)


class TestKeptBackup(FakeConformance):
    options = FakeOptions(backup=True)


class TestRealBytes(FakeConformance):
    options = FakeOptions(weights_bytes=3 * MIB + 17, context_bytes=MIB, allocate=True)

    shared_device = PretendDevice()

    @pytest.fixture
    def device(self) -> PretendDevice:
        return self.shared_device

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        assert cls.shared_device.used() == 0


class TestRealBytesAndKeptBackup(TestRealBytes):
    options = FakeOptions(weights_bytes=MIB, allocate=True, backup=True)
