"""The core's contract for adapters, for image and text encoders: on the CPU and on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sie_adapters_torch import plugin as torch_plugin
from sie_adapters_torch.image_text import ImageTextAdapter
from sie_core import Adapter, Device, ModelSpec
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import AdapterConformance

pytest.importorskip("PIL", reason="images need Pillow: pip install 'sie-adapters-torch[images]'")


class ImageText(AdapterConformance):
    @pytest.fixture
    def device(self) -> Device | None:
        return None  # the CPU

    @pytest.fixture
    def plugin(self) -> Any:
        return torch_plugin

    @pytest.fixture
    def adapter(self) -> Adapter:
        return ImageTextAdapter()

    @pytest.fixture
    def missing_model(self, make: Any, tmp_path: Path) -> ModelSpec:
        return make.spec(tmp_path / "nowhere", "torch-image-text")  # type: ignore[no-any-return]

    @pytest.fixture
    def texts(self) -> tuple[str, ...]:
        return ("a red fox", "dog", "the quick fox jumps over the lazy dog", "the river runs")


class TestClipOnTheCpu(ImageText):
    @pytest.fixture
    def model(self, make: Any, dual_encoders: dict[str, Path]) -> ModelSpec:
        return make.spec(dual_encoders["clip"], "torch-image-text")  # type: ignore[no-any-return]


class TestSiglipOnAnEmulatedDevice(ImageText):
    @pytest.fixture
    def model(self, make: Any, dual_encoders: dict[str, Path]) -> ModelSpec:
        return make.spec(dual_encoders["siglip"], "torch-image-text")  # type: ignore[no-any-return]

    @pytest.fixture
    def device(self) -> Device:
        return EmulatedDevice("emulated:0", 8 * 1024 * 1024)
