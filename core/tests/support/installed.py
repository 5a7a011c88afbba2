"""A plugin on this process's path, found by its entry point as every plugin is."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest

_serial = itertools.count()


def install_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> str:
    """Install a module with this source as the plugin ``name``. Returns the module's name."""
    module = f"{name.replace('-', '_')}_installed_{next(_serial)}"
    target = folder / module
    info = target / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sie]\n{name} = {module}\n")
    (target / f"{module}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(target))
    return module
