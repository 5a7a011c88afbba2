"""torch-entities: the entities are those of transformers' token classification pipeline on the same weights."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
from family_scenes import check_reserved
from sie_adapters_torch.entities import EntitiesAdapter, EntityOptions
from sie_core import (
    BatchRequest,
    Capabilities,
    Entity,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    Unsupported,
    locate,
)

HEAD = "AutoModelForTokenClassification"
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TEXTS = (
    "Angela Merkel visited Microsoft's headquarters in Redmond, Washington.",
    "  Jean-Baptiste lives in Montréal — 漢字 and 🙂 emoji around Zürich!",
    "The unbelievably antidisestablishmentarian Wolfgang flew to Kathmandu",
    "fox",
    "New York, Rio de Janeiro and Ouagadougou",
)


def save_tagger(make: Any, folder: Path, kind: str = "bert", labels: Any = LABELS, **settings: Any) -> Path:
    made: Path = make.transformer(
        folder, kind, head=HEAD, **{"num_labels": len(labels), "id2label": dict(enumerate(labels))} | settings
    )
    return made


def save_wordpiece(make: Any, folder: Path, minilm: ModelSpec, labels: Any = LABELS, limit: int = 512) -> Path:
    """A tiny model with the tokenizer of a real one, which cuts words into pieces."""
    save_tagger(make, folder, labels=labels, vocab_size=30_522, max_position_embeddings=512)
    assert minilm.source is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (file := locate(minilm.source) / name).exists():
            shutil.copy(file, folder / name)
    make.edit_json(folder / "tokenizer_config.json", model_max_length=limit)
    backend = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(backend | {"truncation": None, "padding": None}))
    return folder


def found(engine: Any, texts: Any, labels: tuple[str, ...] = (), **params: Any) -> list[tuple[Entity, ...]]:
    items = [Item(text=text) for text in texts]
    request = BatchRequest(Task.EXTRACT, items, RequestParams(**params), labels=labels)
    outputs = engine.run(engine.prepare(request))
    for text, output in zip(texts, outputs, strict=True):
        assert output.tokens > 0
        for entity in output.entities:
            assert entity.text == text[entity.start : entity.end] == entity.text.strip()
    return [output.entities for output in outputs]


def theirs(folder: Path, texts: Any, how: str = "simple", stride: int | None = None) -> Any:
    import transformers

    pipeline: Any = transformers.pipeline("token-classification", model=str(folder), device="cpu")
    settings = {} if stride is None else {"stride": stride}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells when it guesses where words begin
        return [pipeline(text, aggregation_strategy=how, **settings) for text in texts]


def assert_same(ours: Any, expected: Any, texts: Any) -> None:
    assert sum(map(len, expected)) > len(texts)
    for text, mine, other in zip(texts, ours, expected, strict=True):
        spans = []
        for one in other:  # theirs may begin with the space before a word
            shown = text[one["start"] : one["end"]]
            start = one["start"] + len(shown) - len(shown.lstrip())
            spans.append((one["entity_group"], start, start + len(shown.strip())))
        assert [(one.label, one.start, one.end) for one in mine] == spans
        assert [one.score for one in mine] == pytest.approx([one["score"] for one in other], abs=1e-5)


def tagger(load: Any, folder: Path, **options: Any) -> Any:
    return load(folder, adapter="torch-entities", **options)


def some_texts(words: list[str], count: int = 20) -> list[str]:
    rng = random.Random(11)
    return [" ".join(rng.choices(words, k=rng.randint(1, 24))) for _ in range(count)]


@pytest.fixture(scope="module")
def tiny(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return save_tagger(make, tmp_path_factory.mktemp("models") / "tagger")


@pytest.fixture(scope="module")
def wordpiece(make: Any, minilm: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return save_wordpiece(make, tmp_path_factory.mktemp("models") / "wordpiece", minilm)


# --- the reference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet", "modernbert"])
def test_architectures(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    folder, texts = save_tagger(make, tmp_path / kind, kind), some_texts(make.words)
    assert_same(found(tagger(load, folder), texts), theirs(folder, texts), texts)


@pytest.mark.parametrize("how", ["simple", "first", "average", "max"])
def test_words_of_several_tokens(load: Any, wordpiece: Path, how: str) -> None:
    expected = theirs(wordpiece, TEXTS, how)
    assert_same(found(tagger(load, wordpiece, aggregation=how), TEXTS), expected, TEXTS)
    assert_same(found(tagger(load, wordpiece), TEXTS, options={"aggregation": how}), expected, TEXTS)


@pytest.mark.parametrize("how", ["simple", "first"])
def test_a_tokenizer_that_does_not_mark_words(load: Any, make: Any, tiny: Path, how: str) -> None:
    texts = ["fox.dog a red.", "the lazy dog: river", *some_texts(make.words)]
    assert_same(found(tagger(load, tiny, aggregation=how), texts), theirs(tiny, texts, how), texts)


@pytest.mark.parametrize("labels", [("O", "PER", "LOC"), ("O", "I-PER", "I-LOC"), ("B-PER", "I-PER", "O")])
def test_other_ways_to_label(load: Any, make: Any, tmp_path: Path, labels: tuple[str, ...]) -> None:
    folder, texts = save_tagger(make, tmp_path / "tagger", labels=labels, seed=2), some_texts(make.words)
    assert_same(found(tagger(load, folder), texts), theirs(folder, texts), texts)


def test_labels_for_ends_and_single_tokens(load: Any, make: Any, tmp_path: Path) -> None:
    """BIOES: what S- marks stands alone, and nothing goes on after E-. transformers' grouping knows no such labels."""
    import transformers

    labels = ("O", "B-PER", "I-PER", "E-PER", "S-PER")
    folder, texts = save_tagger(make, tmp_path / "tagger", labels=labels), some_texts(make.words, 40)
    pipeline: Any = transformers.pipeline("token-classification", model=str(folder), device="cpu", ignore_labels=[])
    seen = set()
    for text, ours in zip(texts, found(tagger(load, folder), texts), strict=True):
        expected: list[list[int]] = []
        open_one = False
        for token in pipeline(text):
            kind = token["entity"][0]
            seen.add(kind)
            if kind == "O":
                open_one = False
                continue
            if not open_one or kind in "BS":
                expected.append([token["start"], token["end"]])
            expected[-1][1] = token["end"]
            open_one = kind in "BI"
        assert [[entity.start, entity.end] for entity in ours] == expected
        assert {entity.label for entity in ours} <= {"PER"}
    assert seen == set("OBIES")


# --- long texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [0, 3, 8])
@pytest.mark.parametrize("how", ["simple", "average"])
def test_windows(load: Any, make: Any, minilm: ModelSpec, tmp_path: Path, stride: int, how: str) -> None:
    folder = save_wordpiece(make, tmp_path / "short", minilm, limit=16)
    texts = [" ".join(TEXTS), " ".join(TEXTS[::-1] * 2), "fox " * 14, "fox " * 15, *TEXTS]
    engine = tagger(load, folder, stride=stride, aggregation=how)
    assert_same(found(engine, texts), theirs(folder, texts, how, stride), texts)


def test_long_texts_are_refused_or_cut_without_windows(load: Any, tiny: Path) -> None:
    engine, long = tagger(load, tiny), "a red fox jumps " * 20
    with pytest.raises(InputTooLong) as caught:
        found(engine, ["fox", long])
    assert (caught.value.index, caught.value.tokens, caught.value.limit) == (1, 82, 32)
    (cut,) = found(engine, [long], truncate=True)
    assert cut == found(engine, ["a red fox jumps " * 7 + "a red"])[0]
    windows = tagger(load, tiny, stride=4)
    assert found(windows, [long], truncate=True) == [cut]
    assert len(found(windows, [long])[0]) > len(cut)


def test_a_stride_that_leaves_no_room_is_refused(load: Any, tiny: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match="stride is 30"):
        tagger(load, tiny, stride=30)


# --- labels, thresholds -------------------------------------------------------------------------------------


def test_labels_choose(load: Any, tiny: Path, make: Any) -> None:
    engine, texts = tagger(load, tiny), some_texts(make.words)
    every, some = found(engine, texts), found(engine, texts, labels=("LOC",))
    assert some == [tuple(one for one in each if one.label == "LOC") for each in every]
    assert 0 < sum(map(len, some)) < sum(map(len, every))
    assert found(engine, texts, labels=("LOC", "PER")) == every
    with pytest.raises(Unsupported, match="'ORG'") as caught:
        found(engine, texts, labels=("LOC", "ORG"))
    assert (caught.value.supported, caught.value.param) == (("PER", "LOC"), "labels")


def test_threshold(load: Any, tiny: Path, make: Any) -> None:
    texts = some_texts(make.words)
    every = found(tagger(load, tiny), texts)
    kept = [tuple(one for one in each if one.score >= 0.6) for each in every]
    assert 0 < sum(map(len, kept)) < sum(map(len, every))
    assert found(tagger(load, tiny, threshold=0.6), texts) == kept
    assert found(tagger(load, tiny, threshold=0.1), texts, options={"threshold": 0.6}) == kept


# --- batches and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "batch_tokens"), [(1, 8192), (3, 64)])
def test_batches_do_not_change_the_entities(load: Any, make: Any, tiny: Path, threads: int, batch_tokens: int) -> None:
    texts = some_texts(make.words, 60)
    engine = load(attrs.evolve(make.spec(tiny, "torch-entities", threads=threads), batch_tokens=batch_tokens))
    one = tagger(load, tiny, threads=1)
    for text, together in zip(texts, found(engine, texts), strict=True):
        (alone,) = found(one, [text])
        assert [(each.label, each.start, each.end) for each in alone] == [
            (each.label, each.start, each.end) for each in together
        ]
        assert [each.score for each in alone] == pytest.approx([each.score for each in together], abs=1e-5)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    model: ModelSpec = make.spec(save_tagger(make, tmp_path / kind, kind), "torch-entities", dtype=dtype)
    check_reserved(load, model)


def test_describes_itself_without_loading(make: Any, tiny: Path) -> None:
    described = EntitiesAdapter().describe(make.spec(tiny, "torch-entities"))
    assert described == Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=(), max_sequence_length=32)


# --- what is refused ----------------------------------------------------------------------------------------


def test_bad_requests(load: Any, tiny: Path) -> None:
    engine = tagger(load, tiny)
    with pytest.raises(Unsupported, match="extract only"):
        engine.prepare(BatchRequest(Task.SCORE, [Item(text="fox")], query=Item(text="dog")))
    with pytest.raises(InvalidInput, match="no places") as caught:
        engine.prepare(BatchRequest(Task.EXTRACT, [Item(text="fox"), Item(token_ids=(5,))]))
    assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="no text") as caught:
        engine.prepare(BatchRequest(Task.EXTRACT, [Item(text="fox"), Item()]))
    assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        found(engine, ["fox", "\ud800"])
    assert caught.value.index == 1
    with pytest.raises(Unsupported, match="instruction"):
        found(engine, ["fox"], instruction="find foxes")
    for wrong in ({"threshold": 2}, {"threshold": True}, {"aggregation": "none"}, {"smell": 1}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            found(engine, ["fox"], options=wrong)


@pytest.mark.parametrize("wrong", [{"aggregation": "none"}, {"threshold": 1.5}, {"stride": -1}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EntityOptions(**wrong)


def test_other_models_are_refused(load: Any, make: Any, tiny: Path, tiny_bert: Path, copy_of: Any) -> None:
    with pytest.raises(ModelSourceInvalid, match="BertModel"):
        tagger(load, tiny_bert)
    folder = copy_of(tiny)
    make.edit_json(folder / "config.json", id2label={"0": "O", "2": "B-PER"})
    with pytest.raises(ModelSourceInvalid, match="id2label"):
        tagger(load, folder)
    make.edit_json(folder / "config.json", id2label={str(index): f"L{index}" for index in range(7)})
    with pytest.raises(ModelSourceInvalid, match="fit the architecture"):
        tagger(load, folder)
