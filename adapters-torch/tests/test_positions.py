"""A text that is one token too long is refused, or cut, wherever a family's positions start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import serving
from sie_core import ModelSourceInvalid

# Tables of 40 rows, with a padding id of 0 or 3, and of how many positions that leaves.
FAMILIES = [
    ("bert", 0, 40), ("nystromformer", 0, 40), ("gpt2", 0, 40),
    ("roberta", 0, 39), ("data2vec-text", 0, 39), ("data2vec-text", 3, 36), ("xmod", 0, 39), ("xmod", 3, 36),
    ("roberta-prelayernorm", 3, 36), ("esm", 3, 36), ("ibert", 0, 39), ("camembert", 3, 36), ("luke", 0, 39),
    ("opt", 0, 40), ("qwen3", 0, 40),
]  # fmt: skip


def tokens(count: int) -> list[int]:
    return [5 + number % 7 for number in range(count)]


@pytest.mark.parametrize(("kind", "pad", "limit"), FAMILIES)
def test_the_longest_text(load: Any, make: Any, tmp_path: Path, kind: str, pad: int, limit: int) -> None:
    """G3: found by trying: the longest text runs as in transformers, one more token is refused or cut."""
    import torch
    from sie_core import InputTooLong
    from transformers import AutoModel

    folder = make.transformer(tmp_path / kind, kind, limit=None, pad_token_id=pad)
    make.edit_json(folder / "tokenizer_config.json", pad_token="[SEP]" if pad else "[PAD]")
    make.edit_json(folder / "tokenizer.json", post_processor=None)
    engine = load(folder)
    assert engine.capabilities.max_sequence_length == limit
    whole = make.embed(engine, [tokens(limit)])
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder).eval()(torch.tensor([tokens(limit)]))[0].mean(1).numpy()
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    with pytest.raises(InputTooLong) as caught:
        make.embed(engine, [tokens(3), tokens(limit + 1)])
    assert (caught.value.tokens, caught.value.limit, caught.value.index) == (limit + 1, limit, 1)
    np.testing.assert_array_equal(make.embed(engine, [tokens(limit + 1)], truncate=True), whole)


def test_more_than_there_are(load: Any, make: Any, tmp_path: Path) -> None:
    """G3: options that ask for more positions than trying finds are refused."""
    folder = make.transformer(tmp_path / "m", "data2vec-text", limit=None)
    with pytest.raises(ModelSourceInvalid, match="max_length is 40, and the model has 39 positions"):
        load(folder, max_length=40)
    assert load(folder, max_length=30).capabilities.max_sequence_length == 30


def test_a_limit_of_sentence_transformers(load: Any, make: Any, tmp_path: Path) -> None:
    """G3: its max_seq_length may be more than there is."""
    folder = make.transformer(tmp_path / "m", "data2vec-text", limit=None)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert load(folder).capabilities.max_sequence_length == 39


@pytest.mark.parametrize("query", [True, False])
def test_many_vectors(load: Any, make: Any, tmp_path: Path, query: bool) -> None:
    """G3: queries that are filled up stay within the positions too."""
    folder = make.modules(make.transformer(tmp_path / "m", "data2vec-text", limit=None, more=("[MASK]",)), dense=8)
    (folder / "modules.json").write_text(
        '[{"idx":0,"name":"0","path":"","type":"sentence_transformers.models.Transformer"},'
        '{"idx":1,"name":"1","path":"2_Dense","type":"pylate.models.Dense.Dense"}]'
    )
    make.edit_json(folder / "2_Dense" / "config.json", activation_function="torch.nn.modules.linear.Identity")
    options = {"query_prefix": "", "document_prefix": "", "query_length": 40, "document_length": 40}
    engine = load(folder, adapter="torch-multivector", truncate=True, **options)
    (found,) = make.encode(engine, [tokens(40)], is_query=query)
    assert len(found.multivector) <= 39


@pytest.mark.parametrize("adapter", ["torch-sparse", "torch-cross-encoder", "torch-entities", "torch-classifier"])
async def test_every_family_answers_400(make: Any, tmp_path: Path, adapter: str) -> None:
    """G3: heads and all, through the server."""
    heads = {
        "torch-sparse": {"head": "AutoModelForMaskedLM"},
        "torch-cross-encoder": {"head": "AutoModelForSequenceClassification", "num_labels": 1},
        "torch-entities": {
            "head": "AutoModelForTokenClassification", "num_labels": 3, "id2label": {0: "O", 1: "B-X", 2: "I-X"}
        },
        "torch-classifier": {"head": "AutoModelForSequenceClassification", "num_labels": 3},
    }  # fmt: skip
    folder = make.transformer(tmp_path / "m", "data2vec-text", limit=None, **heads[adapter])
    route = {"torch-sparse": "encode", "torch-cross-encoder": "score"}.get(adapter, "extract")
    body: dict[str, Any] = {"query": {"text": "fox"}} if route == "score" else {}
    body |= {"params": {"output_types": ["sparse"]}} if route == "encode" else {}
    spare = 4 if route == "score" else 2  # special tokens, and the query
    async with serving([make.spec(folder, adapter)]) as (http, _):
        replies = [
            await http.post(f"/v1/{route}/m", json={**body, "items": [{"text": "fox " * (count - spare)}]})
            for count in (39, 40)
        ]
    assert [reply.status_code for reply in replies] == [200, 400], [reply.text[:200] for reply in replies]
