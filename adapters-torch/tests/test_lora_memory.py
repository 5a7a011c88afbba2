"""LoRA adapters and memory: what they take was reserved, all of it comes back, and they are parked with their model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sie_adapters_torch.dense import DenseAdapter
from sie_core import (
    DeviceOutOfMemory,
    HostOffload,
    HostOutOfMemory,
    ModelSourceInvalid,
    ModelSpec,
    TransitionContext,
    TransitionError,
    Unsupported,
    locate,
)

# Raised where these tests make adapters by PeftModel, which the engine does not use.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

MIB = 1024 * 1024
TEXTS = ["a red fox", "the quick fox jumps over the lazy dog", "house"]


class Rig:
    """An engine on an emulated device, and the steps that the core takes with it."""

    def __init__(self, tier: Any, model: ModelSpec, make: Any) -> None:
        self.tier, self._embed = tier, make.embed
        self.context = make.context("emulated:0", device_buffer=lambda _, nbytes: tier.device.allocate(nbytes))
        self.engine: Any = DenseAdapter().load(model, self.context, make.events())
        self.alone = tier.device.used()

    def embed(self, lora: str | None = None) -> Any:
        return self._embed(self.engine, TEXTS, lora=lora)

    def load(self, name: str, source: str) -> None:
        self.engine.lora_load(name, source, self.context)

    def unload(self, name: str) -> None:
        self.engine.lora_unload(name, self.context)

    def park(self) -> HostOffload:
        """A backup that the engine outgrew is dropped for a larger one."""
        try:
            offload: HostOffload = self.tier.park(self.engine)
        except HostOutOfMemory:
            assert self.engine.drop_backup() > 0
            self.tier.forget(self.engine)
            offload = self.tier.park(self.engine)
        assert self.tier.device.used() == 0
        assert self.engine.memory().devices == {"emulated:0": 0}
        return offload

    def cycle(self) -> HostOffload:
        offload = self.park()
        self.tier.wake(self.engine)
        return offload

    def close(self) -> None:
        self.engine.close(self.context)
        assert self.tier.device.used() == 0


@pytest.fixture
def rig(tier: Any, make: Any, tiny_bert: Path) -> Iterator[Rig]:
    made = Rig(tier, make.spec(tiny_bert), make)
    yield made
    made.close()


@pytest.fixture(scope="session")
def sources(save_lora: Any, tiny_bert: Path) -> dict[str, str]:
    """Adapters of several sizes."""
    return {
        "one": save_lora(tiny_bert, r=4),
        "two": save_lora(tiny_bert, r=40, target_modules="all-linear", seed=2),
        "three": save_lora(tiny_bert, r=12, target_modules=["word_embeddings", "key"], use_dora=True, seed=3),
    }


# --- the device's bytes ------------------------------------------------------------------------------


def test_what_is_taken_was_reserved_and_comes_back(rig: Rig, sources: dict[str, str]) -> None:
    device, taken = rig.tier.device, 0
    for name, source in sources.items():
        before, reported = device.used(), rig.engine.memory().devices["emulated:0"]
        need = rig.engine.lora_reserve(name, source)
        assert device.used() == before
        rig.load(name, source)
        assert device.used() - before == need.min_bytes
        assert need.min_bytes - 4096 < rig.engine.memory().devices["emulated:0"] - reported <= need.min_bytes
        taken += need.min_bytes
    assert device.used() == rig.alone + taken
    for name, source in sources.items():
        rig.unload(name)
        rig.unload(name)
        taken -= rig.engine.lora_reserve(name, source).min_bytes
        assert device.used() == rig.alone + taken


class StrictBlock:
    """Memory that can be given back only when no tensor looks into it any more."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.view = memoryview(self.data)

    def free(self) -> None:
        self.view.release()
        self.data.clear()


def test_no_tensor_looks_into_memory_that_was_given_back(make: Any, tiny_bert: Path, sources: dict[str, str]) -> None:
    blocks: list[StrictBlock] = []

    def allocate(account: str, nbytes: int) -> StrictBlock:
        blocks.append(StrictBlock(nbytes))
        return blocks[-1]

    ctx = make.context("emulated:0", device_buffer=allocate)
    engine: Any = DenseAdapter().load(make.spec(tiny_bert), ctx, make.events())
    for name, source in sources.items():
        engine.lora_load(name, source, ctx)
        make.embed(engine, TEXTS, lora=name)
    assert len(blocks) == 4
    before = make.embed(engine, TEXTS, lora="two")
    blocks[2].view[:] = bytes(len(blocks[2].view))  # it is what the adapter computes with
    assert np.abs(make.embed(engine, TEXTS, lora="two") - before).max() > 1e-3
    engine.lora_unload("two", ctx)
    assert [len(block.data) > 0 for block in blocks] == [True, True, False, True]
    engine.close(ctx)
    assert not any(block.data for block in blocks)


def test_a_device_without_room(rig: Rig, sources: dict[str, str]) -> None:
    device, plain = rig.tier.device, rig.embed()
    rig.load("one", sources["one"])
    one, held = rig.embed("one"), device.used()
    filler = device.allocate(device.total() - held - 4096)
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory) as caught:
            rig.load("two", sources["two"])
        assert caught.value.account == "emulated:0"
        assert caught.value.needed > 4096
        assert device.used() == device.total() - 4096
    with pytest.raises(Unsupported):
        rig.embed("two")
    np.testing.assert_array_equal(rig.embed(), plain)
    np.testing.assert_array_equal(rig.embed("one"), one)
    filler.free()
    rig.load("two", sources["two"])
    assert np.abs(rig.embed("two") - plain).max() > 1e-3


def test_torch_running_out_of_memory_is_the_devices_error(
    rig: Rig, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft
    import torch

    def exhausted(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(peft, "inject_adapter_in_model", exhausted)
        with pytest.raises(DeviceOutOfMemory, match=r"2\.00 GiB"):
            rig.load("one", sources["one"])
    assert rig.tier.device.used() == rig.alone
    rig.load("one", sources["one"])


def test_an_adapter_that_cannot_run_gives_its_memory_back(
    rig: Rig, sources: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft.tuners.lora.layer import Linear

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ModelSourceInvalid, match="ZeroDivisionError"):
            rig.load("one", sources["one"])
    assert rig.tier.device.used() == rig.alone
    rig.load("one", sources["one"])


# --- parking -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_every_order_of_loading_unloading_parking_and_waking(rig: Rig, sources: dict[str, str], seed: int) -> None:
    rng = random.Random(seed)
    expected: dict[str | None, Any] = {None: rig.embed()}
    for name, source in sources.items():
        rig.load(name, source)
        expected[name] = rig.embed(name)
        rig.unload(name)
    loaded: set[str] = set()
    for _ in range(14):
        name = rng.choice(list(sources))
        if rng.random() < 0.4:
            rig.cycle()
        elif name in loaded:
            rig.unload(name)
            loaded.remove(name)
        else:
            rig.load(name, sources[name])
            loaded.add(name)
        for there in (None, *sorted(loaded)):
            np.testing.assert_array_equal(rig.embed(there), expected[there])
        needs = [rig.engine.lora_reserve(there, sources[there]).min_bytes for there in loaded]
        assert rig.tier.device.used() == rig.alone + sum(needs)


def test_the_copy_grows_and_shrinks_with_the_adapters(rig: Rig, sources: dict[str, str]) -> None:
    alone = rig.cycle().host_bytes
    rig.load("two", sources["two"])
    with pytest.raises(HostOutOfMemory, match="the engine has grown"):
        rig.tier.park(rig.engine)
    grown = rig.cycle().host_bytes
    assert grown - alone >= rig.engine.lora_reserve("two", sources["two"]).min_bytes - 4096 > 0
    rig.unload("two")
    assert rig.cycle().host_bytes == alone


def test_parameters_keep_their_identity(rig: Rig, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        rig.load(name, source)

    def identities() -> list[int]:
        return [id(each) for adapter in rig.engine._loras._adapters.values() for each in adapter.tensors]

    before = identities()
    assert len(before) > 20
    rig.cycle()
    assert identities() == before


def test_a_wake_without_room_for_an_adapter(rig: Rig, sources: dict[str, str]) -> None:
    device = rig.tier.device
    rig.load("two", sources["two"])
    plain, two, held = rig.embed(), rig.embed("two"), device.used()
    rig.park()
    filler = device.allocate(device.total() - held + 4096)
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory):
            rig.tier.wake(rig.engine)
        assert device.used() == device.total() - held + 4096
    filler.free()
    rig.tier.wake(rig.engine)
    np.testing.assert_array_equal(rig.embed(), plain)
    np.testing.assert_array_equal(rig.embed("two"), two)


def test_nothing_changes_while_it_is_parked(rig: Rig, sources: dict[str, str]) -> None:
    rig.load("one", sources["one"])
    one = rig.embed("one")
    rig.park()
    for call in (lambda: rig.load("two", sources["two"]), lambda: rig.unload("one")):
        with pytest.raises(TransitionError, match="parked"):
            call()
    rig.tier.wake(rig.engine)
    np.testing.assert_array_equal(rig.embed("one"), one)
    rig.unload("one")
    assert rig.tier.device.used() == rig.alone


def test_closing_it_while_it_is_parked(rig: Rig, sources: dict[str, str]) -> None:
    rig.load("one", sources["one"])
    rig.park()
    rig.close()


def test_minilm(tier: Any, make: Any, minilm: ModelSpec, save_lora: Any) -> None:
    assert minilm.source is not None
    base = Path(locate(minilm.source))
    rig = Rig(type(tier)(112 * MIB), minilm, make)
    expected: dict[str | None, Any] = {None: rig.embed()}
    for seed, name in enumerate(("one", "two")):
        rig.load(name, save_lora(base, target_modules="all-linear", seed=seed))
        expected[name] = rig.embed(name)
        rig.cycle()
    for name, vectors in expected.items():
        np.testing.assert_array_equal(rig.embed(name), vectors)
    rig.unload("one")
    rig.cycle()
    for name in (None, "two"):
        np.testing.assert_array_equal(rig.embed(name), expected[name])
    rig.close()
    rig.tier.device.close()


def test_an_engine_that_was_dropped_without_a_word(tier: Any, make: Any, tiny_bert: Path, sources: Any) -> None:
    """No cycle of references keeps a model with adapters alive."""
    import gc
    import weakref

    rig = Rig(tier, make.spec(tiny_bert), make)
    rig.load("one", sources["one"])
    rig.cycle()
    gone = weakref.ref(rig.engine)
    rig.close()
    tier.copies.clear()
    gc.disable()
    try:
        del rig
        assert gone() is None
    finally:
        gc.enable()


def test_the_context_may_be_a_plain_one_on_the_cpu(load: Any, make: Any, tiny_bert: Path, sources: Any) -> None:
    engine = load(tiny_bert)
    before = engine.memory().devices["cpu"]
    engine.lora_load("two", sources["two"], TransitionContext())
    need = engine.lora_reserve("two", sources["two"])
    assert engine.memory().devices["cpu"] - before <= need.min_bytes
    assert need.min_bytes < 2 * (engine.memory().devices["cpu"] - before)
    engine.lora_unload("two", TransitionContext())
    assert engine.memory().devices["cpu"] == before
