"""The vectors are those of sentence-transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sie_core import ModelSpec, locate

TOLERANCE = 1e-5


def some_texts(words: list[str], count: int = 17) -> list[str]:
    rng = random.Random(3)
    return [" ".join(rng.choices(words, k=rng.randint(1, 24))) for _ in range(count)]


def theirs(folder: Path, texts: list[str], *, method: str = "encode", **how: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return getattr(SentenceTransformer(str(folder), device="cpu"), method)(texts, **how)


def test_minilm(load: Any, make: Any, minilm: ModelSpec) -> None:
    texts = [
        "A man is eating food.", " ", "é ü 漢字 🙂", "word " * 200, "One.",
        *(" ".join(["The quick brown fox jumps over the lazy dog."] * n) for n in range(1, 12)),
    ]  # fmt: skip
    assert minilm.source is not None
    ours = make.embed(load(minilm), texts)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs(locate(minilm.source), texts), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "qwen3", "t5"])
def test_architectures_without_files_of_sentence_transformers(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    folder = make.transformer(tmp_path / kind, kind)
    texts = some_texts(make.words)
    ours, expected = make.embed(load(folder), texts), theirs(folder, texts)
    assert np.abs(expected - expected[0]).max() > 1e-2  # the texts are told apart
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("bert", {"pooling": "cls", "normalise": False}),
        ("bert", {"pooling": "mean", "dense": 12}),
        ("roberta", {"pooling": "cls", "dense": 20, "normalise": False}),
        ("qwen3", {"pooling": "last_token"}),
        ("t5", {"pooling": "mean", "dense": 48}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_layouts(load: Any, make: Any, tmp_path: Path, kind: str, layout: dict[str, Any]) -> None:
    folder = make.modules(make.transformer(tmp_path / kind, kind), **layout)
    texts = some_texts(make.words)
    engine = load(folder)
    expected = theirs(folder, texts)
    assert engine.capabilities.dims["dense"] == expected.shape[1]
    np.testing.assert_allclose(make.embed(engine, texts), expected, atol=TOLERANCE)


def test_pooling_as_newer_releases_write_it(load: Any, make: Any, tmp_path: Path) -> None:
    folder = make.modules(make.transformer(tmp_path / "bert"), pooling="mean")
    about = {"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about))
    old = make.modules(make.transformer(tmp_path / "old"), pooling="cls")
    texts = some_texts(make.words)
    np.testing.assert_array_equal(make.embed(load(folder), texts), make.embed(load(old), texts))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts(load: Any, make: Any, tmp_path: Path, include_prompt: bool) -> None:
    prompts = {"query": "query : ", "document": "the title : ", "short": "a "}
    folder = make.modules(
        make.transformer(tmp_path / "bert"), prompts=prompts, default_prompt="short", include_prompt=include_prompt
    )
    texts = some_texts(make.words)
    engine = load(folder)
    for ours, expected in (
        ({"is_query": True}, {"method": "encode_query"}),
        ({"is_query": False}, {"method": "encode_document"}),
        ({}, {}),  # G8: the default prompt, as the reference's encode() has it
        ({"instruction": "short"}, {"prompt_name": "short"}),
        ({"instruction": "lazy dog : "}, {"prompt": "lazy dog : "}),
    ):
        np.testing.assert_allclose(make.embed(engine, texts, **ours), theirs(folder, texts, **expected), atol=TOLERANCE)
    plain, documents = make.embed(engine, texts), make.embed(engine, texts, is_query=False)
    assert np.abs(make.embed(engine, texts, is_query=True) - documents).max() > 1e-3
    assert np.abs(plain - documents).max() > 1e-3
    np.testing.assert_array_equal(make.embed(load(folder, document_prompt=prompts["document"]), texts), documents)


def test_default_prompt_is_used_when_the_files_have_none_for_documents(load: Any, make: Any, tmp_path: Path) -> None:
    folder = make.modules(make.transformer(tmp_path / "bert"), prompts={"short": "a red "}, default_prompt="short")
    texts = some_texts(make.words)
    np.testing.assert_allclose(make.embed(load(folder), texts), theirs(folder, texts), atol=TOLERANCE)


def test_options_win_over_files(load: Any, make: Any, tmp_path: Path) -> None:
    folder = make.modules(make.transformer(tmp_path / "bert"), prompts={"query": "query : "}, normalise=True)
    texts = some_texts(make.words)
    plain = make.embed(load(folder, normalise=False), texts)
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 0.05
    unit = make.embed(load(folder), texts)
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), unit, atol=TOLERANCE)
    cls = make.embed(load(folder, pooling="cls"), texts)
    assert np.abs(cls - unit).max() > 1e-3
    prompted = load(folder, query_prompt="the lazy ", document_prompt="quick ")
    bare = load(folder, query_prompt="")
    for got, prefix in (
        (make.embed(prompted, texts, is_query=True), "the lazy "),
        (make.embed(prompted, texts), "quick "),
    ):
        np.testing.assert_allclose(
            got, make.embed(bare, [prefix + text for text in texts], is_query=True), atol=TOLERANCE
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_close_and_comes_out_as_float32(load: Any, make: Any, tiny_bert: Path, dtype: str) -> None:
    texts = some_texts(make.words)
    full, half = make.embed(load(tiny_bert), texts), make.embed(load(tiny_bert, dtype=dtype), texts)
    assert half.dtype == np.float32
    assert 0 < np.abs(full - half).max() < 0.1


def test_packed_and_padded_agree(load: Any, make: Any, tiny_bert: Path) -> None:
    """Eager attention takes the padded path; the default takes the packed one."""
    texts = some_texts(make.words, count=60)
    np.testing.assert_allclose(
        make.embed(load(tiny_bert), texts), make.embed(load(tiny_bert, attn="eager"), texts), atol=TOLERANCE
    )


@pytest.mark.parametrize("batch_tokens", [1, 40, 100])
def test_small_batches_give_the_same_vectors(load: Any, make: Any, tiny_bert: Path, batch_tokens: int) -> None:
    import attrs

    texts = some_texts(make.words)
    small = load(attrs.evolve(make.spec(tiny_bert), batch_tokens=batch_tokens))
    assert small.max_batch_tokens == batch_tokens
    np.testing.assert_allclose(make.embed(small, texts), make.embed(load(tiny_bert), texts), atol=TOLERANCE)
