"""What lists say of models that nobody has asked anything of yet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from installed import install_plugin
from sie_core import ModelSpec
from sie_core.plugins import Plugins
from sie_core.sources import parse_source
from sie_testing import FakeOptions
from website import MODELS, Start, until

PLUGIN = """
    import attrs, pathlib
    from sie_core import *
    sie_api = 1

    @attrs.frozen
    class Options:
        pass

    class HubAdapter(Adapter):
        options = Options
        declares = Capabilities(inputs=("text", "image"))

        def describe(self, model):
            if "cached" in model.name:
                return Capabilities(dims={{"dense": 7}})

    class SilentAdapter(Adapter):
        options = Options

    class BrokenAdapter(SilentAdapter):
        def describe(self, model):
            raise RuntimeError("no files")

    @hookimpl
    def register_adapters(registrar):
        registrar.add("hub", HubAdapter)
        registrar.add("silent", SilentAdapter)
        registrar.add("broken", BrokenAdapter)
        registrar.add_catalogue(pathlib.Path({folder!r}))
"""
ENTRY = """
name: {name}
family: dense
adapter: {adapter}
source: hf:org/{name}
gives: [{gives}]
dims: {{dense: 384}}
max_length: 512
facts: [https://example.org/facts]
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    folder = tmp_path / "catalogue"
    folder.mkdir()
    for name, adapter, gives in (("known", "hub", "dense"), ("plain", "silent", "dense, score")):
        (folder / f"{name}.yaml").write_text(ENTRY.format(name=name, adapter=adapter, gives=gives))
    (folder / "faulty.yaml").write_text("name: [")
    install_plugin(tmp_path, monkeypatch, "hubs", PLUGIN.format(folder=str(folder)))
    return Plugins.load(strict=True)


def spec(name: str, adapter: str = "hub", source: str = "hf:org/known") -> ModelSpec:
    return ModelSpec(name, adapter, source=parse_source(source, None))


HUB = [
    (spec("in-catalogue", source="hf:org/known@main"), "catalogue", {"dense": 384}, 512, ["text", "image"], ["encode"]),
    (spec("plain", "silent", "hf:org/plain"), "catalogue", {"dense": 384}, 512, ["text"], ["encode", "score"]),
    (spec("cached"), "model", {"dense": 7}, None, ["text"], ["encode"]),
    (spec("declared", source="hf:org/unheard-of"), "adapter", {}, None, ["text", "image"], ["encode"]),
    (spec("other-adapter", "silent"), None, {}, None, [], []),
    (spec("broken", "broken"), None, {}, None, [], []),
    (spec("unheard-of", "nobody-has-it"), None, {}, None, [], []),
]


async def test_a_fresh_server_knows_what_its_models_can_do(served: Start) -> None:
    """G6: from their files, in the list as one by one, and nothing is loaded for it."""
    async with served() as s:
        listed = (await s.http.get("/v1/models")).json()["models"]
        states = {status.residency for status in s.service.models()}
    async with served() as s:
        single = (await s.http.get("/v1/models/any")).json()
    rows = {row["name"]: row for row in listed}
    for name in ("wide", "any", "ranker", "chat"):
        assert rows[name]["known_from"] == "model"
        assert rows[name]["tasks"]
    assert rows["wide"]["dims"] == {"dense": MODELS["wide"].dims}
    assert rows["any"]["outputs"] == ["dense", "sparse", "multivector"] == single["outputs"]
    assert single["dims"] == rows["any"]["dims"] != {}
    assert states == {"unloaded"}


@pytest.mark.parametrize("single", [False, True])
async def test_models_that_are_still_on_the_hub(served: Start, hub: Plugins, single: bool) -> None:
    """C10: from the catalogue, else by the adapter's declaration, and marked as such; faults are no error of a list."""
    async with served(plugins=hub) as s:
        s.registry.apply([one[0] for one in HUB])
        if single:
            rows: list[Any] = [(await s.http.get(f"/v1/models/{one[0].name}")).json() for one in HUB]
        else:
            rows = (await s.http.get("/v1/models")).json()["models"]
            assert rows == (await s.http.get("/v1/models")).json()["models"]
    told = [(row["known_from"], row["dims"], row["max_sequence_length"], row["inputs"], row["tasks"]) for row in rows]
    assert told == [tuple(one[1:]) for one in HUB]


async def test_what_the_files_say_takes_the_place_of_what_was_declared(served: Start) -> None:
    """C10: a changed model is asked again."""
    async with served() as s:
        before = (await s.http.get("/v1/models")).json()["models"][0]
        s.registry.apply([ModelSpec("mini", "fake", options=FakeOptions(dims=16))])
        after = (await s.http.get("/v1/models")).json()["models"]
    assert before["dims"] == {"dense": 8}
    assert [row["dims"] for row in after if row["name"] == "mini"] == [{"dense": 16}]


async def test_memory_is_given_back_after_engines_only(served: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16: a sibling: it was after each look at a model, too, and others' allocations wait for it."""
    trimmed: list[str] = []
    monkeypatch.setattr("sie_core.residency.worker.trim", lambda: trimmed.append(threading.current_thread().name))
    async with served() as s:
        assert (await s.http.get("/v1/models")).status_code == 200
        assert (await s.embed()).status_code == 200
        await s.registry.unload("mini")
        await until(lambda: trimmed)
    assert trimmed == ["sie-mini"]
