"""What the tests of all families share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sie_adapters_torch import plugin as torch_plugin
from sie_core import Adapter, Device, DeviceView, ModelSpec
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import AdapterConformance

__all__ = ["Emulated", "Family", "check_reserved"]


class Family(AdapterConformance):
    @pytest.fixture
    def device(self) -> Device | None:
        return None  # the CPU

    @pytest.fixture
    def plugin(self) -> Any:
        return torch_plugin

    @pytest.fixture
    def adapter(self, model: ModelSpec) -> Adapter:
        return torch_plugin._adapters()[model.adapter]()

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


def check_reserved(load: Any, model: ModelSpec) -> None:
    """What a model holds once it is loaded was reserved for it, and not much more."""
    answer = torch_plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    held = load(model).memory().devices["cpu"]
    assert held <= answer.ranks[0].min_bytes < held + 128 * 1024
