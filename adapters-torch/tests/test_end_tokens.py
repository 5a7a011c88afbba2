"""Tokenizers of e5-mistral's kind: a text ends with the end token, which last-token pooling reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sie_core import ModelSourceInvalid

WORDS = ["a", "b", "▁", "▁a", "▁b", "ab", "▁ab"]
TEXTS = ["a b", "ab", "b a ab"]


def save_mistral(make: Any, folder: Path, **about: Any) -> Path:
    """A Mistral with a Llama tokenizer whose file puts no end token: tokenizer_config.json asks for it."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

    make.modules(make.transformer(folder, "mistral"), pooling="last_token")
    for file in folder.glob("*token*"):
        file.unlink()
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS, *map(chr, range(99, 116))])}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    said = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True, "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(said | special | about))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return folder


def test_the_end_token_is_there(load: Any, make: Any, tmp_path: Path) -> None:
    """G2: with add_eos_token the vectors are those of texts with the end token, whatever transformers makes of it."""
    import torch
    from transformers import AutoModel

    folder = save_mistral(make, tmp_path / "m")
    engine = load(folder)
    outputs = make.encode(engine, TEXTS)
    ids = [[1, 6, 7, 2], [1, 9, 2], [1, 7, 6, 9, 2]]
    assert [output.tokens for output in outputs] == [len(each) for each in ids]
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        ends = [model(torch.tensor([each]))[0][0, -1] for each in ids]
    expected = torch.nn.functional.normalize(torch.stack(ends), dim=1).numpy()
    np.testing.assert_allclose([output.dense for output in outputs], expected, atol=1e-5)
    given = make.embed(engine, ids)  # a client that sends whole texts as ids
    np.testing.assert_allclose(given, expected, atol=1e-5)


def test_none_where_none_is_asked_for(load: Any, make: Any, tmp_path: Path) -> None:
    """G2: the tokenizer's own file counts without add_eos_token."""
    engine = load(save_mistral(make, tmp_path / "m", add_eos_token=False))
    assert [output.tokens for output in make.encode(engine, TEXTS)] == [3, 2, 4]


def test_an_end_token_that_nobody_names(load: Any, make: Any, tmp_path: Path) -> None:
    """G2: refused with the reason."""
    folder = make.transformer(tmp_path / "m", "mistral")
    make.edit_json(folder / "tokenizer_config.json", add_eos_token=True)
    with pytest.raises(ModelSourceInvalid, match="add_eos_token is true"):
        load(folder)
