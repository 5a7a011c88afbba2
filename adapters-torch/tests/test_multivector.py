"""torch-multivector: the vectors are pylate's, whose formula is written out here, and sentence-transformers'."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_adapters_torch import plugin
from sie_adapters_torch.multivector import MultivectorAdapter, MultivectorOptions
from sie_core import (
    BatchRequest,
    DeviceView,
    InputTooLong,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    UnsafeSource,
    Unsupported,
)

TOLERANCE = 1e-5
MORE = ("[MASK]", "[Q] ", "[D] ", "[unused0]", "[unused1]", ",", "!", "-")
TEXTS = ("a red fox , runs !", "dog", "the quick fox jumps over the lazy dog . a dog : sleeps", "the river", "! , .")
Matrices = list[NDArray[np.float32]]


def save_pylate(folder: Path, make: Any, kind: str = "bert", *, dense: Any = ((32, 16, False),), **about: Any) -> Path:
    """A model as pylate saves it."""
    import torch
    from safetensors.torch import save_file

    make.transformer(folder, kind, more=MORE, limit=None)
    modules = [("sentence_transformers.models.Transformer", "")]
    for number, (inputs, outputs, residual) in enumerate(dense, start=1):
        place = folder / f"{number}_Dense"
        place.mkdir()
        torch.manual_seed(number)
        weights = {"linear.weight": torch.randn(outputs, inputs) * 0.3}
        if residual and inputs != outputs:
            weights["residual.weight"] = torch.randn(outputs, inputs) * 0.3
        save_file(weights, place / "model.safetensors")
        config = {"in_features": inputs, "out_features": outputs, "bias": False, "use_residual": residual}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (place / "config.json").write_text(json.dumps(config))
        modules.append(("pylate.models.Dense.Dense", place.name))
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    # pylate leaves here whatever it tokenised last.
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 11}))
    said = {
        "model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 12, "document_length": 24,
        "attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation), "do_query_expansion": True,
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said | about))
    return folder


def save_colbert(folder: Path, make: Any, **metadata: Any) -> Path:
    """A model as ColBERT's own code saves it: the projection among the encoder's weights."""
    import torch
    from safetensors.torch import load_file, save_file

    make.transformer(folder, more=MORE)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    torch.manual_seed(3)
    save_file(renamed | {"linear.weight": torch.randn(16, 32) * 0.3}, folder / "model.safetensors")
    make.edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    said = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "query_maxlen": 10, "doc_maxlen": 20, "dim": 16}
    (folder / "artifact.metadata").write_text(json.dumps(said | metadata))
    return folder


def formula(
    folder: Path,
    texts: Any,
    *,
    is_query: bool,
    prefix: str,
    length: int,
    expand: bool = True,
    attend: bool = False,
    skip: str = string.punctuation,
) -> Matrices:
    """pylate's way from texts to vectors, step by step, with transformers' model and tokenizer."""
    import torch
    import transformers
    from safetensors.torch import load_file

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    model: Any = transformers.AutoModel.from_pretrained(str(folder))
    tokenizer.pad_token_id = tokenizer.mask_token_id
    room = length - 1 if prefix else length
    padding = {"padding": "max_length"} if is_query and expand else {"padding": True}
    features = tokenizer(list(texts), truncation=True, max_length=room, return_tensors="pt", **padding)
    ids, mask = features["input_ids"], features["attention_mask"]
    if prefix:
        marker = torch.full((len(ids), 1), tokenizer.convert_tokens_to_ids(prefix))
        ids = torch.cat([ids[:, :1], marker, ids[:, 1:]], dim=1)
        mask = torch.cat([mask[:, :1], torch.ones_like(marker), mask[:, 1:]], dim=1)
    if is_query and expand and attend:
        mask = torch.ones_like(mask)
    with torch.no_grad():
        vectors = model(input_ids=ids, attention_mask=mask)[0]
        for place in sorted(folder.glob("*_Dense")):
            weights = load_file(place / "model.safetensors")
            before, vectors = vectors, vectors @ weights["linear.weight"].T
            if json.loads((place / "config.json").read_text())["use_residual"]:
                vectors = vectors + (before @ weights["residual.weight"].T if "residual.weight" in weights else before)
        if not list(folder.glob("*_Dense")):
            vectors = vectors @ load_file(folder / "model.safetensors")["linear.weight"].T
    vocabulary = tokenizer.get_vocab()
    dropped = torch.tensor([vocabulary[word] for word in skip if word in vocabulary])
    kept = mask.bool() & ~torch.isin(ids, dropped)
    if is_query:
        kept = torch.ones_like(kept) if expand else mask.bool()
    found = []
    for rows, those in zip(vectors, kept, strict=True):
        found.append(torch.nn.functional.normalize(rows[those], dim=1).numpy())
    return found


def matrices(engine: Any, texts: Any, make: Any, **params: Any) -> Matrices:
    outputs = make.encode(engine, texts, **params)
    for output in outputs:
        assert output.dense is None
        assert output.sparse is None
        assert output.multivector.dtype == np.float32
        assert output.multivector.base is None  # not a part of the batch's
    return [output.multivector for output in outputs]


def assert_same(ours: Matrices, expected: Matrices, tolerance: float = TOLERANCE) -> None:
    assert [len(each) for each in ours] == [len(each) for each in expected]
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance)


@pytest.fixture(scope="module")
def colbert(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of pylate's. Read only."""
    return save_pylate(tmp_path_factory.mktemp("models") / "colbert", make)


# --- the reference -------------------------------------------------------------------------------------

QUERY: dict[str, Any] = {"is_query": True, "prefix": "[Q] ", "length": 12}
DOCUMENT: dict[str, Any] = {"is_query": False, "prefix": "[D] ", "length": 24}


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert", "electra", "qwen3"])
@pytest.mark.parametrize("attend", [False, True])
def test_queries_and_documents(load: Any, make: Any, tmp_path: Path, kind: str, attend: bool) -> None:
    folder = save_pylate(tmp_path / kind, make, kind, attend_to_expansion_tokens=attend)
    engine = load(folder, adapter="torch-multivector", truncate=True)
    assert engine.capabilities.dims == {"multivector": 16}
    assert engine.capabilities.compares == "multivector"
    queries = matrices(engine, TEXTS, make, is_query=True)
    assert {len(each) for each in queries} == {12}
    assert_same(queries, formula(folder, TEXTS, attend=attend, **QUERY))
    documents = matrices(engine, TEXTS, make)
    assert_same(documents, formula(folder, TEXTS, **DOCUMENT))
    # Nothing is left of the last one but its marker, and the special tokens where the model has them.
    assert len(documents[-1]) < len(documents[0])
    assert np.abs(np.linalg.norm(np.concatenate([*queries, *documents]), axis=1) - 1).max() < TOLERANCE


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_expansion_tokens_are_not_attended_to_with_or_without_padding(
    load: Any, make: Any, colbert: Path, attn: str
) -> None:
    """Packed and padded, and in a batch with others that are attended to in full."""
    texts = [*TEXTS, *(" ".join(random.Random(n).choices(make.words, k=1 + n % 9)) for n in range(40))]
    engine = load(colbert, adapter="torch-multivector", attn=attn, threads=2, truncate=True)
    assert_same(matrices(engine, texts, make, is_query=True), formula(colbert, texts, **QUERY))
    requests = [
        BatchRequest(Task.ENCODE, [Item(text=text)], RequestParams(output_types=("multivector",), is_query=bool(n % 2)))
        for n, text in enumerate(texts)
    ]
    mixed = engine.run([one for request in requests for one in engine.prepare(request)])
    queries, documents = formula(colbert, texts, **QUERY), formula(colbert, texts, **DOCUMENT)
    expected = [queries[n] if n % 2 else documents[n] for n in range(len(texts))]
    assert_same([output.multivector for output in mixed], expected)


def test_without_expansion(load: Any, make: Any, tmp_path: Path, colbert: Path) -> None:
    folder = save_pylate(tmp_path / "plain", make, do_query_expansion=False, query_prefix="", skiplist_words=["fox"])
    engine = load(folder, adapter="torch-multivector", truncate=True)
    plain = {"is_query": True, "prefix": "", "length": 12, "expand": False}
    assert_same(matrices(engine, TEXTS, make, is_query=True), formula(folder, TEXTS, **plain))
    found = matrices(engine, ["a red fox !"], make)
    assert len(found[0]) == 6  # [CLS] [D] a red ! [SEP]
    switched = load(colbert, adapter="torch-multivector", query_expansion=False, truncate=True)
    assert_same(matrices(switched, TEXTS, make, is_query=True), formula(colbert, TEXTS, expand=False, **QUERY))


def test_projections_in_several_steps(load: Any, make: Any, tmp_path: Path) -> None:
    folder = save_pylate(tmp_path / "steps", make, dense=((32, 48, True), (48, 48, True), (48, 8, False)))
    model = make.spec(folder, "torch-multivector", truncate=True)
    engine = load(model)
    assert engine.capabilities.dims == {"multivector": 8}
    assert_same(matrices(engine, TEXTS, make), formula(folder, TEXTS, **DOCUMENT))
    assert_fits(engine, model)


def test_layout_of_colbert(load: Any, make: Any, tmp_path: Path) -> None:
    folder = save_colbert(tmp_path / "colbert", make)
    model = make.spec(folder, "torch-multivector", truncate=True)
    engine = load(model)
    assert engine.capabilities.dims == {"multivector": 16}
    assert engine.capabilities.max_sequence_length == 20
    queries = matrices(engine, TEXTS, make, is_query=True)
    assert_same(queries, formula(folder, TEXTS, is_query=True, prefix="[unused0]", length=10))
    documents = matrices(engine, TEXTS, make)
    assert_same(documents, formula(folder, TEXTS, is_query=False, prefix="[unused1]", length=20))
    assert_fits(engine, model)
    make.edit_json(folder / "artifact.metadata", mask_punctuation=False, attend_to_mask_tokens=True)
    changed = load(folder, adapter="torch-multivector", truncate=True)
    other = formula(folder, TEXTS, is_query=True, prefix="[unused0]", length=10, attend=True)
    assert_same(matrices(changed, TEXTS, make, is_query=True), other)
    assert np.abs(other[1] - queries[1]).max() > 1e-3
    assert_same(
        matrices(changed, TEXTS, make), formula(folder, TEXTS, is_query=False, prefix="[unused1]", length=20, skip="")
    )


def test_what_sentence_transformers_makes_of_the_same_files(
    load: Any, make: Any, colbert: Path, tmp_path: Path
) -> None:
    """Its own layout too: it saves what it has read in another form."""
    library = pytest.importorskip("sentence_transformers")
    if not hasattr(library, "MultiVectorEncoder"):
        pytest.skip("this release of sentence-transformers has no multi-vector models")
    texts = [text for text in TEXTS if len(text.split()) < 9]
    theirs = library.MultiVectorEncoder(str(colbert), device="cpu")
    queries = [np.asarray(each) for each in theirs.encode_query(texts)]
    documents = [np.asarray(each) for each in theirs.encode_document(texts)]
    theirs.save_pretrained(str(tmp_path / "saved"))
    for folder in (colbert, tmp_path / "saved"):
        engine = load(folder, adapter="torch-multivector", truncate=True)
        assert_same(matrices(engine, texts, make, is_query=True), queries)
        assert_same(matrices(engine, texts, make), documents)


# --- texts, options, limits ----------------------------------------------------------------------------


def test_options_win_over_files(load: Any, make: Any, colbert: Path) -> None:
    engine = load(
        colbert, adapter="torch-multivector", query_prefix="[D] ", document_prefix="", query_length=20,
        document_length=30, attend_to_expansion_tokens=True, skip_punctuation=False, truncate=True,
    )  # fmt: skip
    query = {"is_query": True, "prefix": "[D] ", "length": 20, "attend": True}
    assert_same(matrices(engine, TEXTS, make, is_query=True), formula(colbert, TEXTS, **query))
    plain = {"is_query": False, "prefix": "", "length": 30, "skip": ""}
    assert_same(matrices(engine, TEXTS, make), formula(colbert, TEXTS, **plain))
    assert engine.capabilities.max_sequence_length == 30


def test_prompts_come_after_the_marker(load: Any, make: Any, colbert: Path) -> None:
    engine = load(colbert, adapter="torch-multivector", query_prompt="the query : ", truncate=True)
    with_prompt = [f"the query : {text}" for text in TEXTS]
    assert_same(matrices(engine, TEXTS, make, is_query=True), formula(colbert, with_prompt, **QUERY))


def test_token_lists_are_marked_once(load: Any, make: Any, colbert: Path) -> None:
    engine = load(colbert, adapter="torch-multivector")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *make.words, ":", ".", *MORE]
    bare = [words.index(word) for word in ("red", "fox")]
    whole = [words.index("[CLS]"), words.index("[D] "), *bare, words.index("[SEP]")]
    assert_same(matrices(engine, [bare, whole], make), matrices(engine, ["red fox", "red fox"], make))


def test_tokens_are_those_of_the_text(load: Any, make: Any, colbert: Path) -> None:
    engine = load(colbert, adapter="torch-multivector")
    assert [output.tokens for output in make.encode(engine, ["a red fox", "dog"], is_query=True)] == [6, 4]
    wanted = RequestParams(output_types=("multivector",), is_query=True)
    (prepared,) = engine.prepare(BatchRequest(Task.ENCODE, [Item(text="dog")], wanted))
    assert prepared.tokens == 12  # what it costs to run


def test_long_texts_are_refused_unless_they_may_be_cut(load: Any, make: Any, colbert: Path) -> None:
    engine = load(colbert, adapter="torch-multivector")
    for is_query, limit in ((True, 12), (False, 24)):
        wanted = RequestParams(output_types=("multivector",), is_query=is_query)
        items = [Item(text="fox " * (limit - 3)), Item(text="fox " * (limit - 2))]
        with pytest.raises(InputTooLong) as caught:
            engine.prepare(BatchRequest(Task.ENCODE, items, wanted))
        assert (caught.value.index, caught.value.limit, caught.value.tokens) == (1, limit, limit + 1)
        assert engine.prepare(BatchRequest(Task.ENCODE, items[:1], wanted))[0].tokens == limit


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_lora(load: Any, make: Any, colbert: Path, save_lora: Any) -> None:
    engine = load(colbert, adapter="torch-multivector")
    before = matrices(engine, TEXTS[:2], make)
    engine.lora_load("mine", save_lora(colbert), make.context())
    changed = matrices(engine, TEXTS[:2], make, lora="mine")
    assert np.abs(changed[0] - before[0]).max() > 1e-3
    for mine, other in zip(matrices(engine, TEXTS[:2], make), before, strict=True):
        np.testing.assert_array_equal(mine, other)


# --- memory ----------------------------------------------------------------------------------------------


def assert_fits(engine: Any, model: ModelSpec) -> None:
    answer = plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    held = engine.memory().devices["cpu"]
    assert held <= answer.ranks[0].min_bytes < held + 128 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, colbert: Path, dtype: str) -> None:
    model = make.spec(colbert, "torch-multivector", dtype=dtype, truncate=True)
    engine = load(model)
    assert_fits(engine, model)
    assert_same(matrices(engine, TEXTS, make), formula(colbert, TEXTS, **DOCUMENT), 1e-5 if dtype == "float32" else 0.1)


# --- what is refused -----------------------------------------------------------------------------------


def refused(load: Any, folder: Path, error: type[Exception] = ModelSourceInvalid, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(folder, adapter="torch-multivector", **options)
    return str(caught.value)


def test_other_outputs_are_refused(load: Any, colbert: Path) -> None:
    engine = load(colbert, adapter="torch-multivector")
    with pytest.raises(Unsupported, match="multivector vectors, not dense"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")]))
    with pytest.raises(Unsupported, match="one size"):
        wanted = RequestParams(output_types=("multivector",), dimensions=8)
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], wanted))
    own = RequestParams(output_types=("multivector",), dimensions=engine.capabilities.dims["multivector"])
    assert engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], own))


def test_a_model_without_a_projection_is_refused(load: Any, make: Any, tiny_bert: Path, tmp_path: Path) -> None:
    """pylate would make one up."""
    assert "no projection" in refused(load, tiny_bert)
    assert "no Dense" in refused(load, save_pylate(tmp_path / "none", make, dense=()))


def test_a_marker_that_is_no_token_is_refused(load: Any, make: Any, tmp_path: Path) -> None:
    """pylate would add one with random numbers behind it."""
    folder = save_pylate(tmp_path / "marker", make, query_prefix="[Nobody] ")
    assert "[Nobody]" in refused(load, folder)
    load(folder, adapter="torch-multivector", query_prefix="")


def test_a_projection_of_another_size_is_refused(load: Any, make: Any, tmp_path: Path) -> None:
    folder = save_pylate(tmp_path / "size", make, dense=((24, 16, False),))
    assert "takes 24 numbers and gets 32" in refused(load, folder)
    make.edit_json(folder / "1_Dense" / "config.json", in_features=32)
    assert "another shape" in refused(load, folder)
    (folder / "1_Dense" / "model.safetensors").unlink()
    assert "missing" in refused(load, folder)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("sentence_transformers.models.Pooling", ModelSourceInvalid, "Pooling"),
        ("sentence_transformers.multi_vector_encoder.modules.HierarchicalTokenPooling", ModelSourceInvalid, "Hierarch"),
        ("somebody.Else", UnsafeSource, "somebody.Else"),
    ],
)
def test_other_modules_are_refused(
    load: Any, colbert: Path, copy_of: Any, kind: str, error: type[Exception], said: str
) -> None:
    folder = copy_of(colbert)
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_More", "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    assert said in refused(load, folder, error)


def test_lengths_beyond_the_model_are_refused(load: Any, colbert: Path) -> None:
    assert "40 positions" in refused(load, colbert, document_length=41)
    assert load(colbert, adapter="torch-multivector", document_length=40).capabilities.max_sequence_length == 40


@pytest.mark.parametrize("wrong", [{"query_length": 0}, {"document_length": -1}, {"max_loras": -1}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        MultivectorOptions(**wrong)


def test_describes_itself_without_loading(make: Any, colbert: Path) -> None:
    described = MultivectorAdapter().describe(make.spec(colbert, "torch-multivector"))
    assert described is not None
    assert described.outputs == ("multivector",)
    assert Task.SCORE in described.tasks
