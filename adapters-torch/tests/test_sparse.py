"""torch-sparse: the weights are those of sentence-transformers' SparseEncoder, with the real model and with others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray
from sie_adapters_torch import plugin
from sie_adapters_torch.sparse import LOGIT_BYTES, SparseAdapter, SparseOptions
from sie_core import (
    BatchRequest,
    DeviceView,
    InvalidInput,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Source,
    Task,
    UnsafeSource,
    Unsupported,
    locate,
)

TOLERANCE = 1e-5
COGNITION = ModelSpec("splade", "torch-sparse", Source("package", "cognition/model"), options=SparseOptions())
TEXTS = ("a red fox", "dog", "the quick fox jumps over the lazy dog", "the river runs under a blue house", "fox")


def some_texts(words: list[str], count: int = 24) -> list[str]:
    rng = random.Random(5)
    return [" ".join(rng.choices(words, k=rng.randint(1, 24))) for _ in range(count)]


def weights(engine: Any, texts: Any, encode: Callable[..., Any], **params: Any) -> NDArray[np.float32]:
    """The vectors in full, (texts, vocabulary), after a look at their form."""
    rows = np.zeros((len(texts), engine.capabilities.dims["sparse"]), np.float32)
    for row, output in zip(rows, encode(engine, texts, **params), strict=True):
        assert output.dense is None
        assert output.multivector is None
        assert output.sparse.indices.dtype == np.int32
        assert output.sparse.values.dtype == np.float32
        assert (np.diff(output.sparse.indices) > 0).all()
        assert (output.sparse.values > 0).all()
        row[output.sparse.indices] = output.sparse.values
    return rows


def theirs(folder: Path, texts: Any, **settings: Any) -> NDArray[np.float32]:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu", **settings)
    found: NDArray[np.float32] = model.encode(list(texts), convert_to_sparse_tensor=False).numpy()
    return found


def save_splade(folder: Path, *, encoder: str = "MLMTransformer", **pooling: str) -> Path:
    """The files of sentence-transformers around a masked language model, as older and newer releases write them."""
    room = "sentence_transformers.sparse_encoder.models"
    kinds = [(f"{room}.{encoder}" if encoder == "MLMTransformer" else f"sentence_transformers.models.{encoder}", "")]
    kinds.append((f"{room}.SpladePooling", "1_SpladePooling"))
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max"} | pooling))
    return folder


@pytest.fixture(scope="module")
def tiny(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model alone. Read only."""
    return make.transformer(tmp_path_factory.mktemp("models") / "bert", head="AutoModelForMaskedLM")  # type: ignore[no-any-return]


# --- the reference -------------------------------------------------------------------------------------


def test_the_real_model(load: Any, make: Any) -> None:
    texts = [
        "A man is eating food.", "é ü 漢字 🙂", "word " * 200, "One.", "What is the capital of France?",
        *(" ".join(["The quick brown fox jumps over the lazy dog."] * n) for n in range(1, 12)),
    ]  # fmt: skip
    engine = load(COGNITION)
    assert engine.capabilities.dims == {"sparse": 30_522}
    assert engine.capabilities.compares == "sparse"
    ours, expected = weights(engine, texts, make.encode), theirs(locate(COGNITION.source), texts)  # type: ignore[arg-type]
    assert (expected > 0).sum() > 100
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)


def test_it_is_what_transformers_computes(load: Any, make: Any, tiny: Path) -> None:
    """The formula of SPLADE, with nothing but the model: log(1 + relu(logits)), and the largest of all tokens."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(str(tiny))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(tiny))
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
        expected = torch.stack([torch.log1p(torch.relu(row)).amax(0) for row in rows]).numpy()
    np.testing.assert_allclose(weights(load(tiny, adapter="torch-sparse"), TEXTS, make.encode), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra"])
def test_architectures(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    folder = make.transformer(tmp_path / kind, kind, head="AutoModelForMaskedLM")
    texts = some_texts(make.words)
    engine, expected = load(folder, adapter="torch-sparse"), theirs(folder, texts)
    assert np.abs(expected - expected[0]).max() > 1e-2
    np.testing.assert_allclose(weights(engine, texts, make.encode), expected, atol=TOLERANCE)


def test_an_output_matrix_of_its_own(load: Any, make: Any, tmp_path: Path) -> None:
    folder = make.transformer(tmp_path / "bert", head="AutoModelForMaskedLM", tie_word_embeddings=False)
    model = make.spec(folder, "torch-sparse")
    engine = load(model)
    np.testing.assert_allclose(weights(engine, TEXTS, make.encode), theirs(folder, TEXTS), atol=TOLERANCE)
    assert_fits(engine, model)


@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_layouts_of_sentence_transformers(
    load: Any, make: Any, tmp_path: Path, tiny: Path, copy_of: Any, pooling: str, activation: str
) -> None:
    folder = save_splade(copy_of(tiny), pooling_strategy=pooling, activation_function=activation)
    texts = some_texts(make.words)
    ours = weights(load(folder, adapter="torch-sparse"), texts, make.encode)
    np.testing.assert_allclose(ours, theirs(folder, texts), atol=2e-5)
    (folder / "modules.json").unlink()  # without the files, options say the same
    same = load(folder, adapter="torch-sparse", pooling=pooling, activation=activation)
    np.testing.assert_array_equal(weights(same, texts, make.encode), ours)


def test_what_sentence_transformers_saves(load: Any, make: Any, tmp_path: Path, tiny: Path) -> None:
    from sentence_transformers import SparseEncoder

    SparseEncoder(str(tiny), device="cpu").save_pretrained(str(tmp_path / "saved"))
    ours = weights(load(tmp_path / "saved", adapter="torch-sparse"), TEXTS, make.encode)
    np.testing.assert_allclose(ours, theirs(tmp_path / "saved", TEXTS), atol=TOLERANCE)


def test_prompts(load: Any, make: Any, tiny: Path) -> None:
    engine = load(tiny, adapter="torch-sparse", query_prompt="query : ")
    plain = weights(engine, TEXTS, make.encode)
    asked = weights(engine, TEXTS, make.encode, is_query=True)
    np.testing.assert_array_equal(asked, weights(engine, [f"query : {text}" for text in TEXTS], make.encode))
    assert np.abs(asked - plain).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_close_and_comes_out_as_float32(load: Any, make: Any, tiny: Path, dtype: str) -> None:
    full = weights(load(tiny, adapter="torch-sparse"), TEXTS, make.encode)
    half = weights(load(tiny, adapter="torch-sparse", dtype=dtype), TEXTS, make.encode)
    assert 0 < np.abs(full - half).max() < 0.1


# --- fewer weights -------------------------------------------------------------------------------------


def test_top_k_keeps_the_largest(load: Any, make: Any, tiny: Path) -> None:
    full = weights(load(tiny, adapter="torch-sparse"), TEXTS, make.encode)
    cut = weights(load(tiny, adapter="torch-sparse", top_k=5), TEXTS, make.encode)
    np.testing.assert_allclose(cut, theirs(tiny, TEXTS, max_active_dims=5), atol=TOLERANCE)
    for row, whole in zip(cut, full, strict=True):
        assert (row > 0).sum() == 5
        assert row[row > 0].min() >= whole[row == 0].max()
        np.testing.assert_array_equal(row[row > 0], whole[row > 0])


def test_threshold_drops_the_small(load: Any, make: Any, tiny: Path) -> None:
    full = weights(load(tiny, adapter="torch-sparse"), TEXTS, make.encode)
    cut = weights(load(tiny, adapter="torch-sparse", threshold=0.5), TEXTS, make.encode)
    np.testing.assert_array_equal(cut, np.where(full > 0.5, full, 0))
    assert 0 < (cut > 0).sum() < (full > 0).sum()
    nothing = make.encode(load(tiny, adapter="torch-sparse", threshold=1e9), TEXTS)
    assert [len(output.sparse.indices) for output in nothing] == [0] * len(TEXTS)


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"threshold": -1.0}, {"threshold": float("nan")}, {"pooling": "mean"}])
def test_options_refuse_values_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SparseOptions(**wrong)


# --- batches and memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "batch_tokens"), [(1, 8192), (3, 8192), (2, 16)])
def test_batches_do_not_change_the_weights(load: Any, make: Any, tiny: Path, threads: int, batch_tokens: int) -> None:
    texts = some_texts(make.words, 70)
    engine = load(attrs.evolve(make.spec(tiny, "torch-sparse", threads=threads), batch_tokens=batch_tokens))
    one = load(tiny, adapter="torch-sparse", threads=1)
    alone = np.concatenate([weights(one, [text], make.encode) for text in texts])
    np.testing.assert_allclose(weights(engine, texts, make.encode), alone, atol=TOLERANCE)


def test_logits_are_held_a_few_at_a_time(load: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are the same however few fit, and nothing that a batch makes is larger than what was booked."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = {0}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            given = {each.untyped_storage().data_ptr() for each in args if hasattr(each, "untyped_storage")}
            if hasattr(result, "untyped_storage") and result.untyped_storage().data_ptr() not in given:
                made.add(result.untyped_storage().nbytes())
            return result

    model = attrs.evolve(COGNITION, options=SparseOptions(threads=1))
    texts, engine = some_texts(make.words, 40), load(model)
    expected = weights(engine, texts, make.encode)
    bound = 1024 * 1024
    monkeypatch.setattr("sie_adapters_torch._sparse_engine.LOGIT_BYTES", bound)
    engine.begin()
    with Sizes():
        got = weights(engine, texts, make.encode)
    np.testing.assert_allclose(got, expected, atol=TOLERANCE)
    assert bound / 2 < max(made) <= bound


def reserved(model: ModelSpec, kind: str = "cpu") -> Any:
    name = "cpu" if kind == "cpu" else f"{kind}:0"
    answer = plugin.admission_reserve(model, [DeviceView(name, kind, 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    return answer.ranks[0]


def assert_fits(engine: Any, model: ModelSpec) -> None:
    held = engine.memory().devices["cpu"]
    assert held <= reserved(model).min_bytes < held + 128 * 1024


def test_what_is_held_was_reserved(load: Any, make: Any, tiny: Path) -> None:
    for model in (COGNITION, make.spec(tiny, "torch-sparse"), make.spec(tiny, "torch-sparse", dtype="bfloat16")):
        assert_fits(load(model), model)


def test_the_logits_are_booked_however_large_the_batch() -> None:
    small, large = (reserved(attrs.evolve(COGNITION, batch_tokens=n)).headroom_bytes for n in (1000, 2000))
    assert 2 * LOGIT_BYTES < small < large < 2 * LOGIT_BYTES + 2000 * 30_522  # not a vocabulary for every token


# --- what is refused -----------------------------------------------------------------------------------


def test_other_outputs_and_tasks_are_refused(load: Any, tiny: Path) -> None:
    engine = load(tiny, adapter="torch-sparse")
    with pytest.raises(Unsupported, match="sparse vectors, not dense") as caught:
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], RequestParams(output_types=("dense",))))
    assert tuple(caught.value.supported) == ("sparse",)
    wanted = RequestParams(output_types=("sparse",))
    with pytest.raises(Unsupported, match="encode"):
        engine.prepare(BatchRequest(Task.EXTRACT, [Item(text="fox")], wanted))
    with pytest.raises(Unsupported, match="one size"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], attrs.evolve(wanted, dimensions=8)))
    with pytest.raises(InvalidInput, match="text only"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(images=(b"x",))], wanted))
    with pytest.raises(Unsupported, match="no LoRA"):
        engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], attrs.evolve(wanted, lora="x")))


def refused(load: Any, folder: Path, error: type[Exception] = ModelSourceInvalid, **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(folder, adapter="torch-sparse", **options)
    return str(caught.value)


def test_a_model_without_its_head_is_refused(load: Any, tiny_bert: Path) -> None:
    """transformers would make one up."""
    assert "lacks" in refused(load, tiny_bert)


@pytest.mark.parametrize("lost", ["cls.predictions.transform.dense.weight", "cls.predictions.bias"])
def test_a_head_that_lacks_a_weight_is_refused(load: Any, tiny: Path, copy_of: Any, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(tiny)
    tensors = load_file(folder / "model.safetensors")
    assert lost in tensors
    save_file({name: t for name, t in tensors.items() if name != lost}, folder / "model.safetensors")
    assert "lacks" in refused(load, folder)


def test_models_without_such_a_head_are_refused(load: Any, make: Any, tmp_path: Path) -> None:
    assert "masked lm" in refused(load, make.transformer(tmp_path / "qwen3", "qwen3"))


@pytest.mark.parametrize("name", ["SparseStaticEmbedding", "Router", "Pooling"])
def test_other_modules_are_refused_by_name(load: Any, tiny: Path, copy_of: Any, name: str) -> None:
    folder = save_splade(copy_of(tiny))
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = f"sentence_transformers.models.{name}"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert name in refused(load, folder)
    modules[0]["type"] = "somebody.Else"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "somebody.Else" in refused(load, folder, UnsafeSource)


def test_a_pooling_that_is_not_known_is_refused(load: Any, tiny: Path, copy_of: Any) -> None:
    assert "mean" in refused(load, save_splade(copy_of(tiny), pooling_strategy="mean"))


def test_a_transformer_that_gives_no_logits_is_refused(load: Any, tiny: Path, copy_of: Any) -> None:
    assert "fill-mask" in refused(load, save_splade(copy_of(tiny), encoder="Transformer"))


def test_describes_itself_without_loading(tiny: Path, make: Any) -> None:
    described = SparseAdapter().describe(make.spec(tiny, "torch-sparse"))
    assert described is not None
    assert described.outputs == ("sparse",)
    assert Task.SCORE in described.tasks
