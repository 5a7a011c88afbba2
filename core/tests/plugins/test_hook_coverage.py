"""A hook ships with a test and a documented example, and what the face exports is what the rooms list."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import sie_core
from sie_core import builtin, hookspecs

from .conftest import Site

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "hooks.md"
HOOKS = {name: function for name, function in vars(hookspecs).items() if hasattr(function, "sie_spec")}


def sections() -> dict[str, str]:
    """Text below each heading that names a hook."""
    parts = re.split(r"^## `(\w+)`\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def hook_tests() -> list[str]:
    """Names of the tests of hooks."""
    tree = ast.parse((Path(__file__).parent / "test_hooks.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_the_walk_finds_the_hooks() -> None:
    assert {"register_adapters", "choose_victims", "restore_from_host"} <= set(HOOKS)
    assert len(HOOKS) >= 11


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_typed_explained_and_tested(hook: str) -> None:
    signature = inspect.signature(HOOKS[hook])
    assert signature.return_annotation is not signature.empty
    assert all(each.annotation is not each.empty for each in signature.parameters.values())
    assert "Fires" in (HOOKS[hook].__doc__ or ""), "the docstring says when the hook fires"
    assert any(name.startswith(f"test_{hook}_") for name in hook_tests()), f"test_hooks.py has no test_{hook}_..."


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_with_an_example_that_loads(site: Site, hook: str) -> None:
    text = sections()[hook]
    arguments = ", ".join(inspect.signature(HOOKS[hook]).parameters)
    stated = re.match(rf"\s*`{hook}\((.*?)\) -> ", text)
    assert stated, f"the section of {hook} begins with its signature"
    assert ", ".join(each.partition(":")[0] for each in stated[1].split(", ") if each) == arguments
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    site.install("example", textwrap.dedent(example))
    info = site.info("example")
    assert (info.state, info.reason) == ("loaded", "")
    assert hook in info.hooks


def test_the_page_documents_no_hook_that_does_not_exist() -> None:
    assert set(sections()) == set(HOOKS)


def test_the_built_in_plugin_goes_through_the_same_door() -> None:
    assert builtin.sie_api == hookspecs.API_VERSION
    assert [name for name, value in vars(builtin).items() if hasattr(value, "sie_impl")] == ["probe_devices"]


# --- the face ---

ROOMS: dict[str, list[str]] = {}
for _name, _room in sie_core._HOME.items():
    ROOMS.setdefault(_room, []).append(_name)


@pytest.mark.parametrize("room", ROOMS)
def test_the_face_lists_what_the_rooms_list(room: str) -> None:
    listed: list[str] = importlib.import_module(room).__all__
    assert set(ROOMS[room]) <= set(listed), f"{room} does not list what sie_core exports"
    if room in ("sie_core.adapter", "sie_core.errors", "sie_core.hookspecs", "sie_core.types"):
        assert set(ROOMS[room]) == set(listed), f"{room} is for plugins as a whole: sie_core exports all of it"


def test_every_exported_name_is_there_once() -> None:
    assert len(set(sie_core.__all__)) == len(sie_core.__all__)
    assert dir(sie_core) == sie_core.__all__
    for name in sie_core.__all__:
        assert getattr(sie_core, name) is not None
    missing: Any = "a_name_that_is_not_there"
    with pytest.raises(AttributeError, match=missing):
        getattr(sie_core, missing)


def test_importing_the_face_loads_no_room_and_no_library(site: Site) -> None:
    code = """
        import json, sys
        import sie_core
        heavy = ("attr", "pluggy", "numpy", "cattrs", "torch", "starlette", "opentelemetry", "sie_core.types")
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """
    assert site.python(code) == []


def test_the_plugin_manager_loads_no_heavy_library(site: Site) -> None:
    code = """
        import json, sys
        from sie_core.plugins import Plugins
        Plugins.load(adapters=False).commands()
        heavy = ("numpy", "cattrs", "torch", "starlette", "opentelemetry", "structlog", "psutil", "pynvml", "asyncio")
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """
    assert site.python(code) == []
