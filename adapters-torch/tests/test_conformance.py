"""The core's contract for adapters, on a small model: on the CPU and on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sie_adapters_torch import plugin as torch_plugin
from sie_adapters_torch.dense import DenseAdapter
from sie_core import Adapter, Device, ModelSpec
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import AdapterConformance


class Dense(AdapterConformance):
    @pytest.fixture
    def device(self) -> Device | None:
        return None  # the CPU

    @pytest.fixture
    def adapter(self) -> Adapter:
        return DenseAdapter()

    @pytest.fixture
    def model(self, make: Any, tiny_bert: Path) -> ModelSpec:
        return make.spec(tiny_bert)  # type: ignore[no-any-return]

    @pytest.fixture
    def plugin(self) -> Any:
        return torch_plugin

    @pytest.fixture
    def missing_model(self, make: Any, tmp_path: Path) -> ModelSpec:
        return make.spec(tmp_path / "nowhere")  # type: ignore[no-any-return]

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        return ("a red fox", "dog", "the quick fox jumps over the lazy dog under a blue house", "the river runs")


class TestDenseOnTheCpu(Dense):
    pass


class TestDenseOnAnEmulatedDevice(Dense):
    @pytest.fixture
    def device(self) -> Device:
        return EmulatedDevice("emulated:0", 8 * 1024 * 1024)
