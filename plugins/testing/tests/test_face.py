"""What the package exports is what its rooms list, and pytest loads none of it before it is used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import sie_testing

ROOMS: dict[str, list[str]] = {}
for _name, _room in sie_testing._HOME.items():
    ROOMS.setdefault(_room, []).append(_name)


@pytest.mark.parametrize("room", ROOMS)
def test_the_face_lists_what_the_rooms_list(room: str) -> None:
    assert sorted(importlib.import_module(room).__all__) == sorted(ROOMS[room])


def test_every_exported_name_is_there() -> None:
    for name in sie_testing.__all__:
        assert getattr(sie_testing, name) is not None
    assert dir(sie_testing) == sie_testing.__all__
    with pytest.raises(AttributeError):
        sie_testing.nothing_of_that_name  # noqa: B018


def test_the_plugins_are_light() -> None:
    code = """if True:
        import json, sys
        import sie_testing.plugin, sie_testing.pytest_plugin
        heavy = ("numpy", "sie_testing.fake", "sie_testing.virtual")
        print(json.dumps([name for name in heavy if name in sys.modules]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []
