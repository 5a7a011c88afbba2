"""One server for each session of tests, with the models of ``docs/clients.md`` and some that are made for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

SERVER_PYTHON = os.environ.get("SIE_SERVER_PYTHON", sys.executable)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
MADE = """\
  - {name: org/colbert, adapter: torch-multivector, source: "path:colbert"}
  - {name: cross-encoder, adapter: torch-cross-encoder, source: "path:cross-encoder"}
  - {name: tagger, adapter: torch-entities, source: "path:tagger"}
  - {name: classifier, adapter: torch-classifier, source: "path:classifier"}
  - name: everything
    adapter: fake
    options: {outputs: [dense, sparse, multivector], inputs: [text, image], matryoshka: [4]}
  - {name: gone, adapter: fake, options: {fail_load: ModelSourceNotFound}}
"""


def shown_config() -> str:
    """The configuration that the page shows."""
    found = re.search(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="session")
def house(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server with every model loaded that can be."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([SERVER_PYTHON, Path(__file__).with_name("make_models.py"), folder], check=True, timeout=120)
    running = start_server(shown_config() + MADE, cwd=folder)
    for model in httpx.get(f"{running.url}/v1/models").json()["data"]:
        if model["id"] != "gone":
            running.load(model["id"])
    return running


@pytest.fixture(scope="session")
def native(house: Any) -> Callable[..., Any]:
    """``native("encode", "minilm", **body)``: what the server says to a plain request in its own dialect."""

    def ask(task: str, model: str, **body: Any) -> Any:
        answer = httpx.post(f"{house.url}/v1/{task}/{model}", json=body, timeout=60)
        assert answer.status_code == httpx.codes.OK, answer.text
        return answer.json()

    return ask


@pytest.fixture(scope="session")
def dense(native: Callable[..., Any]) -> Callable[..., list[list[float]]]:
    """``dense("minilm", texts)``: their vectors."""

    def ask(model: str, texts: list[str], **params: Any) -> list[list[float]]:
        answer = native("encode", model, items=[{"text": text} for text in texts], params=params)
        return [item["dense"]["values"] for item in answer["items"]]

    return ask


@pytest.fixture(scope="session")
def ranked(native: Callable[..., Any]) -> Callable[..., list[tuple[int, float]]]:
    """``ranked("splade", query, documents)``: places and scores, best first."""

    def ask(model: str, query: str, documents: list[str]) -> list[tuple[int, float]]:
        answer = native(
            "score",
            model,
            query={"text": query},
            items=[{"id": str(place), "text": text} for place, text in enumerate(documents)],
        )
        return [(int(one["item_id"]), one["score"]) for one in answer["scores"]]

    return ask
