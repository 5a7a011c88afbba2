"""The suites that every adapter has to pass, over the engine that keeps SGLang's rules and dies when one is broken."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sie_adapters_sglang import _plan
from sie_adapters_sglang import plugin as sglang
from sie_adapters_sglang.adapters import GenerationAdapter, GenerationOptions
from sie_core import Adapter, ModelSpec, Source
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import GenerationConformance, LoraConformance

MIB = 1 << 20
HOW = {"token_s": 0.002, "word": "Bär🐻漢", "weights_gb": 1 / 64, "kv_gb": 1 / 32}


@pytest.fixture(scope="class")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One engine serves all the tests of a class, so its folders are the class's as well."""
    folder = tmp_path_factory.mktemp("places")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIE_STATE_DIR", str(folder / "state"))
        patch.setenv("SIE_CACHE_DIR", str(folder / "cache"))
        _plan.cost_cache.cache_clear()
        yield folder


@pytest.fixture
def folders(places: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of those of each test."""
    return places


class Ours:
    options: ClassVar[Mapping[str, Any]] = {}
    emulated: EmulatedDevice | None = None

    @pytest.fixture
    def adapter(self) -> Adapter:
        return GenerationAdapter()

    @pytest.fixture
    def plugin(self) -> Any:
        return sglang

    @pytest.fixture
    def own_host_memory(self) -> bool:
        return True

    @pytest.fixture
    def device(self) -> EmulatedDevice | None:
        return self.emulated

    @pytest.fixture
    def model(self, places: Path, helpers: Any) -> ModelSpec:
        folder, info = places / "model", places / "site" / "sglang-0.5.20.dist-info"
        if not folder.exists():
            helpers.save_model(folder, width=2048, rows=4096)
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
        path = os.pathsep.join([str(helpers.support / "standin"), str(info.parent)])
        settings = {"python": sys.executable, "max_total_tokens": 4096, "stop_timeout_s": 2.0, **self.options}
        options = GenerationOptions(env={"PYTHONPATH": path, "STANDIN": json.dumps(HOW)}, **settings)
        return ModelSpec("tiny", "sglang-generation", Source("path", str(folder)), options=options)


class TestGeneration(Ours, GenerationConformance):
    @pytest.fixture
    def missing_model(self, model: ModelSpec) -> ModelSpec:
        return ModelSpec("gone", model.adapter, Source("path", "/there/is/no/such/folder"), options=model.options)

    @pytest.fixture
    def long(self) -> Mapping[str, Any]:
        return {"max_tokens": 50_000}

    @pytest.fixture
    def refused(self) -> Mapping[str, Any]:
        return {"max_tokens": 10**6}

    @pytest.fixture
    def running(self, helpers: Any) -> Callable[[Any], int]:
        return lambda engine: int(helpers.told(engine)["running"])

    @pytest.fixture
    def abort(self) -> Callable[[Any], object]:
        return lambda engine: engine.parking.control.abort_all()


class TestGenerationOnAnEmulatedDevice(TestGeneration):
    """Where it can be parked."""

    @classmethod
    def setup_class(cls) -> None:
        cls.emulated = EmulatedDevice("emulated:0", 256 * MIB)

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        assert cls.emulated is not None
        assert cls.emulated.used() == 0
        cls.emulated.close()


class TestLoras(Ours, LoraConformance):
    cycles, loads = 3, 1  # the class above has the whole of it
    options: ClassVar[Mapping[str, Any]] = {"max_loras": 2}

    @classmethod
    def setup_class(cls) -> None:
        cls.emulated = EmulatedDevice("emulated:0", 256 * MIB)

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        assert cls.emulated is not None
        assert cls.emulated.used() == 0
        cls.emulated.close()

    @pytest.fixture
    def sources(self, places: Path) -> Sequence[str]:
        return [lora(places / name) for name in ("one", "two")]

    @pytest.fixture
    def bad_sources(self, places: Path) -> Sequence[str]:
        return [
            "path:/there/is/no/such/folder",
            lora(places / "large", rank=512),
            lora(places / "empty", weights=False),
        ]


def lora(folder: Path, rank: int = 8, weights: bool = True) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    if weights:
        (folder / "weights").touch()
    return f"path:{folder}"
