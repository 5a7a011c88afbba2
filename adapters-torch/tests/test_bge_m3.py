"""torch-bge-m3: the three outputs are FlagEmbedding's, whose formulas are written out here."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bge_m3_folder import save_bge_m3
from sie_adapters_torch import plugin
from sie_adapters_torch.bge_m3 import BgeM3Adapter, BgeM3Options
from sie_core import (
    BatchRequest,
    DeviceView,
    EncodeOutput,
    Item,
    ModelSourceInvalid,
    ModelSpec,
    RequestParams,
    Task,
    UnsafeSource,
    Unsupported,
)

TOLERANCE = 1e-5
ALL = ("dense", "sparse", "multivector")
TEXTS = ("a red fox", "dog dog dog", "the quick fox jumps over the lazy dog . a dog : sleeps", "nonsense", "the river")


def formulas(folder: Path, text: str) -> tuple[Any, dict[int, float], Any]:
    """FlagEmbedding's BGEM3 model, one text at a time: its dense, lexical and colbert_vecs outputs."""
    import torch
    import transformers
    from safetensors.torch import load_file
    from torch.nn.functional import linear, normalize

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    model: Any = transformers.AutoModel.from_pretrained(str(folder))
    features = tokenizer(text, return_tensors="pt")
    sparse, colbert = (load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert"))
    with torch.no_grad():
        hidden = model(**features).last_hidden_state
        dense = normalize(hidden[:, 0], dim=-1)[0]
        weights = torch.relu(linear(hidden, sparse["weight"], sparse["bias"]))[0, :, 0]
        vectors = normalize(linear(hidden[:, 1:], colbert["weight"], colbert["bias"]), dim=-1)[0]
    unused = {getattr(tokenizer, f"{name}_token_id") for name in ("cls", "eos", "pad", "unk")}
    lexical: dict[int, float] = {}
    for word, weight in zip(features["input_ids"][0].tolist(), weights.tolist(), strict=True):
        if word not in unused and weight > lexical.get(word, 0):
            lexical[word] = weight
    return dense.numpy(), lexical, vectors.numpy()


def assert_as_the_formulas(folder: Path, texts: Any, outputs: list[EncodeOutput]) -> None:
    for text, output in zip(texts, outputs, strict=True):
        dense, lexical, vectors = formulas(folder, text)
        np.testing.assert_allclose(output.dense, dense, atol=TOLERANCE)
        assert output.sparse is not None
        assert output.sparse.indices.dtype == np.int32
        assert output.sparse.indices.tolist() == sorted(lexical)
        np.testing.assert_allclose(output.sparse.values, [lexical[i] for i in sorted(lexical)], atol=TOLERANCE)
        assert output.multivector is not None
        assert output.multivector.shape == vectors.shape
        np.testing.assert_allclose(output.multivector, vectors, atol=TOLERANCE)


@pytest.fixture(scope="module")
def tiny(make: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bge_m3(tmp_path_factory.mktemp("models") / "bge-m3", make)


# --- the reference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_all_three_in_one_pass(load: Any, make: Any, tiny: Path, attn: str) -> None:
    engine = load(tiny, adapter="torch-bge-m3", attn=attn, threads=1)
    assert engine.capabilities.outputs == ALL
    words = len(make.words) + 6
    assert engine.capabilities.dims == {"dense": 32, "sparse": words, "multivector": 32}
    texts = [*TEXTS, *(" ".join(random.Random(n).choices(make.words, k=1 + n % 20)) for n in range(20))]
    outputs = make.encode(engine, texts)
    assert_as_the_formulas(tiny, texts, outputs)
    assert any(len(output.sparse.indices) > 3 for output in outputs)
    assert [output.tokens for output in outputs] == [len(text.split()) + 2 for text in texts]


def test_vectors_of_tokens_of_another_size(load: Any, make: Any, tmp_path: Path) -> None:
    folder = save_bge_m3(tmp_path / "narrow", make, dims=12)
    model = make.spec(folder, "torch-bge-m3")
    engine = load(model)
    assert engine.capabilities.dims["multivector"] == 12
    assert_as_the_formulas(folder, TEXTS, make.encode(engine, TEXTS))
    assert_fits(engine, model)


def test_heads_as_they_are_published(load: Any, make: Any, tmp_path: Path, tiny: Path) -> None:
    folder = save_bge_m3(tmp_path / "pickled", make, pickled=True)
    with pytest.raises(UnsafeSource, match="sparse_linear as a pickle"):
        load(folder, adapter="torch-bge-m3")
    engine = load(folder, adapter="torch-bge-m3", allow_pickle=True)
    assert_as_the_formulas(tiny, TEXTS, make.encode(engine, TEXTS))


# --- requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [("dense",), ("sparse",), ("multivector",), ("multivector", "dense")])
def test_a_request_gets_what_it_asks_for(load: Any, make: Any, tiny: Path, wanted: tuple[str, ...]) -> None:
    engine = load(tiny, adapter="torch-bge-m3")
    whole = make.encode(engine, TEXTS)
    for part, full in zip(make.encode(engine, TEXTS, output_types=wanted), whole, strict=True):
        assert {name for name in ALL if getattr(part, name) is not None} == set(wanted)
        if part.dense is not None:
            np.testing.assert_array_equal(part.dense, full.dense)
        if part.multivector is not None:
            np.testing.assert_array_equal(part.multivector, full.multivector)


def test_requests_for_different_outputs_share_a_batch(load: Any, make: Any, tiny: Path) -> None:
    engine = load(tiny, adapter="torch-bge-m3")
    wanted = [("dense",), ("sparse", "multivector"), ALL, ("sparse",), ("dense", "multivector")]
    prepared = []
    for text, names in zip(TEXTS, wanted, strict=True):
        prepared += engine.prepare(BatchRequest(Task.ENCODE, [Item(text=text)], RequestParams(output_types=names)))
    for output, names in zip(engine.run(prepared), wanted, strict=True):
        assert {name for name in ALL if getattr(output, name) is not None} == set(names)


def test_what_is_given_out_is_no_part_of_the_batch(load: Any, make: Any, tiny: Path) -> None:
    """A client's vector would keep the matrix of everybody's alive."""
    for output in make.encode(load(tiny, adapter="torch-bge-m3"), TEXTS):
        assert output.dense.base is None
        assert output.multivector.base is None


@pytest.mark.parametrize("compares", ALL)
def test_documents_are_scored_by_one_of_them(make: Any, tiny: Path, compares: str) -> None:
    described = BgeM3Adapter().describe(make.spec(tiny, "torch-bge-m3", compares=compares))
    assert described is not None
    assert described.compares == compares
    assert Task.SCORE in described.tasks
    assert BgeM3Options().compares == "dense"


def test_what_it_has_not_is_refused(load: Any, tiny: Path) -> None:
    engine = load(tiny, adapter="torch-bge-m3")
    for params in (RequestParams(output_types=("dense", "smell")), RequestParams(dimensions=8)):
        with pytest.raises(Unsupported):
            engine.prepare(BatchRequest(Task.ENCODE, [Item(text="fox")], params))
    with pytest.raises(Unsupported):
        engine.prepare(BatchRequest(Task.SCORE, [Item(text="fox")], query=Item(text="dog")))


# --- memory and files ----------------------------------------------------------------------------------


def assert_fits(engine: Any, model: ModelSpec) -> None:
    answer = plugin.admission_reserve(model, [DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)])
    assert answer is not None
    held = engine.memory().devices["cpu"]
    assert held <= answer.ranks[0].min_bytes < held + 128 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, tiny: Path, dtype: str) -> None:
    model = make.spec(tiny, "torch-bge-m3", dtype=dtype)
    engine = load(model)
    assert_fits(engine, model)
    assert {output.dense.dtype for output in make.encode(engine, TEXTS)} == {np.dtype("float32")}


def refused(load: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(ModelSourceInvalid) as caught:
        load(folder, adapter="torch-bge-m3", **options)
    return str(caught.value)


def test_a_model_without_the_heads_is_refused(load: Any, tiny: Path, tiny_bert: Path, copy_of: Any) -> None:
    assert "no BGE-M3" in refused(load, tiny_bert)
    folder = copy_of(tiny)
    (folder / "colbert_linear.safetensors").unlink()
    assert "colbert_linear" in refused(load, folder)


def test_damaged_heads_are_refused(load: Any, make: Any, tmp_path: Path, tiny: Path, copy_of: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(tiny)
    file = folder / "sparse_linear.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert "truncated" in refused(load, folder)
    file.write_bytes(whole)
    save_file({"weight": load_file(file)["weight"]}, file)
    assert "no bias" in refused(load, folder)
    pickled = save_bge_m3(tmp_path / "pickled", make, pickled=True)
    for damage in (b"", b"never a pickle", (pickled / "sparse_linear.pt").read_bytes()[:100]):
        (pickled / "sparse_linear.pt").write_bytes(damage)
        assert "can't be read" in refused(load, pickled, allow_pickle=True)


def test_a_head_that_would_run_code_runs_none(load: Any, make: Any, tmp_path: Path) -> None:
    import torch

    folder = save_bge_m3(tmp_path / "evil", make, pickled=True)
    torch.save({"weight": Evil(str(tmp_path / "was-here"))}, folder / "colbert_linear.pt")
    assert "can't be read" in refused(load, folder, allow_pickle=True)
    assert not (tmp_path / "was-here").exists()


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_lengths_beyond_the_model_are_refused(load: Any, tiny: Path) -> None:
    assert "positions" in refused(load, tiny, max_length=1000)
