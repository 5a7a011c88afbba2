"""What a changed file means for the models that run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core.config import Config, ConfigChange, bind_models, compare, load_config
from sie_core.config._value import Value

Write = Callable[[str], Path]

BEFORE = """\
models:
- {name: a, adapter: x, source: 'path:a', options: {}}
- {name: b, adapter: x, source: 'path:b', queue: 3}
"""


def load(text: str, write: Write) -> Config:
    return load_config(write(text), environ={})


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, ConfigChange()),
        (BEFORE.replace("queue: 3", "queue: 4"), ConfigChange(policy_only=("b",))),
        (BEFORE.replace("queue: 3", "queue: 3, pinned: true"), ConfigChange(policy_only=("b",))),
        (BEFORE.replace("queue: 3", "queue: 3, idle_evict_s: 9"), ConfigChange(policy_only=("b",))),
        (BEFORE.replace("queue: 3", "queue: 3, wake_check: never"), ConfigChange(policy_only=("b",))),
        (BEFORE.replace("path:b", "path:c"), ConfigChange(changed=("b",))),
        (BEFORE.replace("path:b", "path:c").replace("queue: 3", "queue: 4"), ConfigChange(changed=("b",))),
        (BEFORE.replace("options: {}", "options: {k: 1}"), ConfigChange(changed=("a",))),
        (BEFORE.replace("adapter: x, source: 'path:b'", "adapter: y, source: 'path:b'"), ConfigChange(changed=("b",))),
        (BEFORE.replace("queue: 3", "queue: 3, device: cpu"), ConfigChange(changed=("b",))),
        (BEFORE.replace("queue: 3", "queue: 3, runtime_headroom: 1GiB"), ConfigChange(changed=("b",))),
        (BEFORE.replace("name: a", "name: c"), ConfigChange(added=("c",), removed=("a",))),
        ("models: []\n", ConfigChange(removed=("a", "b"))),
        ("server: {port: 1}\n" + BEFORE, ConfigChange()),
        ("\n\n# moved\n" + BEFORE, ConfigChange()),
    ],
)
def test_changes(after: str, expected: ConfigChange, write: Write) -> None:
    old = load(BEFORE, write)
    change = compare(old, load(after, write))
    assert change == expected
    assert bool(change) is (expected != ConfigChange())


def test_the_order_of_the_models_means_nothing(write: Write) -> None:
    head, a, b = BEFORE.splitlines()
    assert not compare(load(BEFORE, write), load(f"{head}\n{b}\n{a}\n", write))


def test_one_relative_path_from_two_folders_is_two_sources(write: Write) -> None:
    old = load(BEFORE, write)
    Path("other").mkdir()
    Path("other/sie.yaml").write_text(BEFORE)
    assert compare(old, load_config("other/sie.yaml", environ={})) == ConfigChange(changed=("a", "b"))
    absolute = BEFORE.replace("path:", "path:/srv/")
    old = load(absolute, write)
    Path("other/sie.yaml").write_text(absolute)
    assert not compare(old, load_config("other/sie.yaml", environ={}))


def test_typed_options_are_compared_by_value(write: Write) -> None:
    from attrs import frozen

    @frozen
    class Options:
        k: int = 1

    class Adapter:
        options = Options

    Options.__annotations__["k"] = int  # a class within a function: its annotations can't be looked up by name
    old = bind_models(load(BEFORE, write), {"x": Adapter})
    same = bind_models(load(BEFORE.replace("options: {}", "options: {k: 1}"), write), {"x": Adapter})
    other = bind_models(load(BEFORE.replace("options: {}", "options: {k: 2}"), write), {"x": Adapter})
    assert not compare(old, same)
    assert compare(old, other) == ConfigChange(changed=("a",))
    assert isinstance(old.model_values["a"][0], Value)
