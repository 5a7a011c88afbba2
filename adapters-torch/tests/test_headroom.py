"""What a batch takes while it runs, by the allocator's own figures, is no more than was reserved for it."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import pytest
from PIL import Image
from sie_adapters_torch._backbone import split_by_length
from sie_core import BatchEngine, BatchRequest, DeviceView, Item, ModelSpec, RequestParams, Task

TOKENS, LONGEST = 2048, 256
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 300}
OTHER_NAMES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 64, "hidden_dim": 64, "max_position_embeddings": 300},
    "t5": {"d_model": 64, "d_ff": 64},
}


def save(make: Any, folder: Path, kind: str, head: str | None = None, **settings: Any) -> Path:
    sizes = OTHER_NAMES.get(kind, SIZES) | settings
    return make.transformer(folder, kind, limit=LONGEST, head=head, **sizes)  # type: ignore[no-any-return]


def headroom(make: Any, model: ModelSpec) -> int:
    view = DeviceView("cpu", "cpu", 1 << 40, 1 << 40, 1 << 40)
    found: int = make.adapter(model.adapter).reserve(model, [view]).ranks[0].headroom_bytes
    return found


def runner(engine: BatchEngine, words: int, count: int) -> Callable[[], object]:
    """Texts of nearly one length, so that they are padded."""
    items = [Item(text="fox " * (words - index % 2)) for index in range(count)]
    if Task.SCORE in engine.capabilities.tasks:
        request = BatchRequest(Task.SCORE, items, query=Item(text="red"))
    else:
        request = BatchRequest(Task.ENCODE, items, RequestParams(output_types=engine.capabilities.outputs))
    prepared = engine.prepare(request)
    return lambda: engine.run(prepared)


def check(load: Any, make: Any, folder: Path, adapter: str = "torch-dense", **options: Any) -> None:
    model = attrs.evolve(make.spec(folder, adapter, threads=1, **options), batch_tokens=TOKENS)
    engine, reserved = load(model), headroom(make, model)
    for words, count in ((LONGEST - 6, TOKENS // LONGEST), (LONGEST - 6, 1), (3, TOKENS // 8)):
        most = make.peak(runner(engine, words, count))
        assert 0 < most <= reserved, f"{count} texts of {words} words"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "mpnet", "qwen3", "t5"])
def test_a_batch_takes_no_more_than_its_headroom(load: Any, make: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    check(load, make, save(make, tmp_path / kind, kind), dtype=dtype)


@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_nor_does_one_without_fused_kernels(load: Any, make: Any, tmp_path: Path, kind: str) -> None:
    check(load, make, save(make, tmp_path / kind, kind), attn="eager")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # older releases of DeBERTa use it
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nor_does_one_of_relative_positions(load: Any, make: Any, tmp_path: Path, dtype: str) -> None:
    """DeBERTa has tables for each text, however short it is."""
    settings = {"num_labels": 1, "pooler_hidden_size": SIZES["hidden_size"]}
    folder = save(make, tmp_path / "deberta", "deberta-v2", "AutoModelForSequenceClassification", **settings)
    check(load, make, folder, "torch-cross-encoder", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_nor_do_images(load: Any, make: Any, dual_encoders: dict[str, Path], kind: str, dtype: str) -> None:
    model = attrs.evolve(make.spec(dual_encoders[kind], "torch-image-text", threads=1, dtype=dtype), batch_tokens=64)
    engine, reserved = load(model), headroom(make, model)
    file = BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "PNG")
    for items in ([Item(images=(file.getvalue(),))] * 32, [Item(text="a red fox")] * 32):
        prepared = engine.prepare(BatchRequest(Task.ENCODE, items))
        assert 0 < make.peak(lambda prepared=prepared: engine.run(prepared)) <= reserved


def test_the_longest_text_is_reserved_for_even_where_a_batch_has_fewer_tokens(make: Any, tmp_path: Path) -> None:
    model = make.spec(save(make, tmp_path / "bert", "bert"))
    whole = headroom(make, attrs.evolve(model, batch_tokens=LONGEST))
    assert headroom(make, attrs.evolve(model, batch_tokens=8)) == whole
    assert headroom(make, attrs.evolve(model, batch_tokens=2 * LONGEST)) == 2 * whole


def test_tables_of_positions_were_reserved(load: Any, make: Any, tmp_path: Path) -> None:
    """BERT and its kin keep two of them that are in no checkpoint."""
    model = make.spec(save(make, tmp_path / "long", "roberta", max_position_embeddings=20_000))
    held = load(model).memory().devices["cpu"]
    promised = make.adapter("torch-dense").reserve(model, []).ranks[0].min_bytes
    assert held <= promised < held + 128 * 1024


def test_a_text_may_count_as_more_tokens_than_it_has() -> None:
    assert split_by_length([2] * 64, limit=128, overhead=1000) == [range(64)]
    assert split_by_length([2] * 64, limit=128, overhead=1000, fewest=8) == [
        range(start, start + 16) for start in range(0, 64, 16)
    ]
