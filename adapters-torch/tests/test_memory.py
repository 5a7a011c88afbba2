"""The book of bytes: what is reserved, what is held, where it lies, and what happens when it runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from sie_adapters_torch import plugin
from sie_adapters_torch.dense import DenseAdapter
from sie_core import (
    AdmissionReserve,
    BatchEngine,
    DeviceOutOfMemory,
    DeviceView,
    ModelSpec,
    TransitionCancelled,
    TransitionContext,
)

MIB = 1024 * 1024


class Emulated:
    """RAM that stands for a device, with a budget."""

    def __init__(self, total: int) -> None:
        self.total, self.live = total, 0

    def allocate(self, account: str, nbytes: int) -> Any:
        if self.live + nbytes > self.total:
            raise DeviceOutOfMemory("full", account=account, needed=nbytes, free=self.total - self.live)
        self.live += nbytes
        return Block(self, nbytes)


class Block:
    def __init__(self, device: Emulated, nbytes: int) -> None:
        self.view, self._device, self.nbytes = memoryview(bytearray(nbytes)), device, nbytes

    def free(self) -> None:
        self._device.live -= self.nbytes
        self.view.release()  # raises while a tensor looks into it
        self.nbytes = 0


def view(kind: str, total: int = 1 << 34) -> DeviceView:
    return DeviceView(f"{kind}:0" if kind != "cpu" else kind, kind, total, total, total)


def reserved(model: ModelSpec, kind: str = "emulated") -> AdmissionReserve:
    answer = plugin.admission_reserve(model, [view(kind)])
    assert answer is not None
    return answer


@pytest.fixture
def device() -> Emulated:
    return Emulated(64 * MIB)


@pytest.fixture
def on_device(make: Any, device: Emulated) -> Iterator[Callable[..., BatchEngine]]:
    engines: list[tuple[BatchEngine, TransitionContext]] = []

    def load(model: ModelSpec, **grant: Any) -> BatchEngine:
        ctx = make.context("emulated:0", device_buffer=device.allocate, **grant)
        engine = DenseAdapter().load(model, ctx, make.events())
        assert isinstance(engine, BatchEngine)
        engines.append((engine, ctx))
        return engine

    yield load
    for engine, ctx in engines:
        engine.close(ctx)


# --- what is held --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "qwen3", "t5", "mpnet", "electra"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_held_was_reserved(load: Any, make: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    model = make.spec(make.transformer(tmp_path / kind, kind), dtype=dtype)
    held = load(model).memory().devices["cpu"]
    promised = reserved(model).ranks[0].min_bytes
    assert held is not None
    assert held <= promised < held + 128 * 1024


def test_minilm_holds_what_its_checkpoint_says(minilm: ModelSpec) -> None:
    need = reserved(minilm).ranks[0]
    assert 86 * MIB < need.min_bytes < 88 * MIB
    half = reserved(attrs.evolve(minilm, options=attrs.evolve(minilm.options, dtype="float16"))).ranks[0]
    assert need.min_bytes / 2 <= half.min_bytes < 0.51 * need.min_bytes


def test_tied_weights_count_once(load: Any, make: Any, tmp_path: Path) -> None:
    """T5 reads its embeddings under two names."""
    model = make.spec(make.transformer(tmp_path / "t5", "t5"))
    module = load(model)._placed.modules[0]
    held = load(model).memory().devices["cpu"]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.state_dict().values()}
    assert held == sum(storages.values())
    assert held < sum(tensor.nbytes for tensor in module.state_dict().values())


def test_headroom_by_device(make: Any, tiny_bert: Path) -> None:
    model = make.spec(tiny_bert)
    assert reserved(model, "emulated").ranks[0].headroom_bytes == 0
    assert reserved(attrs.evolve(model, runtime_headroom=5 * MIB)).ranks[0].headroom_bytes == 5 * MIB
    small = reserved(attrs.evolve(model, batch_tokens=100), "cpu").ranks[0].headroom_bytes
    assert reserved(attrs.evolve(model, batch_tokens=200), "cpu").ranks[0].headroom_bytes == 2 * small > 0
    cuda = reserved(model, "cuda")
    assert cuda.ranks[0].context_bytes == 512 * MIB
    assert cuda.headroom_pool == "torch:cuda:0"
    assert cuda.host_load_bytes >= cuda.ranks[0].min_bytes > 0
    assert reserved(model, "cpu").host_load_bytes == 0


def test_other_adapters_models_are_not_answered_for() -> None:
    assert plugin.admission_reserve(ModelSpec("m", "somebody-else"), [view("cpu")]) is None


# --- an emulated device --------------------------------------------------------------------------------


def test_weights_lie_in_one_buffer_of_the_device(
    on_device: Callable[..., BatchEngine], load: Any, make: Any, device: Emulated, tiny_bert: Path
) -> None:
    texts = ["a red fox", "the lazy dog sleeps", " "]
    model = make.spec(tiny_bert)
    engine = on_device(model)
    assert engine.devices == ("emulated:0",)
    assert engine.headroom_pool == "torch:emulated:0"
    assert engine.memory().devices == {"emulated:0": device.live}
    assert device.live <= reserved(model).ranks[0].min_bytes
    np.testing.assert_array_equal(make.embed(engine, texts), make.embed(load(tiny_bert), texts))
    engine.close(make.context())
    assert device.live == 0
    assert engine.memory().devices == {"emulated:0": 0}
    engine.close(make.context())


def test_the_buffer_is_what_the_model_computes_with(
    on_device: Callable[..., BatchEngine], make: Any, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[Any] = []
    real = Emulated.allocate
    monkeypatch.setattr(Emulated, "allocate", lambda *args: blocks.append(real(*args)) or blocks[-1])
    engine = on_device(make.spec(tiny_bert))
    before = make.embed(engine, ["a red fox"])
    (block,) = blocks
    kept = bytes(block.view)
    block.view[:] = bytes(len(kept))
    assert np.abs(make.embed(engine, ["a red fox"]) - before).max() > 1e-3
    block.view[:] = kept
    np.testing.assert_array_equal(make.embed(engine, ["a red fox"]), before)


def test_tensors_that_share_memory_still_do_on_the_device(
    on_device: Callable[..., BatchEngine], make: Any, device: Emulated, tmp_path: Path
) -> None:
    engine: Any = on_device(make.spec(make.transformer(tmp_path / "t5", "t5")))
    module = engine._placed.modules[0]
    assert module.shared.weight.data_ptr() == module.encoder.embed_tokens.weight.data_ptr()
    assert engine.memory().devices == {"emulated:0": device.live}


def test_a_device_that_is_too_small(make: Any, device: Emulated, tiny_bert: Path) -> None:
    device.total = 1000
    ctx = make.context("emulated:0", device_buffer=device.allocate)
    with pytest.raises(DeviceOutOfMemory) as caught:
        DenseAdapter().load(make.spec(tiny_bert), ctx, make.events())
    assert caught.value.account == "emulated:0"
    assert device.live == 0


# --- grants ------------------------------------------------------------------------------------------


def test_an_engine_larger_than_its_grant_asks_first(make: Any, tiny_bert: Path) -> None:
    refused, allowed = make.events(room=False), make.events(room=True)
    model = make.spec(tiny_bert)
    with pytest.raises(DeviceOutOfMemory) as caught:
        DenseAdapter().load(model, make.context(static=1000), refused)
    assert caught.value.free == 1000
    engine = DenseAdapter().load(model, make.context(static=1000), allowed)
    held = engine.memory().devices["cpu"]
    assert held is not None
    assert refused.asked == allowed.asked == [("cpu", held - 1000)]
    engine.close(make.context())


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_load_that_is_called_off_leaves_nothing(make: Any, device: Emulated, tiny_bert: Path, steps: int) -> None:
    cancelled = threading.Event()
    seen: list[float] = []

    def progress(fraction: float, note: str) -> None:
        seen.append(fraction)
        if len(seen) == steps:
            cancelled.set()

    ctx = make.context("emulated:0", device_buffer=device.allocate, progress=progress, cancelled=cancelled)
    if steps < 3:
        with pytest.raises(TransitionCancelled):
            DenseAdapter().load(make.spec(tiny_bert), ctx, make.events())
    else:
        DenseAdapter().load(make.spec(tiny_bert), ctx, make.events()).close(ctx)
    assert device.live == 0
    assert seen == sorted(seen)


# --- out of memory while inferring -----------------------------------------------------------------------


def test_torch_running_out_of_memory_is_the_devices_error(
    load: Any, make: Any, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    engine = load(tiny_bert, attn="eager")
    before = make.embed(engine, ["a red fox"])

    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore text.")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._placed.modules[0]), "forward", exhausted)
        with pytest.raises(DeviceOutOfMemory, match=r"2\.00 GiB") as caught:
            make.embed(engine, ["a red fox"])
    assert caught.value.account == "cpu"
    np.testing.assert_array_equal(make.embed(engine, ["a red fox"]), before)


def test_the_cpu_running_out_of_memory_is_the_devices_error(
    load: Any, make: Any, tiny_bert: Path, monkeypatch: Any
) -> None:
    import torch

    engine = load(tiny_bert, attn="eager")
    patch = lambda *_, **__: torch.empty(1 << 60)  # noqa: E731 - the real allocator's real error
    monkeypatch.setattr(type(engine._placed.modules[0]), "forward", patch)
    with pytest.raises(DeviceOutOfMemory):
        make.embed(engine, ["a red fox"])


# --- the wake check's fixed input ------------------------------------------------------------------------


def test_the_probe_sees_one_changed_weight(load: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tiny_bert)
    ctx = make.context()
    first = engine.probe(ctx)
    assert engine.probe_matches(first, engine.probe(ctx))
    weight = engine._placed.modules[0].encoder.layer[0].output.dense.weight
    weight[0, 0] += 1.0
    assert not engine.probe_matches(first, engine.probe(ctx))
