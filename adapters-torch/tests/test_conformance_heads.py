"""The core's contract for adapters, for the families with a classifier's head: on the CPU and on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sie_adapters_torch import plugin as torch_plugin
from sie_core import Adapter, Device, Item, ModelSpec
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import AdapterConformance


class Family(AdapterConformance):
    @pytest.fixture
    def plugin(self) -> Any:
        return torch_plugin

    @pytest.fixture
    def adapter(self, model: ModelSpec) -> Adapter:
        return torch_plugin._ADAPTERS[model.adapter]()

    @pytest.fixture
    def missing_model(self, make: Any, model: ModelSpec, tmp_path: Path) -> ModelSpec:
        return make.spec(tmp_path / "nowhere", model.adapter)  # type: ignore[no-any-return]

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        return ("a red fox", "dog", "the quick fox jumps over the lazy dog under a blue house", "the river runs")


class Emulated:
    @pytest.fixture
    def device(self) -> Device:
        return EmulatedDevice("emulated:0", 8 * 1024 * 1024)


class CrossEncoder(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        folder = make.transformer(tmp_path / "ranker", head="AutoModelForSequenceClassification", num_labels=1)
        return make.spec(folder, "torch-cross-encoder", activation="identity")  # type: ignore[no-any-return]

    @pytest.fixture
    def query(self) -> Item:
        return Item(text="a quick dog")


class TestCrossEncoderOnTheCpu(CrossEncoder):
    pass


class TestCrossEncoderOnAnEmulatedDevice(Emulated, CrossEncoder):
    pass
