"""The examples of ``docs/clients.md`` for the client of this session, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8080"
CLIENT = os.environ["SIE_CLIENT"]
SECTIONS = {"cohere": ["cohere", "Jina"], "langchain": ["LangChain"], "llamaindex": ["LlamaIndex"]}
SECTIONS |= {"haystack": ["Haystack"], "integrations": ["Integrations"]}


def examples(section: str) -> list[str]:
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page has no section {section}"
    return re.findall(r"^```python\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS.get(CLIENT, [CLIENT]))
def test_the_examples_run(house: Any, tmp_path: Path, section: str) -> None:
    programs = examples(section)
    assert programs
    for program in programs:
        file = tmp_path / "example.py"
        file.write_text(program.replace(ADDRESS, house.url), encoding="utf-8")
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_the_versions_that_were_tested() -> None:
    row = next(line for line in PAGE.splitlines() if f"#{SECTIONS.get(CLIENT, [CLIENT])[0].lower()})" in line)
    named = re.findall(r"`([\w-]+)` (\d[\w.]+)", row) or re.findall(r"`([\w-]+)`\]\S+ \| (\d[\w.]+)", row)
    assert named
    assert {name: version(name) for name, _ in named} == dict(named)
