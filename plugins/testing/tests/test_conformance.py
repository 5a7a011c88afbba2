"""The fake adapter passes the suite that every adapter has to pass, in each of its shapes."""

from __future__ import annotations

from typing import Any

import pytest
from sie_core import Adapter, DeviceOutOfMemory, ModelSpec
from sie_core.memory.device import EmulatedDevice
from sie_testing import AdapterConformance, FakeAdapter, FakeEngine, FakeOptions, make_context, plugin, reserve_for

MIB = 1 << 20


class Events:
    def died(self, reason: str, details: str = "") -> None: ...

    def request_growth(self, account: str, nbytes: int) -> bool:
        return False


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

    @pytest.fixture
    def device(self) -> EmulatedDevice | None:
        return None  # its bytes are made up: no device could count them

    @pytest.fixture
    def own_host_memory(self) -> bool:
        return not self.options.allocate

    @pytest.fixture
    def missing_model(self) -> ModelSpec:
        return ModelSpec("missing", "fake", options=FakeOptions(fail_load="ModelSourceNotFound"))


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


class TestEveryOutput(FakeConformance):
    options = FakeOptions(outputs=("dense", "sparse", "multivector"))


class TestComparedVectors(FakeConformance):
    options = FakeOptions(outputs=("multivector",), compares="multivector", tasks=("encode", "score"))


class TestSparse(FakeConformance):
    options = FakeOptions(outputs=("sparse",))


class TestScores(FakeConformance):
    options = FakeOptions(tasks=("score",))


class TestExtractions(FakeConformance):
    options = FakeOptions(tasks=("extract",))

    @pytest.fixture
    def labels(self) -> tuple[str, ...]:
        return ("text", "one", "short", "before")

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        return ("a short text", "one", "a text that is rather longer than the two that came before it", "the last one")


class TestEveryTask(TestExtractions):
    options = FakeOptions(tasks=("encode", "score", "extract"))


class TestRealBytes(FakeConformance):
    """On the device that the suite makes by itself."""

    options = FakeOptions(weights_bytes=3 * MIB + 17, context_bytes=MIB, allocate=True)
    device = AdapterConformance.device


class TestRealBytesAndKeptBackup(TestRealBytes):
    options = FakeOptions(weights_bytes=MIB, allocate=True, backup=True)


class TestRealBytesOnTooSmallADevice:
    def test_a_load_that_runs_out_of_memory_gives_back_what_it_took(self) -> None:
        device = EmulatedDevice("emulated:0", 4 * MIB)
        model = ModelSpec("m", "fake", options=FakeOptions(weights_bytes=3 * MIB, context_bytes=2 * MIB, allocate=True))
        with pytest.raises(DeviceOutOfMemory) as caught:
            FakeAdapter().load(model, make_context(reserve_for(model), device), Events())
        assert caught.value.account == "emulated:0"
        assert device.used() == 0
        device.close()

    def test_a_wake_that_runs_out_of_memory_keeps_its_copy(self) -> None:
        device = EmulatedDevice("emulated:0", 4 * MIB)
        model = ModelSpec("m", "fake", options=FakeOptions(weights_bytes=3 * MIB, allocate=True))
        ctx = make_context(reserve_for(model), device)
        engine = FakeAdapter().load(model, ctx, Events())
        assert isinstance(engine, FakeEngine)
        before = engine.probe(ctx)
        engine.offload(ctx)
        assert device.used() == 0
        other = device.allocate(2 * MIB)
        with pytest.raises(DeviceOutOfMemory):
            engine.restore(ctx)
        assert engine.parked
        other.free()
        engine.restore(ctx)
        assert engine.probe(ctx) == before
        assert device.used() == 3 * MIB
        engine.close(ctx)
        device.close()

    def test_damage_to_real_bytes_is_seen_by_the_probe(self) -> None:
        device = EmulatedDevice("emulated:0", 4 * MIB)
        options = FakeOptions(weights_bytes=MIB, allocate=True, corrupt_restore=True)
        model = ModelSpec("m", "fake", options=options)
        ctx = make_context(reserve_for(model), device)
        engine = FakeAdapter().load(model, ctx, Events())
        assert isinstance(engine, FakeEngine)
        before = engine.probe(ctx)
        engine.offload(ctx)
        engine.restore(ctx)
        assert engine.probe(ctx) != before
        engine.close(ctx)
        device.close()
