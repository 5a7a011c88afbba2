"""torch-classifier: the classes are those of transformers' pipelines on the same weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs
import pytest
from family_scenes import check_reserved
from sie_adapters_torch.classifier import ClassifierAdapter, ClassifierOptions
from sie_core import (
    BatchRequest,
    Capabilities,
    Classification,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    Unsupported,
)

HEAD = "AutoModelForSequenceClassification"
LABELS = ("calm", "glad", "sad", "angry")
NLI = ("contradiction", "neutral", "entailment")
TEXTS = ("a red fox", "dog", "the river runs under a blue house", "the lazy dog sleeps over the quick fox")
CHOICES = ("fox", "house", "quick dog")


def save_classifier(make: Any, folder: Path, kind: str = "bert", labels: Any = LABELS, **settings: Any) -> Path:
    names: dict[str, Any] = {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    names["label2id"] = {label: index for index, label in names["id2label"].items()}
    made: Path = make.transformer(folder, kind, head=HEAD, **names | settings)
    return made


def classes(engine: Any, texts: Any, labels: Any = (), **params: Any) -> list[tuple[Classification, ...]]:
    items = [each if isinstance(each, Item) else Item(text=each) for each in texts]
    request = BatchRequest(Task.EXTRACT, items, RequestParams(**params), labels=tuple(labels))
    outputs = engine.run(engine.prepare(request))
    assert all(output.tokens > 0 for output in outputs)
    return [output.classifications for output in outputs]


def theirs(folder: Path, texts: Any, **settings: Any) -> Any:
    import transformers

    pipeline: Any = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    return [[(one["label"], one["score"]) for one in pipeline(text, **{"top_k": None} | settings)] for text in texts]


def zero_shot(folder: Path, texts: Any, labels: Any = CHOICES, **settings: Any) -> Any:
    import transformers

    pipeline: Any = transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")
    found = [pipeline(text, candidate_labels=list(labels), **settings) for text in texts]
    return [list(zip(one["labels"], one["scores"], strict=True)) for one in found]


def assert_same(ours: Any, expected: Any) -> None:
    assert len({scores[0] for scores in map(tuple, expected)}) > 1
    for mine, other in zip(ours, expected, strict=True):
        assert [one.label for one in mine] == [label for label, _ in other]
        assert [one.score for one in mine] == pytest.approx([score for _, score in other], abs=1e-5)


def classifier(load: Any, folder: Path, **options: Any) -> Any:
    return load(folder, adapter="torch-classifier", **options)


@pytest.fixture(scope="module")
def tiny(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return save_classifier(make, tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="module")
def nli(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("models") / "nli"
    return save_classifier(make, folder, labels=NLI, more=("this", "example", "is"))


# --- the model's own labels ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "modernbert", "qwen3"])
def test_architectures(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    folder = save_classifier(make, tmp_path / kind, kind)
    assert_same(classes(classifier(load, folder), TEXTS), theirs(folder, TEXTS))


@pytest.mark.parametrize(
    "said",
    [
        {"problem_type": "multi_label_classification"},
        {"problem_type": "single_label_classification"},
        {"problem_type": "regression"},
        {"labels": ("only",)},
        {"labels": ("no", "yes")},
    ],
)
def test_the_activation_is_that_of_the_problem(load: Any, make: Any, tmp_path: Path, said: dict[str, Any]) -> None:
    folder = save_classifier(make, tmp_path / "model", **said)
    assert_same(classes(classifier(load, folder), TEXTS), theirs(folder, TEXTS))


@pytest.mark.parametrize(("activation", "function"), [("sigmoid", "sigmoid"), ("identity", "none")])
def test_the_activation_can_be_chosen(load: Any, tiny: Path, activation: str, function: str) -> None:
    expected = theirs(tiny, TEXTS, function_to_apply=function)
    assert_same(classes(classifier(load, tiny, activation=activation), TEXTS), expected)
    assert_same(classes(classifier(load, tiny), TEXTS, options={"activation": activation}), expected)


def test_a_model_that_names_no_labels_has_two(load: Any, make: Any, tmp_path: Path) -> None:
    folder: Path = make.transformer(tmp_path / "bert", head=HEAD)
    make.edit_json(folder / "config.json", id2label=None, label2id=None)
    ours = classes(classifier(load, folder), TEXTS)
    assert {one.label for one in ours[0]} == {"LABEL_0", "LABEL_1"}
    assert_same(ours, theirs(folder, TEXTS))


def test_long_texts_with_many_labels_are_refused(load: Any, make: Any, tmp_path: Path) -> None:
    """Every label is read with the whole text: ids alone would fill the memory."""
    folder = save_classifier(make, tmp_path / "long", labels=NLI, limit=4096, max_position_embeddings=4096)
    engine = load(folder, adapter="torch-classifier")

    def request(labels: int) -> BatchRequest:
        items = [Item(text="fox"), Item(text="red " * 2000)]
        return BatchRequest(Task.EXTRACT, items, RequestParams(), labels=tuple(map(str, range(labels))))

    assert len(engine.prepare(request(400))) == 2
    with pytest.raises(InvalidInput, match="fewer labels") as caught:
        engine.prepare(request(500))
    assert caught.value.index == 1


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_numbers_of_labels_that_cannot_be(load: Any, make: Any, tiny: Path, copy_of: Any, count: int) -> None:
    broken = copy_of(tiny)
    make.edit_json(broken / "config.json", id2label=None, label2id=None, num_labels=count)
    with pytest.raises(ModelSourceInvalid, match="num_labels"):
        load(broken, adapter="torch-classifier")


def test_top_k(load: Any, tiny: Path) -> None:
    every = classes(classifier(load, tiny), TEXTS)
    best = [each[:2] for each in every]
    assert classes(classifier(load, tiny, top_k=2), TEXTS) == best
    assert classes(classifier(load, tiny), TEXTS, options={"top_k": 2}) == best
    assert classes(classifier(load, tiny, top_k=2), TEXTS, options={"top_k": 9}) == every


def test_labels_choose(load: Any, tiny: Path) -> None:
    engine = classifier(load, tiny)
    every = classes(engine, TEXTS)
    some = classes(engine, TEXTS, labels=("sad", "calm"))
    assert some == [tuple(one for one in each if one.label in ("sad", "calm")) for each in every]
    with pytest.raises(Unsupported, match="'fox'") as caught:
        classes(engine, TEXTS, labels=("sad", "fox"))
    assert (caught.value.supported, caught.value.param) == (LABELS, "labels")


# --- any labels, by inference -----------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [CHOICES, ("fox",)])
@pytest.mark.parametrize("multi_label", [False, True])
def test_labels_of_a_request(load: Any, nli: Path, labels: Any, multi_label: bool) -> None:
    expected = zero_shot(nli, TEXTS, labels, multi_label=multi_label)
    assert_same(classes(classifier(load, nli, multi_label=multi_label), TEXTS, labels), expected)
    assert_same(classes(classifier(load, nli), TEXTS, labels, options={"multi_label": multi_label}), expected)


@pytest.mark.parametrize("names", [("entailment", "neutral", "contradiction"), ("ENTAILED", "not")])
def test_where_the_labels_are(load: Any, make: Any, tmp_path: Path, names: Any) -> None:
    folder = save_classifier(make, tmp_path / "nli", labels=names)
    for multi_label in (False, True):
        engine = classifier(load, folder, multi_label=multi_label)
        assert_same(classes(engine, TEXTS, CHOICES), zero_shot(folder, TEXTS, multi_label=multi_label))


def test_hypotheses(load: Any, nli: Path) -> None:
    said = "the title is {} ."
    expected = zero_shot(nli, TEXTS, hypothesis_template=said)
    assert_same(classes(classifier(load, nli, hypothesis_template=said), TEXTS, CHOICES), expected)
    assert_same(classes(classifier(load, nli), TEXTS, CHOICES, options={"hypothesis_template": said}), expected)
    braces = classes(classifier(load, nli), TEXTS, ["{} {0.real}"])  # a label is no template
    assert braces[0][0].label == "{} {0.real}"


def test_without_labels_it_gives_its_own(load: Any, nli: Path) -> None:
    assert_same(classes(classifier(load, nli), TEXTS), theirs(nli, TEXTS))


def test_long_texts(load: Any, nli: Path, tiny: Path) -> None:
    long = "the river runs under a blue house " * 10
    engine = classifier(load, nli)
    with pytest.raises(InputTooLong) as caught:
        classes(engine, ["fox", long], CHOICES)
    assert (caught.value.index, caught.value.limit) == (1, 32)
    # What is said of the text is never cut.
    assert_same(classes(engine, [*TEXTS, long], CHOICES, truncate=True), zero_shot(nli, [*TEXTS, long]))
    with pytest.raises(InputTooLong):
        classes(engine, ["fox"], ["fox " * 40], truncate=True)
    with pytest.raises(InputTooLong):
        classes(classifier(load, tiny), [long])
    assert_same(
        classes(classifier(load, tiny, truncate=True), [*TEXTS, long]), theirs(tiny, [*TEXTS, long], truncation=True)
    )


# --- batches and memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "batch_tokens"), [(1, 8192), (3, 64)])
@pytest.mark.parametrize("labels", [(), CHOICES])
def test_batches_do_not_change_the_classes(
    load: Any, make: Any, nli: Path, threads: int, batch_tokens: int, labels: Any
) -> None:
    rng = random.Random(2)
    texts = [" ".join(rng.choices(make.words, k=rng.randint(1, 18))) for _ in range(40)]
    engine = load(attrs.evolve(make.spec(nli, "torch-classifier", threads=threads), batch_tokens=batch_tokens))
    one = classifier(load, nli, threads=1)
    for text, together in zip(texts, classes(engine, texts, labels), strict=True):
        (alone,) = classes(one, [text], labels)
        assert {each.label: each.score for each in together} == pytest.approx(
            {each.label: each.score for each in alone}, abs=1e-5
        )


def test_different_requests_share_a_batch(load: Any, nli: Path) -> None:
    engine = classifier(load, nli)
    asked: list[tuple[Any, dict[str, Any]]] = [
        ((), {}),
        (CHOICES, {}),
        (("dog",), {}),
        (CHOICES, {"multi_label": True}),
    ]
    batch = [
        prepared
        for labels, options in asked
        for prepared in engine.prepare(
            BatchRequest(
                Task.EXTRACT, [Item(text=text) for text in TEXTS], RequestParams(options=options), labels=labels
            )
        )
    ]
    mixed = iter(engine.run(batch))
    for labels, options in asked:
        for alone in classes(engine, TEXTS, labels, options=options):
            together = next(mixed).classifications
            assert [one.label for one in together] == [one.label for one in alone]
            assert [one.score for one in together] == pytest.approx([one.score for one in alone], abs=1e-5)


def test_token_ids(load: Any, make: Any, nli: Path) -> None:
    engine = classifier(load, nli)
    ids = {word: 4 + index for index, word in enumerate(make.words)}
    items = [Item(token_ids=tuple(ids[word] for word in text.split())) for text in TEXTS]
    for labels in ((), CHOICES):
        assert classes(engine, items, labels) == classes(engine, TEXTS, labels)
        with pytest.raises(InvalidInput, match="999") as caught:
            classes(engine, ["fox", Item(token_ids=(999,))], labels)
        assert caught.value.index == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, tiny: Path, dtype: str) -> None:
    model: ModelSpec = make.spec(tiny, "torch-classifier", dtype=dtype)
    check_reserved(load, model)


def test_describes_itself_without_loading(make: Any, tiny: Path) -> None:
    described = ClassifierAdapter().describe(make.spec(tiny, "torch-classifier"))
    assert described == Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=(), max_sequence_length=32)


# --- what is refused ----------------------------------------------------------------------------------------


def test_bad_requests(load: Any, tiny: Path, nli: Path) -> None:
    engine = classifier(load, tiny)
    with pytest.raises(Unsupported, match="extract only"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")]))
    for labels in ((), CHOICES):
        with pytest.raises(InvalidInput) as caught:
            classes(classifier(load, nli), ["fox", Item()], labels)
        assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        classes(classifier(load, nli), ["fox"], ["fox", "\ud800"])
    assert (caught.value.index, caught.value.param) == (1, "labels")
    with pytest.raises(Unsupported, match="instruction"):
        classes(engine, ["fox"], instruction="be kind")
    with pytest.raises(Unsupported) as unknown:
        classes(engine, ["fox"], options={"multi_label": True})  # it infers nothing
    assert unknown.value.supported == ("activation", "top_k")
    for wrong in ({"top_k": 0}, {"multi_label": 1}, {"hypothesis_template": "no place"}, {"activation": "x"}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            classes(classifier(load, nli), ["fox"], CHOICES, options=wrong)


@pytest.mark.parametrize("wrong", [{"activation": "tanh"}, {"top_k": 0}, {"hypothesis_template": "no place"}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ClassifierOptions(**wrong)


def test_a_model_without_a_head_is_refused(load: Any, tiny_bert: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match="BertModel"):
        classifier(load, tiny_bert)
