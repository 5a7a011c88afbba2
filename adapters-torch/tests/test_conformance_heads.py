"""The core's contract for adapters, for the families with a classifier's head: on the CPU and on an emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_scenes import Emulated, Family
from sie_core import Item, ModelSpec


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


class Entities(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        labels = dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))
        settings = {"head": "AutoModelForTokenClassification", "num_labels": 5, "id2label": labels}
        return make.spec(make.transformer(tmp_path / "tagger", **settings), "torch-entities")  # type: ignore[no-any-return]


class TestEntitiesOnTheCpu(Entities):
    pass


class TestEntitiesOnAnEmulatedDevice(Emulated, Entities):
    pass


class Classifier(Family):
    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        settings = {"head": "AutoModelForSequenceClassification", "num_labels": 3}
        return make.spec(make.transformer(tmp_path / "model", **settings), "torch-classifier")  # type: ignore[no-any-return]


class TestClassifierOnTheCpu(Classifier):
    pass


class TestClassifierOnAnEmulatedDevice(Emulated, Classifier):
    pass


class ByInference(Family):
    """Labels that the request brings."""

    @pytest.fixture
    def model(self, make: Any, tmp_path: Path) -> ModelSpec:
        names = dict(enumerate(("contradiction", "neutral", "entailment")))
        settings = {"head": "AutoModelForSequenceClassification", "num_labels": 3, "id2label": names, "limit": 36}
        return make.spec(make.transformer(tmp_path / "nli", **settings), "torch-classifier")  # type: ignore[no-any-return]

    @pytest.fixture
    def labels(self) -> tuple[str, ...]:
        return ("fox",)


class TestByInferenceOnAnEmulatedDevice(Emulated, ByInference):
    pass
