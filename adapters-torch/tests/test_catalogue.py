"""The well-known models of this package: every file is sound, and its options are those of its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from sie_adapters_torch import plugin
from sie_core.config import bind_models, load_config
from sie_core.config.catalogue import FAMILIES, CatalogueEntry, read_catalogues


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


def test_every_file_is_a_model_and_every_family_has_some(registered: Registrar, entries: list[CatalogueEntry]) -> None:
    (folder,) = registered.folders
    assert {f"{entry.name}.yaml" for entry in entries} == {file.name for file in folder.iterdir()}
    assert {entry.family for entry in entries} == set(FAMILIES) - {"generation"}
    assert len(entries) >= 60


def test_every_model_names_an_adapter_of_this_package(registered: Registrar, entries: list[CatalogueEntry]) -> None:
    assert {entry.adapter for entry in entries} == set(registered.adapters)


def test_the_options_are_those_of_the_adapter(
    tmp_path: Path, registered: Registrar, entries: list[CatalogueEntry]
) -> None:
    models = [entry.model() for entry in entries]
    file = tmp_path / "sie.yaml"
    file.write_text(yaml.safe_dump({"models": models}, allow_unicode=True), encoding="utf-8")
    config = bind_models(load_config(file, environ={}), registered.adapters)  # raises with every problem
    for model in config.models:
        if model.adapter in registered.adapters:
            adapter = registered.adapters[model.adapter]
            assert isinstance(model.options, adapter.options)
            adapter().describe(model)  # what `sie check` asks; raises what it has against the model


def test_code_of_strangers_is_run_only_where_the_notes_say_so(entries: list[CatalogueEntry]) -> None:
    for option, word in (("trust_remote_code", "Python code"), ("allow_pickle", "pickled")):
        told = {entry.name for entry in entries if word in (entry.notes or "")}
        assert told == {entry.name for entry in entries if entry.options.get(option)}


def test_models_not_for_commercial_use_say_so(entries: list[CatalogueEntry]) -> None:
    restricted = {entry.name for entry in entries if "-nc-" in (entry.licence or "")}
    assert restricted
    assert restricted == {entry.name for entry in entries if "Not for commercial use" in (entry.notes or "")}


def test_adapters_declare_what_their_models_give(registered: Registrar, entries: list[CatalogueEntry]) -> None:
    """C10: which is what lists show of models whose files are not there yet."""
    for name, adapter in registered.adapters.items():
        declared = adapter.declares
        assert declared is not None, name
        assert declared.dims == {}
    for entry in entries:
        declared = registered.adapters[entry.adapter].declares
        vectors = {kind for kind in entry.gives if kind in ("dense", "sparse", "multivector")}
        assert set(declared.outputs) == vectors, entry.name
        assert ("score" in {task.value for task in declared.tasks}) or "score" not in entry.gives
