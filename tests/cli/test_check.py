"""`sie check` and `sie plugins`: what is wrong, where, and with which exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Sie = Callable[..., Any]

BROKEN = """\
server: {port: "8080"}
models:
  - name: a
    adpter: fake
    adapter: fake
  - name: a
    adapter: fake
    options: {dims: "8", dmis: 8}
"""

FAULTY_ADAPTER = """
from attrs import frozen
from sie_core import Adapter, ModelSourceNotFound, hookimpl
sie_api = 1

@frozen
class Options:
    size: int = 3

class Faulty(Adapter):
    options = Options
    def describe(self, model):
        if model.options.size == 1:
            raise ModelSourceNotFound("the folder models/x is not there")
        return 1 / model.options.size and None

@hookimpl
def register_adapters(registrar):
    registrar.add("faulty", Faulty)
"""


def test_a_good_file(sie: Sie, tmp_path: Path) -> None:
    file = tmp_path / "sie.yaml"
    file.write_text("models:\n  - {name: a, adapter: fake}\n", encoding="utf-8")
    done = sie("check", file)
    assert (done.returncode, done.stdout) == (0, f"{file}: 1 model, no problem\n")
    assert sie("check", cwd=tmp_path).returncode == 0
    assert json.loads(sie("check", file, "--json").stdout) == {
        "file": str(file),
        "ok": True,
        "models": ["a"],
        "problems": [],
        "warnings": [],
    }


def test_every_mistake_has_its_place(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text(BROKEN, encoding="utf-8")
    done = sie("check", "sie.yaml", cwd=tmp_path)
    assert done.returncode == 2
    lines = done.stdout.splitlines()
    for place in ("sie.yaml:1:10: server.port: ", "sie.yaml:4:5: models[0].adpter: ", "sie.yaml:6:5: models[1].name: "):
        assert any(line.startswith(place) for line in lines), place
    problems = json.loads(sie("check", "sie.yaml", "--json", cwd=tmp_path).stdout)["problems"]
    assert len(problems) == len(lines)
    assert problems[0].items() >= {"file": "sie.yaml", "line": 1, "column": 10, "path": "server.port"}.items()


def test_options_are_checked_against_their_adapter(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("models:\n  - {name: a, adapter: fake, options: {dmis: 8}}\n", encoding="utf-8")
    done = sie("check", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("sie.yaml:2:40: models[0].options.dmis: unknown key 'dmis', did you mean dims?")


def test_a_missing_adapter_is_exit_1_with_those_that_are_there(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("models:\n  - {name: a, adapter: toch-dense}\n", encoding="utf-8")
    done = sie("check", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("sie.yaml:2:5: models[0]: model 'a': unknown adapter 'toch-dense'")
    assert "fake, fake-stream" in done.stdout
    (tmp_path / "sie.yaml").write_text("models:\n  - {name: a, adapter: fake-steam}\n", encoding="utf-8")
    assert "'fake-steam': did you mean fake-stream? (installed: " in sie("check", cwd=tmp_path).stdout
    assert json.loads(sie("check", "--json", cwd=tmp_path).stdout)["ok"] is False


def test_what_the_adapter_says_about_a_model_counts(sie: Sie, tmp_path: Path, distribution: Callable[..., Any]) -> None:
    env = distribution("faulty-adapter", FAULTY_ADAPTER)
    (tmp_path / "sie.yaml").write_text(
        "models:\n"
        "  - {name: good, adapter: faulty}\n"
        "  - {name: gone, adapter: faulty, options: {size: 1}}\n"
        "  - {name: odd, adapter: faulty, options: {size: 0}}\n",
        encoding="utf-8",
    )
    done = sie("check", cwd=tmp_path, env=env)
    assert done.returncode == 1
    gone, odd = done.stdout.splitlines()
    assert gone.endswith("models[1]: model 'gone': the folder models/x is not there")
    named = "describe of adapter 'faulty' of plugin 'faulty-adapter'"
    assert odd.endswith(f"model 'odd': {named} raised ZeroDivisionError: division by zero")


@pytest.mark.parametrize("kind", ["missing", "folder", "binary", "forbidden"])
def test_a_file_that_can_not_be_read(sie: Sie, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "sie.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind == "binary":
        file.write_bytes(b"models: \xff\xfe\x00")
    elif kind == "forbidden":
        file.write_text("models: []\n", encoding="utf-8")
        file.chmod(0)
        if os.access(file, os.R_OK):
            pytest.skip("this user may read everything")
    done = sie("check", file)
    assert done.returncode == 2
    assert done.stdout.startswith(str(file))
    assert "Traceback" not in done.stderr + done.stdout
    started = sie("serve", "--config", file)
    assert started.returncode == 2
    assert str(file) in started.stderr
    assert "Traceback" not in started.stderr


def test_no_file_at_all(sie: Sie) -> None:
    done = sie("check")
    assert done.returncode == 2
    assert "there is no sie.yaml here" in done.stderr


def test_flags_and_variables_are_named_in_problems(sie: Sie, tmp_path: Path) -> None:
    (tmp_path / "sie.yaml").write_text("models: []\n", encoding="utf-8")
    done = sie("check", cwd=tmp_path, env={"SIE_PORT": "many"})
    assert done.returncode == 2
    assert done.stdout.startswith("SIE_PORT: server.port: ")
    assert "did you mean SIE_LOG_LEVEL" in sie("check", cwd=tmp_path, env={"SIE_LOG_LEVL": "debug"}).stdout


# --- plugins ---------------------------------------------------------------------------------------


def test_one_broken_plugin_and_a_stale_one(sie: Sie, distribution: Callable[..., Any]) -> None:
    env = distribution("wrecked", "import no_such_module_here\nsie_api = 1\n")
    env = distribution("stale", "sie_api = 99\n")
    done = sie("plugins", env=env)
    assert done.returncode == 0
    assert "\nwrecked: broken: it failed to import: ModuleNotFoundError" in done.stdout
    assert "\nstale: refused: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    verbose = sie("plugins", "--verbose", env=env)
    assert "Traceback" in verbose.stdout
    assert "import no_such_module_here" in verbose.stdout
    assert sie("plugins", "--strict", env=env).returncode == 1
    assert sie("plugins", "--strict").returncode == 0
    found = {row["name"]: row for row in json.loads(sie("plugins", "--json", env=env).stdout)}
    assert found["core"]["state"] == "loaded"
    assert found["wrecked"].items() >= {"state": "broken", "version": "1.0", "distribution": "wrecked"}.items()
    assert "no_such_module_here" in found["wrecked"]["traceback"]


def test_strict_mode_refuses_to_start(sie: Sie, distribution: Callable[..., Any]) -> None:
    env = distribution("wrecked", "import no_such_module_here\nsie_api = 1\n")
    for arguments, more in (["--strict-plugins"], {}), ([], {"SIE_STRICT_PLUGINS": "1"}):
        done = sie("serve", "--port", "0", *arguments, env={**env, **more})
        assert done.returncode == 1
        assert "wrecked" in done.stderr
        assert "no_such_module_here" in done.stderr
        assert "SIE is ready" not in done.stdout
