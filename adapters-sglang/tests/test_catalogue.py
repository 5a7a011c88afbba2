"""The well-known models of this package: every file is sound, and its options are those of its adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import sie_adapters_sglang
import yaml
from sie_adapters_sglang import plugin
from sie_core.config import bind_models, load_config
from sie_core.config.catalogue import CatalogueEntry, read_catalogues

FLAGS = sorted((Path(sie_adapters_sglang.__file__).parent / "flags").glob("*.json"))


class Registrar:
    def __init__(self) -> None:
        self.adapters: dict[str, Any] = {}
        self.folders: list[Path] = []

    def add(self, name: str, adapter: type) -> None:
        self.adapters[name] = adapter

    def add_catalogue(self, folder: Path) -> None:
        self.folders.append(folder)


@pytest.fixture(scope="module")
def registered() -> Registrar:
    registrar = Registrar()
    plugin.register_adapters(registrar)
    return registrar


@pytest.fixture(scope="module")
def entries(registered: Registrar) -> list[CatalogueEntry]:
    found, problems = read_catalogues(registered.folders)
    assert problems == []
    return found


def test_every_file_is_a_model_of_an_adapter(registered: Registrar, entries: list[CatalogueEntry]) -> None:
    (folder,) = registered.folders
    assert {f"{entry.name}.yaml" for entry in entries} == {file.name for file in folder.iterdir()}
    assert {(entry.family, entry.adapter) for entry in entries} == {
        ("dense", "sglang-embedding"),
        ("generation", "sglang-generation"),
    }
    assert {entry.adapter for entry in entries} <= set(registered.adapters)


def test_the_options_are_those_of_the_adapter(
    tmp_path: Path, registered: Registrar, entries: list[CatalogueEntry], home: Any
) -> None:
    installed = home.model().options  # an environment that has SGLang, which the catalogue leaves open
    models = [entry.model() for entry in entries]
    file = tmp_path / "sie.yaml"
    file.write_text(yaml.safe_dump({"models": models}, allow_unicode=True), encoding="utf-8")
    config = bind_models(load_config(file, environ={}), registered.adapters)  # raises with every problem
    for model in config.models:
        adapter = registered.adapters[model.adapter]
        assert isinstance(model.options, adapter.options)
        options = attrs.evolve(model.options, python=installed.python, env=installed.env)
        # What `sie check` asks; raises what it has against the model.
        adapter().describe(attrs.evolve(model, options=options))


def test_models_of_the_two_generation_adapters_are_one(registered: Registrar) -> None:
    assert issubclass(registered.adapters["sglang-hicache"].options, registered.adapters["sglang-generation"].options)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda file: file.stem)
@pytest.mark.parametrize("option", ["reasoning_parser", "tool_call_parser"])
def test_every_sglang_knows_the_parsers(entries: list[CatalogueEntry], flags: Path, option: str) -> None:
    named = {entry.options[option] for entry in entries if option in entry.options}
    known = json.loads(flags.read_text(encoding="utf-8"))["flags"]["--" + option.replace("_", "-")]["choices"]
    assert named
    assert named <= set(known)
