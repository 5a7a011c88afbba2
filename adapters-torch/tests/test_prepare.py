"""From a request to tokens: limits, token lists, prompts, dimensions, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sie_core import BatchEngine, BatchRequest, InputTooLong, InvalidInput, Item, RequestParams, Task, Unsupported

LIMIT = 32


@pytest.fixture
def engine(load: Any, tiny_bert: Path) -> BatchEngine:
    return load(tiny_bert)  # type: ignore[no-any-return]


def tokens(engine: BatchEngine, *items: Item, **params: Any) -> list[int]:
    return [one.tokens for one in engine.prepare(BatchRequest(Task.ENCODE, items, RequestParams(**params)))]


def test_tokens_count_the_special_ones(engine: BatchEngine) -> None:
    assert tokens(engine, Item(text="a red fox"), Item(text="fox")) == [5, 3]
    outputs = engine.run(engine.prepare(BatchRequest(Task.ENCODE, [Item(text="a red fox")])))
    assert outputs[0].tokens == 5


def test_blank_text_works(engine: BatchEngine, make: Any) -> None:
    assert tokens(engine, Item(text=" \n\t ")) == [2]
    assert np.isfinite(make.embed(engine, [" "])).all()


def test_text_that_is_too_long_names_its_index(engine: BatchEngine) -> None:
    fits, long = Item(text="fox " * (LIMIT - 2)), Item(text="fox " * (LIMIT - 1))
    assert tokens(engine, fits) == [LIMIT]
    with pytest.raises(InputTooLong) as caught:
        tokens(engine, fits, long)
    assert (caught.value.index, caught.value.tokens, caught.value.limit) == (1, LIMIT + 1, LIMIT)


def test_truncation_keeps_the_special_tokens(engine: BatchEngine, make: Any) -> None:
    words = ["fox", "red"] * LIMIT
    cut = make.embed(engine, [" ".join(words)], truncate=True)
    np.testing.assert_allclose(cut, make.embed(engine, [" ".join(words[: LIMIT - 2])]), atol=1e-6)


def test_truncation_by_configuration_and_by_request(load: Any, tiny_bert: Path) -> None:
    lenient, long = load(tiny_bert, truncate=True), Item(text="fox " * 100)
    assert tokens(lenient, long) == [LIMIT]
    with pytest.raises(InputTooLong):
        tokens(lenient, long, truncate=False)


def test_max_length_option(load: Any, tiny_bert: Path) -> None:
    short = load(tiny_bert, max_length=6)
    assert short.capabilities.max_sequence_length == 6
    assert tokens(short, Item(text="fox " * 100), truncate=True) == [6]


@pytest.mark.parametrize(("kind", "limit"), [("bert", 40), ("roberta", 39), ("distilbert", 40), ("qwen3", 100)])
def test_a_limit_beyond_the_table_of_positions(load: Any, make: Any, tmp_path: Path, kind: str, limit: int) -> None:
    """sentence-transformers would take such a text, and fail in the model."""
    folder = make.transformer(tmp_path / kind, kind)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    engine = load(folder)
    assert engine.capabilities.max_sequence_length == limit
    assert make.encode(engine, ["fox " * 200], truncate=True)[0].tokens == limit


def test_token_lists_get_the_special_tokens_that_a_text_gets(engine: BatchEngine, make: Any) -> None:
    words = ["a", "red", "fox"]
    ids = [4 + make.words.index(word) for word in words]
    expected = make.embed(engine, [" ".join(words)])
    np.testing.assert_array_equal(make.embed(engine, [ids]), expected)
    np.testing.assert_array_equal(make.embed(engine, [[2, *ids, 3]]), expected)  # the client added them


def test_token_lists_get_the_prompt(load: Any, make: Any, tiny_bert: Path) -> None:
    prompted = load(tiny_bert, document_prompt="the title : ")
    ids = [4 + make.words.index(word) for word in ("red", "fox")]
    np.testing.assert_allclose(make.embed(prompted, [ids]), make.embed(prompted, ["red fox"]), atol=1e-6)


def test_texts_and_token_lists_in_one_request(engine: BatchEngine, make: Any) -> None:
    mixed = make.embed(engine, ["a red fox", [4, 5], "house"])
    for row, alone in zip(mixed, ("a red fox", [4, 5], "house"), strict=True):
        np.testing.assert_allclose(row, make.embed(engine, [alone])[0], atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_token_ids_outside_the_vocabulary_are_refused(engine: BatchEngine, bad: int) -> None:
    with pytest.raises(InvalidInput, match="vocabulary") as caught:
        tokens(engine, Item(token_ids=(5, 6)), Item(token_ids=(5, bad)))
    assert caught.value.index == 1


def test_the_vocabulary_is_that_of_the_model_not_of_the_tokenizer(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path]
) -> None:
    folder = copy_of(tiny_bert)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"]["zebra"] = size  # the tokenizer knows a word that the model has no row for
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    engine = load(folder)
    assert tokens(engine, Item(token_ids=(size - 1,))) == [3]
    with pytest.raises(InvalidInput):
        tokens(engine, Item(token_ids=(size,)))
    with pytest.raises(InvalidInput) as caught:
        tokens(engine, Item(text="a fox"), Item(text="a zebra"))
    assert caught.value.index == 1


def test_too_long_token_lists(engine: BatchEngine) -> None:
    with pytest.raises(InputTooLong) as caught:
        tokens(engine, Item(token_ids=(5,) * 100))
    assert caught.value.index == 0
    assert tokens(engine, Item(token_ids=(5,) * 100), truncate=True) == [LIMIT]


def test_text_that_is_no_unicode(engine: BatchEngine) -> None:
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        tokens(engine, Item(text="fine"), Item(text="\ud800"))
    assert caught.value.index == 1


def test_items_that_are_not_text(engine: BatchEngine) -> None:
    with pytest.raises(InvalidInput) as caught:
        tokens(engine, Item(text="fine"), Item())
    assert caught.value.index == 1
    with pytest.raises(InvalidInput) as caught:
        tokens(engine, Item(text="fine"), Item(text="x", images=(b"png",)))
    assert caught.value.index == 1


def test_what_a_dense_encoder_cannot_do(engine: BatchEngine) -> None:
    with pytest.raises(Unsupported, match="sparse"):
        tokens(engine, Item(text="a"), output_types=("dense", "sparse"))
    with pytest.raises(Unsupported):
        engine.prepare(BatchRequest(Task.SCORE, [Item(text="a")]))


# --- dimensions --------------------------------------------------------------------------------------


def test_an_option_that_is_not_known_is_refused(engine: BatchEngine) -> None:
    """Passed over, it would give other vectors than were asked for."""
    with pytest.raises(Unsupported, match="no option 'normalize'; it has none") as caught:
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], RequestParams(options={"normalize": False})))
    assert caught.value.param == "options.normalize"


def test_dimensions_are_cut_and_scaled_where_the_model_allows_it(load: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tiny_bert, matryoshka=(8, 16))
    assert engine.capabilities.matryoshka == (8, 16)
    full, short = make.embed(engine, ["a red fox"]), make.embed(engine, ["a red fox"], dimensions=8)
    assert short.shape == (1, 8)
    assert short.dtype == np.float32
    np.testing.assert_allclose(short, full[:, :8] / np.linalg.norm(full[:, :8]), atol=1e-6)
    np.testing.assert_array_equal(make.embed(engine, ["a red fox"], dimensions=32), full)
    with pytest.raises(Unsupported, match="8 or 16 or 32") as caught:
        make.embed(engine, ["a"], dimensions=12)
    assert caught.value.param == "dimensions"


def test_dimensions_are_refused_where_nothing_says_that_they_may_be_cut(engine: BatchEngine, make: Any) -> None:
    for wanted in (8, 33, 0, -1):
        with pytest.raises(Unsupported):
            make.embed(engine, ["a"], dimensions=wanted)


@pytest.mark.parametrize(
    ("declared", "sizes"), [({"matryoshka_dimensions": [16, 32, 64]}, (16, 32)), ({"is_matryoshka": True}, None)]
)
def test_dimensions_that_the_model_declares(
    load: Any, make: Any, tiny_bert: Path, copy_of: Callable[[Path], Path],
    declared: dict[str, Any], sizes: tuple[int, ...] | None,
) -> None:  # fmt: skip
    folder = copy_of(tiny_bert)
    make.edit_json(folder / "config.json", **declared)
    engine = load(folder)
    assert engine.capabilities.matryoshka == sizes
    assert make.embed(engine, ["a red fox"], dimensions=16).shape == (1, 16)
