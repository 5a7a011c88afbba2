"""Plugins as they are in the wild: distributions, built as wheels and installed into folders on the path."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sie_core.plugins import PluginInfo, Plugins

CORE = Path(__file__).parents[2] / "src"
_serial = itertools.count()


def build_wheel(
    folder: Path, distribution: str, version: str, entry_points: str, modules: dict[str, str], tag: str = "py3-none-any"
) -> Path:
    """A wheel as any build backend makes it."""
    stem = f"{distribution.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {name: textwrap.dedent(text).encode() for name, text in modules.items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: sie-tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = entry_points.encode()
    record = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    record.append(f"{info}/RECORD,,")
    files[f"{info}/RECORD"] = "\n".join(record).encode()
    wheel = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def unpack(wheel: Path, target: Path) -> None:
    """What an installer makes of a pure wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def install_with_uv(wheel: Path, target: Path) -> None:
    """A real installer, where there is one: a quarter of a second each, so only for the tests that stand for a kind."""
    uv = shutil.which("uv")
    if uv is None:
        unpack(wheel, target)
        return
    command = [uv, "pip", "install", "--quiet", "--offline", "--no-index", "--no-deps", "--no-config"]
    command += ["--python", sys.executable, "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)


class Site:
    """A place to install plugins to, on this process's path."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.targets: list[Path] = []
        self._monkeypatch = monkeypatch

    def install(
        self,
        name: str,
        source: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        module: str | None = None,
        entry_points: str | None = None,
        more: dict[str, str] | None = None,
        installer: Callable[[Path, Path], None] = unpack,
    ) -> str:
        """Install a distribution whose entry point ``name`` is a module with this source. Returns the module's name."""
        number = next(_serial)
        module = module or f"{name.replace('-', '_')}_{number}"
        target = self.folder / str(number)
        target.mkdir()
        wheel = build_wheel(
            self.folder,
            distribution or f"dist-{name}",
            version,
            entry_points or f"[sie]\n{name} = {module}\n",
            {f"{module}.py": source, **(more or {})},
        )
        installer(wheel, target)
        self.put_in_front(target)
        return module

    def put_in_front(self, target: Path) -> None:
        """Put a folder at the head of the path."""
        self.targets.append(target)
        self._monkeypatch.syspath_prepend(str(target))

    def load(self, *, strict: bool = False) -> Plugins:
        """Find and load what is installed."""
        return Plugins.load(strict=strict)

    def info(self, name: str, plugins: Plugins | None = None) -> PluginInfo:
        """The one plugin of this name."""
        (found,) = [each for each in (plugins or self.load()).info() if each.name == name]
        return found

    def python(self, code: str, *, flags: tuple[str, ...] = (), **environ: str) -> Any:
        """Run code in a process of its own that sees the same plugins. Returns what it prints, as JSON."""
        path = os.pathsep.join([*map(str, self.targets), str(CORE)])
        done = subprocess.run(
            [sys.executable, *flags, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": path, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    monkeypatch.delenv("SIE_STRICT_PLUGINS", raising=False)
    yield Site(tmp_path, monkeypatch)
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


ADAPTER = """
    from sie_core import Adapter, hookimpl
    sie_api = 1

    class Mine(Adapter):
        options = object

    @hookimpl
    def register_adapters(registrar):
        registrar.add({name!r}, Mine)
"""


@pytest.fixture
def adapter_source() -> Callable[[str], str]:
    """Source of a plugin that offers one adapter."""
    return lambda name: ADAPTER.format(name=name)
