"""What is not a number in a model's output is an error that names the item, never an answer with nothing in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from bge_m3_folder import save_bge_m3
from served import serving
from sie_core import ModelSpec

TAGS = dict(enumerate(("O", "B-PER", "I-PER", "B-LOC", "I-LOC")))
NLI = dict(enumerate(("contradiction", "neutral", "entailment")))


QUERY = "a quick dog"


def poison(folder: Path) -> str:
    """Damage the row of one word, which the sample at load does not hold; gives the word."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(str(folder)).get_vocab()
    sample = {number * 7919 % len(vocabulary) for number in range(1, 17)}
    free = (word for word, row in sorted(vocabulary.items()) if word.isalpha() and row not in sample)
    word = next(word for word in free if word not in QUERY.split())
    row = vocabulary[word]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (name,) = (name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[name][row] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return str(word)


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("torch-dense", {}, {}),
    "dense, padded": ("torch-dense", {}, {"attn": "eager"}),
    "sparse": ("torch-sparse", {"head": "AutoModelForMaskedLM", "tie_word_embeddings": False}, {}),
    "sparse, the best alone": (
        "torch-sparse",
        {"head": "AutoModelForMaskedLM", "tie_word_embeddings": False},
        {"top_k": 3, "threshold": 0.1},
    ),
    "ranker": ("torch-cross-encoder", {"head": "AutoModelForSequenceClassification", "num_labels": 1}, {}),
    "tagger": ("torch-entities", {"head": "AutoModelForTokenClassification", "num_labels": 5, "id2label": TAGS}, {}),
    "tagger, by words": (
        "torch-entities",
        {"head": "AutoModelForTokenClassification", "num_labels": 5, "id2label": TAGS},
        {"aggregation": "max", "threshold": 0.2},
    ),
    "judge": (
        "torch-classifier",
        {"head": "AutoModelForSequenceClassification", "num_labels": 3, "id2label": NLI},
        {"top_k": 1, "activation": "sigmoid"},
    ),
    "bge-m3": ("torch-bge-m3", {}, {}),
}
ASKED: dict[str, dict[str, Any]] = {
    "torch-dense": {"params": {}},
    "torch-sparse": {"params": {"output_types": ["sparse"]}},
    "torch-bge-m3": {"params": {"output_types": ["sparse"]}},
    "torch-cross-encoder": {"query": {"text": QUERY}},
    "torch-entities": {},
    "torch-classifier": {},
}
ROUTES = {"torch-cross-encoder": "score", "torch-entities": "extract", "torch-classifier": "extract"}


def saved(make: Any, folder: Path, name: str) -> tuple[ModelSpec, str]:
    adapter, settings, options = MODELS[name]
    if adapter == "torch-bge-m3":
        save_bge_m3(folder / "m", make)
    else:
        make.transformer(folder / "m", **settings)
    return make.spec(folder / "m", adapter, **options), poison(folder / "m")


async def refused(http: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    reply = await http.post(path, json=body, headers={"accept": "application/json"})
    assert reply.status_code == 500, reply.text
    return dict(reply.json()["detail"])


@pytest.mark.parametrize("name", MODELS)
async def test_the_item_is_named_and_its_neighbours_are_answered(make: Any, tmp_path: Path, name: str) -> None:
    """C3: a text whose numbers are not finite gets a 500 with its index, whatever the family makes of numbers."""
    model, word = saved(make, tmp_path, name)
    path, body = f"/v1/{ROUTES.get(model.adapter, 'encode')}/m", ASKED[model.adapter]
    good = {"text": "[UNK]"}
    async with serving([model]) as (http, _):
        fine = await http.post(path, json={**body, "items": [good]})
        detail = await refused(http, path, **body, items=[good, {"text": word}, good])
        again = await http.post(path, json={**body, "items": [good]})
    assert (fine.status_code, again.status_code) == (200, 200)
    assert "item(s) 1" in detail["message"]


async def test_a_label_that_nobody_asked_for(make: Any, tmp_path: Path) -> None:
    """C3: labels and thresholds leave nothing of the damage unseen."""
    model, word = saved(make, tmp_path, "tagger")
    async with serving([model]) as (http, _):
        detail = await refused(http, "/v1/extract/m", items=[{"text": word}], params={"labels": ["LOC"]})
    assert "item(s) 0" in detail["message"]


def test_a_vector_that_is_damaged_where_it_is_cut_off(make: Any, load: Callable[..., Any], tmp_path: Path) -> None:
    """C3: the first dimensions of a damaged vector are no answer either."""
    import torch

    engine = load(make.modules(make.transformer(tmp_path / "m"), dense=8, normalise=False), matryoshka=(4,))
    assert np.isfinite(make.embed(engine, ["a red fox"], dimensions=4)).all()
    with torch.no_grad():
        engine._placed.modules[1][0][0].weight[7] = torch.inf
    assert np.isnan(make.embed(engine, ["a red fox"], dimensions=4)).all()


def test_infinite_logits(make: Any, load: Callable[..., Any], tmp_path: Path) -> None:
    """C3: a sigmoid makes a score of 1 of infinity; it is no score."""
    import torch

    settings = {"head": "AutoModelForSequenceClassification", "num_labels": 1}
    engine = load(make.transformer(tmp_path / "m", **settings), adapter="torch-cross-encoder", activation="sigmoid")
    assert np.isnan(engine._scores(np.array([[torch.inf], [0.5]], np.float32), "sigmoid")).tolist() == [True, False]
