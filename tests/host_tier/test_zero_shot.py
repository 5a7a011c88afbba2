"""Zero-shot entities through a server as users start it: asked for, refused, parked and woken."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torch", "gliner", "sie_adapters_torch")),
        reason="torch and gliner are not installed: nox -s gliner has them",
    ),
]

CONFIG = """
models:
  - {name: finder, adapter: torch-gliner, source: "path:tiny/model", options: {threshold: 0.0}}
  - {name: other, adapter: torch-gliner, source: "path:tiny/model", options: {threshold: 0.0}}
"""
TEXT = "é 🙂 the red fox runs"


def make_model(folder: Path) -> None:
    """A GLiNER model with random weights, as the package saves it."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    gliner = pytest.importorskip("gliner")  # not a plain import: some releases of torch warn of what is run for it
    words = {
        w: n for n, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"the red fox runs animal colour".split()])
    }
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    maker: Any = transformers.PreTrainedTokenizerFast
    maker(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder / "base")
    transformers.BertConfig(
        vocab_size=len(words), hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    ).save_pretrained(folder / "base")
    torch.manual_seed(0)
    settings = {"model_name": str(folder / "base"), "hidden_size": 64, "max_width": 3, "max_len": 16}
    gliner.GLiNER.from_config(settings, backbone_from_pretrained=False).save_pretrained(
        folder / "model", safe_serialization=True
    )


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A device that holds one of the two models."""
    folder = tmp_path_factory.mktemp("zero-shot")
    make_model(folder / "tiny")
    running = start_server(CONFIG, "--emulate-device", "6MiB", cwd=folder)
    running.load("finder")
    return running


def ask(server: Any, texts: list[str], labels: list[str] | None, model: str = "finder") -> httpx.Response:
    params = {} if labels is None else {"labels": labels}
    body = {"items": [{"text": text} for text in texts], "params": params}
    return httpx.post(f"{server.url}/v1/extract/{model}", json=body, timeout=120)


def test_entities_come_with_their_places(server: Any) -> None:
    reply = ask(server, [TEXT, "fox"], ["animal", "colour"])
    assert reply.status_code == 200, reply.text
    first, second = (item["entities"] for item in reply.json()["items"])
    assert first
    assert second
    for entity in first:
        assert TEXT[entity["start"] : entity["end"]] == entity["text"]
        assert entity["label"] in ("animal", "colour")
        assert 0 <= entity["score"] <= 1


@pytest.mark.parametrize(
    ("labels", "says"),
    [(None, "labels"), ([], "labels"), ([f"label {n}" for n in range(300)], "256"), (["x"] * 10_000, "labels")],
)
def test_labels_that_cannot_be(server: Any, labels: list[str] | None, says: str) -> None:
    reply = ask(server, [TEXT], labels)
    assert (reply.status_code, reply.json()["detail"]["code"]) == (400, "INVALID_INPUT"), reply.text
    assert says in reply.json()["detail"]["message"]


def test_one_text_that_is_too_long_fails_its_request(server: Any) -> None:
    reply = ask(server, ["fox", "fox " * 17], ["animal"])
    assert (reply.status_code, reply.json()["detail"]["code"]) == (400, "INPUT_TOO_LONG"), reply.text
    assert reply.json()["detail"]["index"] == 1
    assert ask(server, ["fox"], ["animal"]).status_code == 200


def test_a_model_that_was_parked_answers_as_before(server: Any) -> None:
    before = ask(server, [TEXT], ["animal", "colour"]).json()["items"]
    for model in ("other", "finder") * 2:  # there is room for one: the other one parks
        assert ask(server, [TEXT], ["animal", "colour"], model).json()["items"] == before
    status = httpx.get(f"{server.url}/v1/status", timeout=60).json()["models"]
    assert {model["name"]: model["residency"] for model in status} == {"finder": "resident", "other": "parked"}
