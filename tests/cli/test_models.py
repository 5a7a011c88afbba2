"""`sie models --available`: the catalogue, from the list to a configuration that `sie check` finds right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Sie = Callable[..., Any]

OWN = """
from pathlib import Path
from sie_core import hookimpl
sie_api = 1

@hookimpl
def register_adapters(registrar):
    registrar.add_catalogue(Path(__file__).with_name("catalogue"))
"""

MODEL = """\
name: mine
family: audio
adapter: fake
source: hf:org/mine
options: {dims: 8}
gives: [dense]
dims: {dense: 8}
facts: [https://example.org/mine]
"""


@pytest.fixture
def own(distribution: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Install a plugin with a catalogue of one file; the environment that finds it."""

    def install(text: str) -> dict[str, str]:
        env: dict[str, str] = distribution("own-models", OWN)
        folder = tmp_path / "site" / "catalogue"
        folder.mkdir()
        (folder / "mine.yaml").write_text(text, encoding="utf-8")
        return env

    return install


def test_the_list_names_models_of_every_family(sie: Sie) -> None:
    done = sie("models", "--available")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^all-minilm-l6-v2 +dense +torch-dense +dense +384 +256 +22\.7 M +apache", done.stdout, re.M)
    assert re.search(r"^bge-m3 +hybrid +torch-bge-m3 +dense, sparse, multivector ", done.stdout, re.M)
    entries = json.loads(sie("models", "--available", "--json").stdout)
    assert len(entries) >= 60
    assert {entry["family"] for entry in entries} >= {"dense", "sparse", "multivector", "cross-encoder", "classifier"}
    assert all(entry["facts"] for entry in entries)


def test_a_family_alone(sie: Sie) -> None:
    done = sie("models", "--available", "--family", "cross-encoder", "--json")
    assert {entry["family"] for entry in json.loads(done.stdout)} == {"cross-encoder"}
    wrong = sie("models", "--available", "--family", "cross-encoders")
    assert wrong.returncode == 2
    assert "there is no family 'cross-encoders'" in wrong.stderr
    assert "did you mean 'cross-encoder'?" in wrong.stderr


def test_one_model_in_full(sie: Sie) -> None:
    shown = sie("models", "--available", "e5-small-v2").stdout
    assert "https://huggingface.co/intfloat/e5-small-v2" in shown
    assert 'query_prompt: "query: "' in shown
    wrong = sie("models", "--available", "e5-smal-v2")
    assert wrong.returncode == 2
    assert "did you mean 'e5-small-v2'?" in wrong.stderr


def test_what_is_printed_as_yaml_is_a_configuration(sie: Sie, tmp_path: Path) -> None:
    entries = json.loads(sie("models", "--available", "--family", "dense", "--json").stdout)
    # What the others want is looked for as well, and not all of it is here: an SGLang.
    names = [entry["name"] for entry in entries if entry["adapter"] == "torch-dense"]
    (tmp_path / "sie.yaml").write_text(sie("models", "--available", *names, "--yaml").stdout, encoding="utf-8")
    done = sie("check", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["problems"], report["models"]) == (0, [], names)


def test_names_and_families_want_available(sie: Sie) -> None:
    for arguments in (["minilm"], ["--family", "dense"], ["--yaml"]):
        done = sie("models", *arguments)
        assert done.returncode == 2
        assert "go with --available" in done.stderr


def test_a_plugin_brings_models_of_its_own(sie: Sie, own: Callable[..., Any], tmp_path: Path) -> None:
    env = own(MODEL)
    shown = sie("models", "--available", env=env).stdout
    assert re.search(r"^mine +audio +fake +dense +8 ", shown, re.M)
    (tmp_path / "sie.yaml").write_text(sie("models", "--available", "mine", "--yaml", env=env).stdout, encoding="utf-8")
    assert sie("check", cwd=tmp_path, env=env).returncode == 0


def test_an_adapter_that_is_not_installed_is_told(sie: Sie, own: Callable[..., Any]) -> None:
    shown = sie("models", "--available", "mine", env=own(MODEL.replace("adapter: fake", "adapter: nobody-has-it")))
    assert shown.returncode == 0
    assert "unknown adapter 'nobody-has-it'" in shown.stdout


def test_a_faulty_file_is_named_and_the_others_are_listed(sie: Sie, own: Callable[..., Any]) -> None:
    done = sie("models", "--available", env=own(MODEL.replace("family", "famly")))
    assert done.returncode == 1
    assert re.search(r"catalogue/mine\.yaml:2:1: famly: unknown key 'famly', did you mean family\?", done.stderr)
    assert "all-minilm-l6-v2" in done.stdout
    assert "mine" not in done.stdout


def test_the_list_imports_no_framework() -> None:
    code = (
        "import sys; from sie_core.cli.front import run; run(['models', '--available', '--json']);"
        "print('HEAVY', sorted({'torch', 'transformers', 'uvicorn', 'starlette', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
