"""torch-cross-encoder: the scores are those of sentence-transformers' CrossEncoder on the same weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from family_scenes import check_reserved
from numpy.typing import NDArray
from sie_adapters_torch.cross_encoder import CrossEncoderAdapter, CrossEncoderOptions
from sie_core import (
    BatchRequest,
    Capabilities,
    InputTooLong,
    InvalidInput,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    UnsafeSource,
    Unsupported,
)

TOLERANCE = 1e-5
HEAD = "AutoModelForSequenceClassification"
QUERY = "the quick fox jumps"
DOCUMENTS = ("a red fox", "dog", "the river runs under a blue house", "the lazy dog sleeps over the quick fox", "fox")


def save_ranker(make: Any, folder: Path, kind: str = "bert", **settings: Any) -> Path:
    """A classifier with one label, whose tokenizer tells the two texts apart where the model can."""
    made: Path = make.transformer(folder, kind, head=HEAD, **{"num_labels": 1} | settings)
    if kind in ("bert", "electra"):
        give_types(make, made)
    return made


def give_types(make: Any, folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    pair = content["post_processor"]["pair"]
    for part in pair[3:]:
        next(iter(part.values()))["type_id"] = 1
    file.write_text(json.dumps(content))
    make.edit_json(
        folder / "tokenizer_config.json", model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )


def some_documents(words: list[str], count: int = 40) -> list[str]:
    rng = random.Random(7)
    return ["", *(" ".join(rng.choices(words, k=rng.randint(1, 15))) for _ in range(count))]


def request(query: Any, documents: Any, **params: Any) -> BatchRequest:
    items = [each if isinstance(each, Item) else Item(text=each) for each in documents]
    asked = query if isinstance(query, Item) else Item(text=query)
    return BatchRequest(Task.SCORE, items, RequestParams(**params), query=asked)


def scores(engine: Any, query: Any, documents: Any, **params: Any) -> NDArray[np.float64]:
    outputs = engine.run(engine.prepare(request(query, documents, **params)))
    return np.array([output.score for output in outputs])


def theirs(folder: Path, query: str, documents: Any, *, prompt: str | None = None, **settings: Any) -> NDArray[Any]:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", **settings)
    return np.asarray(model.predict([(query, document) for document in documents], prompt=prompt))


@pytest.fixture(scope="module")
def tiny(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return save_ranker(make, tmp_path_factory.mktemp("models") / "ranker")


def ranker(load: Any, folder: Path, **options: Any) -> Any:
    return load(folder, adapter="torch-cross-encoder", **options)


# --- the reference -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "electra", "mpnet", "qwen3", "mistral"],
)
def test_architectures(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    folder = save_ranker(make, tmp_path / kind, kind)
    documents = some_documents(make.words)
    expected = theirs(folder, QUERY, documents)
    assert expected.std() > 1e-2
    np.testing.assert_allclose(scores(ranker(load, folder), QUERY, documents), expected, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_what_the_head_reads_is_as_the_model_says(load: Any, make: Any, tmp_path: Path, pooling: str) -> None:
    folder = save_ranker(make, tmp_path / "modernbert", "modernbert", classifier_pooling=pooling)
    expected = theirs(folder, QUERY, DOCUMENTS)
    np.testing.assert_allclose(scores(ranker(load, folder), QUERY, DOCUMENTS), expected, atol=TOLERANCE)


def test_the_model_is_told_which_text_is_which(load: Any, make: Any, tiny: Path, copy_of: Any) -> None:
    told = scores(ranker(load, tiny), QUERY, DOCUMENTS)
    folder = copy_of(tiny)
    make.edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    untold = scores(ranker(load, folder), QUERY, DOCUMENTS)
    np.testing.assert_allclose(untold, theirs(folder, QUERY, DOCUMENTS), atol=TOLERANCE)
    assert np.abs(told - untold).max() > 1e-3


def test_in_lower_precision(load: Any, tiny: Path) -> None:
    exact = scores(ranker(load, tiny), QUERY, DOCUMENTS)
    np.testing.assert_allclose(scores(ranker(load, tiny, dtype="bfloat16"), QUERY, DOCUMENTS), exact, atol=0.05)


@pytest.mark.parametrize("lengths", [(3, 40), (40, 3), (25, 25), (40, 40), (12, 18), (31, 2)])
def test_long_pairs_are_cut_as_the_tokenizer_cuts_them(
    load: Any, make: Any, tiny: Path, lengths: tuple[int, int]
) -> None:
    rng = random.Random(3)
    query, document = (" ".join(rng.choices(make.words, k=length)) for length in lengths)
    ours = scores(ranker(load, tiny), query, [document, "fox"], truncate=True)
    np.testing.assert_allclose(ours, theirs(tiny, query, [document, "fox"]), atol=TOLERANCE)


def test_limits(load: Any, make: Any, tiny: Path) -> None:
    """Exactly as many tokens as fit, and one more."""
    engine, fits = ranker(load, tiny), 32 - 3 - 4
    assert engine.capabilities.max_sequence_length == 32
    (prepared,) = engine.prepare(request(QUERY, ["fox " * fits]))
    assert prepared.tokens == 32
    with pytest.raises(InputTooLong) as caught:
        engine.prepare(request(QUERY, ["fox", "fox " * (fits + 1)]))
    assert (caught.value.index, caught.value.tokens, caught.value.limit) == (1, 33, 32)
    assert ranker(load, tiny, truncate=True).prepare(request(QUERY, ["fox " * 99]))[0].tokens == 32
    shorter = ranker(load, tiny, max_length=16)
    with pytest.raises(InputTooLong):
        shorter.prepare(request(QUERY, ["fox " * 10]))


# --- activation ----------------------------------------------------------------------------------------


def test_the_default_is_sigmoid_for_one_label(load: Any, tiny: Path) -> None:
    plain, raw = (
        scores(ranker(load, tiny, **options), QUERY, DOCUMENTS) for options in ({}, {"activation": "identity"})
    )
    np.testing.assert_allclose(plain, 1 / (1 + np.exp(-raw)), atol=1e-6)
    asked = scores(ranker(load, tiny), QUERY, DOCUMENTS, options={"activation": "identity"})
    np.testing.assert_array_equal(asked, raw)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}),
        (
            "config_sentence_transformers.json",
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"},
        ),
    ],
)
def test_the_files_say_it(load: Any, make: Any, tiny: Path, copy_of: Any, place: str, said: dict[str, Any]) -> None:
    folder = copy_of(tiny)
    file = folder / place
    if not file.exists():
        file.write_text("{}")
    make.edit_json(file, **said)
    ours = scores(ranker(load, folder), QUERY, DOCUMENTS)
    identity = "Identity" in json.dumps(said)
    expected = scores(ranker(load, tiny, activation="identity" if identity else "sigmoid"), QUERY, DOCUMENTS)
    np.testing.assert_array_equal(ours, expected)
    if place == "config.json":
        np.testing.assert_allclose(ours, theirs(folder, QUERY, DOCUMENTS), atol=TOLERANCE)


def test_what_sentence_transformers_saves(load: Any, tiny: Path, tmp_path: Path) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    saved = tmp_path / "saved"
    CrossEncoder(str(tiny), device="cpu", activation_fn=torch.nn.Identity()).save_pretrained(str(saved))
    ours = scores(ranker(load, saved), QUERY, DOCUMENTS)
    np.testing.assert_allclose(ours, theirs(saved, QUERY, DOCUMENTS), atol=TOLERANCE)
    assert np.abs(ours - scores(ranker(load, tiny), QUERY, DOCUMENTS)).max() > 0.1


def test_an_activation_that_is_not_known_is_refused(load: Any, make: Any, tiny: Path, copy_of: Any) -> None:
    folder = copy_of(tiny)
    make.edit_json(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    assert "Tanh" in refused(load, folder)
    make.edit_json(folder / "config.json", sentence_transformers={"activation_fn": "somebody.Else"})
    assert "somebody.Else" in refused(load, folder, UnsafeSource)
    assert np.isfinite(scores(ranker(load, folder, activation="sigmoid"), QUERY, DOCUMENTS)).all()


# --- several labels --------------------------------------------------------------------------------------


def test_several_labels(load: Any, make: Any, tmp_path: Path) -> None:
    names = {0: "contradiction", 1: "entailment", 2: "neutral"}
    folder = save_ranker(make, tmp_path / "nli", num_labels=3, id2label=names)
    assert "contradiction, entailment, neutral" in refused(load, folder)
    assert "'likely'" in refused(load, folder, label="likely")
    expected = theirs(folder, QUERY, DOCUMENTS)
    ours = scores(ranker(load, folder, label="entailment"), QUERY, DOCUMENTS)
    np.testing.assert_allclose(ours, expected[:, 1], atol=TOLERANCE)
    share = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    ours = scores(ranker(load, folder, label="neutral", activation="softmax"), QUERY, DOCUMENTS)
    np.testing.assert_allclose(ours, share[:, 2], atol=TOLERANCE)


# --- prompts and templates --------------------------------------------------------------------------------


def test_prompts(load: Any, make: Any, tiny: Path, copy_of: Any) -> None:
    expected = theirs(tiny, QUERY, DOCUMENTS, prompt="query : ")
    np.testing.assert_allclose(
        scores(ranker(load, tiny, query_prompt="query : "), QUERY, DOCUMENTS), expected, atol=TOLERANCE
    )
    engine = ranker(load, tiny, prompts={"search": "query : "})
    for instruction in ("search", "query : "):
        np.testing.assert_allclose(scores(engine, QUERY, DOCUMENTS, instruction=instruction), expected, atol=TOLERANCE)
    folder = copy_of(tiny)
    about = {"prompts": {"search": "query : ", "query": "title : "}, "default_prompt_name": "search"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about | {"model_type": "CrossEncoder"}))
    np.testing.assert_allclose(scores(ranker(load, folder), QUERY, DOCUMENTS), expected, atol=TOLERANCE)


def test_templates(load: Any, make: Any, tmp_path: Path) -> None:
    """As converted rerankers are used: both texts are wrapped, and what ends the document is never cut off."""
    folder = save_ranker(make, tmp_path / "qwen3", "qwen3")
    engine = ranker(
        load, folder, instruction="the house", query_template="title : {instruction} query : {query} .",
        document_template="passage : {document} . title :",
    )  # fmt: skip

    def wrapped(instruction: str) -> NDArray[Any]:
        documents = [f"passage : {document} . title :" for document in DOCUMENTS]
        return theirs(folder, f"title : {instruction} query : {QUERY} .", documents)

    np.testing.assert_allclose(scores(engine, QUERY, DOCUMENTS), wrapped("the house"), atol=TOLERANCE)
    asked = scores(engine, QUERY, DOCUMENTS, instruction="{query} river")
    np.testing.assert_allclose(asked, wrapped("{query} river"), atol=TOLERANCE)
    (prepared,) = engine.prepare(request(QUERY, ["dog " * 50], truncate=True))
    assert prepared.tokens == 32
    (whole,) = engine.prepare(request(QUERY, ["dog"]))
    assert prepared.payload.tokens.ids[-3:].tolist() == whole.payload.tokens.ids[-3:].tolist()


# --- batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "batch_tokens"), [(1, 8192), (3, 8192), (2, 64)])
def test_batches_do_not_change_the_scores(load: Any, make: Any, tiny: Path, threads: int, batch_tokens: int) -> None:
    documents = some_documents(make.words, 100)
    model = attrs.evolve(make.spec(tiny, "torch-cross-encoder", threads=threads), batch_tokens=batch_tokens)
    alone = np.concatenate([scores(ranker(load, tiny, threads=1), QUERY, [document]) for document in documents])
    np.testing.assert_allclose(scores(load(model), QUERY, documents), alone, atol=TOLERANCE)


def test_requests_with_different_queries_and_activations_share_a_batch(load: Any, tiny: Path) -> None:
    engine = ranker(load, tiny)
    asked = [(QUERY, "sigmoid"), ("house", "identity"), ("a blue river", "sigmoid")]
    batch = [
        prepared for query, activation in asked
        for prepared in engine.prepare(request(query, DOCUMENTS, options={"activation": activation}))
    ]  # fmt: skip
    mixed = np.array([output.score for output in engine.run(batch)]).reshape(3, -1)
    for row, (query, activation) in zip(mixed, asked, strict=True):
        alone = scores(engine, query, DOCUMENTS, options={"activation": activation})
        np.testing.assert_allclose(row, alone, atol=TOLERANCE)


def test_token_ids(load: Any, make: Any, tiny: Path) -> None:
    engine = ranker(load, tiny)
    ids = {word: 4 + index for index, word in enumerate(make.words)}
    documents = [Item(token_ids=tuple(ids[word] for word in text.split())) for text in DOCUMENTS]
    query = Item(token_ids=tuple(ids[word] for word in QUERY.split()))
    np.testing.assert_array_equal(scores(engine, query, documents), scores(engine, QUERY, DOCUMENTS))
    with pytest.raises(InvalidInput, match="999") as caught:
        engine.prepare(request(QUERY, ["fox", Item(token_ids=(999,))]))
    assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="999") as caught:
        engine.prepare(request(Item(token_ids=(999,)), DOCUMENTS))
    assert (caught.value.index, caught.value.param) == (None, "query")


# --- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    model: ModelSpec = make.spec(save_ranker(make, tmp_path / kind, kind), "torch-cross-encoder", dtype=dtype)
    check_reserved(load, model)


def test_describes_itself_without_loading(make: Any, tiny: Path) -> None:
    described = CrossEncoderAdapter().describe(make.spec(tiny, "torch-cross-encoder"))
    assert described == Capabilities(tasks=frozenset({Task.SCORE}), outputs=(), max_sequence_length=32)


# --- what is refused -----------------------------------------------------------------------------------


def refused(load: Any, folder: Path, error: type[Exception] = ModelSourceInvalid, **options: Any) -> str:
    with pytest.raises(error) as caught:
        ranker(load, folder, **options)
    return str(caught.value)


def test_bad_requests(load: Any, tiny: Path) -> None:
    engine = ranker(load, tiny)
    with pytest.raises(Unsupported, match="score only"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], RequestParams()))
    with pytest.raises(InvalidInput, match="no query") as caught:
        engine.prepare(BatchRequest(Task.SCORE, [Item(text="fox")], RequestParams()))
    assert caught.value.param == "query"
    with pytest.raises(InvalidInput, match="text only") as caught:
        engine.prepare(request(Item(images=(b"x",)), DOCUMENTS))
    assert caught.value.param == "query"
    with pytest.raises(InvalidInput, match="text only") as caught:
        engine.prepare(request(QUERY, ["fox", Item(images=(b"x",))]))
    assert caught.value.index == 1
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        engine.prepare(request("\ud800", DOCUMENTS))
    assert (caught.value.index, caught.value.param) == (None, "query")
    with pytest.raises(InvalidInput, match="Unicode") as caught:
        engine.prepare(request(QUERY, ["fox", "\ud800"]))
    assert caught.value.index == 1
    with pytest.raises(Unsupported, match="activation") as unknown:
        engine.prepare(request(QUERY, DOCUMENTS, options={"smell": 1}))
    assert unknown.value.supported == ("activation",)
    with pytest.raises(InvalidInput, match="sigmoid"):
        engine.prepare(request(QUERY, DOCUMENTS, options={"activation": "tanh"}))
    with pytest.raises(Unsupported, match="no LoRA"):
        engine.prepare(request(QUERY, DOCUMENTS, lora="x"))


@pytest.mark.parametrize(
    "wrong", [{"activation": "tanh"}, {"query_template": "no place"}, {"document_template": "{document} {document}"}]
)
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        CrossEncoderOptions(**wrong)


def test_a_model_without_a_head_is_refused(load: Any, make: Any, tiny_bert: Path, copy_of: Any) -> None:
    assert "BertModel" in refused(load, tiny_bert)
    folder = copy_of(tiny_bert)
    make.edit_json(folder / "config.json", architectures=None, id2label={"0": "LABEL_0"})
    assert "lacks" in refused(load, folder)  # transformers would make one up


def test_a_reranker_that_writes_its_answer_is_refused_with_a_hint(load: Any, make: Any, tmp_path: Path) -> None:
    folder = make.transformer(tmp_path / "qwen3", "qwen3", head="AutoModelForCausalLM")
    said = refused(load, folder)
    assert "Qwen3ForCausalLM" in said
    assert "converted to ForSequenceClassification" in said


OWN_CODE = """
from transformers import BertConfig, BertForSequenceClassification
class OwnConfig(BertConfig):
    model_type = "own-ranker"
class OwnRanker(BertForSequenceClassification):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own(load: Any, make: Any, tiny: Path, copy_of: Any) -> None:
    folder = copy_of(tiny)
    (folder / "own_ranker.py").write_text(OWN_CODE)
    auto = {"AutoConfig": "own_ranker.OwnConfig", "AutoModelForSequenceClassification": "own_ranker.OwnRanker"}
    make.edit_json(folder / "config.json", model_type="own-ranker", auto_map=auto)
    assert "trust_remote_code" in refused(load, folder, UnsafeSource)
    ours = scores(ranker(load, folder, trust_remote_code=True), QUERY, DOCUMENTS)
    np.testing.assert_array_equal(ours, scores(ranker(load, tiny), QUERY, DOCUMENTS))


def test_modules_that_are_not_known_are_refused(load: Any, tiny: Path, copy_of: Any) -> None:
    folder = copy_of(tiny)

    def modules(*names: str) -> None:
        room = "sentence_transformers.base.modules"
        listed = [
            {"idx": i, "name": str(i), "path": str(i) if i else "", "type": f"{room}.{name}"}
            for i, name in enumerate(names)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))

    modules("Transformer", "LogitScore")
    assert "converted" in refused(load, folder)
    modules("Transformer", "Pooling")
    assert "Pooling" in refused(load, folder)
    modules("Transformer")
    assert "hidden states" in refused(load, folder)


def test_a_query_that_is_too_long_is_to_blame_itself(load: Any, tiny: Path) -> None:
    """G9: not the first document; a document that is too long by itself still is, and cutting works for both."""
    from sie_core import InputTooLong

    engine = ranker(load, tiny)
    long = "dog " * 60
    with pytest.raises(InputTooLong) as caught:
        scores(engine, long, ["dog", "fox"])
    assert (caught.value.index, caught.value.param, caught.value.tokens) == (None, "query", 63)
    with pytest.raises(InputTooLong) as caught:
        scores(engine, "dog", ["fox", long])
    assert caught.value.index == 1
    assert len(scores(engine, long, ["dog", long], truncate=True)) == 2
