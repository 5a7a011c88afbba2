"""The core's contract for adapters, for the families whose vectors are not dense alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from family_scenes import Emulated, Family
from sie_core import ModelSpec


def beside(name: str) -> Any:
    """A test module of this folder, for how it makes its models."""
    spec = importlib.util.spec_from_file_location(f"beside_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sparse(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        folder = make.transformer(tmp_path / "splade", head="AutoModelForMaskedLM")
        return make.spec(folder, "torch-sparse", top_k=12)  # type: ignore[no-any-return]


class TestSparseOnTheCpu(Sparse):
    pass


class TestSparseOnAnEmulatedDevice(Emulated, Sparse):
    pass


class Multivector(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        folder = beside("test_multivector").save_pylate(tmp_path / "colbert", make)
        return make.spec(folder, "torch-multivector")  # type: ignore[no-any-return]


class TestMultivectorOnTheCpu(Multivector):
    pass


class TestMultivectorOnAnEmulatedDevice(Emulated, Multivector):
    pass


class BgeM3(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        folder = beside("test_bge_m3").save_bge_m3(tmp_path / "bge-m3", make)
        return make.spec(folder, "torch-bge-m3")  # type: ignore[no-any-return]


class TestBgeM3OnTheCpu(BgeM3):
    pass


class TestBgeM3OnAnEmulatedDevice(Emulated, BgeM3):
    pass
