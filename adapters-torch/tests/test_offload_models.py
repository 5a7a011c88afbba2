"""Real models through park and wake: bit-identical answers, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import warnings
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from served import serving
from sie_adapters_torch.dense import DenseAdapter
from sie_adapters_torch.offload import OffloadsTensors
from sie_core import Engine, MemoryReport, ModelSpec, Residency, WakeCheck
from sie_core.memory.emulated import EmulatedDevice
from sie_core.memory.ledger import Ledger
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings

MIB = 1024 * 1024
TEXTS = ["a red fox", "the lazy dog sleeps under a blue house", "river", "quick " * 60]


def load(tier: Any, make: Any, model: ModelSpec) -> Any:
    ctx = make.context("emulated:0", device_buffer=lambda _, nbytes: tier.device.allocate(nbytes))
    return DenseAdapter().load(model, ctx, make.events())


def bytes_in(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def state_of(module: torch.nn.Module) -> list[Any]:
    """Identity, layout, sharing and bytes of every parameter and buffer."""
    first: dict[int, int] = {}
    return [
        (id(each), each.shape, each.stride(), each.storage_offset(), each.dtype, bytes_in(each.detach()),
         first.setdefault(each.data_ptr(), index))
        for index, each in enumerate([*module.parameters(), *module.buffers()])
    ]  # fmt: skip


# --- the dense encoder -----------------------------------------------------------------------------------


@pytest.fixture
def big_tier(tier: Any) -> Any:
    return type(tier)(128 * MIB)


def test_minilm_answers_bit_for_bit_as_before(big_tier: Any, make: Any, minilm: ModelSpec) -> None:
    engine = load(big_tier, make, minilm)
    before, module = make.embed(engine, TEXTS), engine._placed.modules
    state, held = state_of(module), engine.memory()
    assert 87 * MIB > big_tier.announce(engine) > 86 * MIB
    for _ in range(3):
        offload = big_tier.park(engine)
        assert offload.retained == {}
        assert offload.host_bytes == big_tier.announce(engine)
        assert big_tier.device.used() == 0
        assert engine.memory().devices == {"emulated:0": 0}
        big_tier.wake(engine)
        assert engine.memory() == held
        assert state_of(module) == state
        assert make.embed(engine, TEXTS).tobytes() == before.tobytes()
    engine.close(make.context())
    big_tier.forget(engine)
    assert big_tier.device.used() == 0


@pytest.mark.parametrize("kind", ["distilbert", "qwen3", "t5", "mpnet"])
def test_other_architectures(tier: Any, make: Any, tmp_path: Path, kind: str) -> None:
    engine = load(tier, make, make.spec(make.transformer(tmp_path / kind, kind)))
    before, state = make.embed(engine, TEXTS[:3]), state_of(engine._placed.modules)
    tier.park(engine)
    tier.wake(engine)
    assert state_of(engine._placed.modules) == state
    assert make.embed(engine, TEXTS[:3]).tobytes() == before.tobytes()
    engine.close(make.context())


def test_a_parked_encoder_refuses_to_run_and_still_tokenises(tier: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tier, make, make.spec(tiny_bert))
    tier.park(engine)
    with pytest.raises(RuntimeError, match="tiny-bert is parked"):
        make.embed(engine, ["a red fox"])
    with pytest.raises(RuntimeError, match="tiny-bert is parked"):
        engine.probe(make.context())


def test_closing_a_parked_encoder_lets_go_of_the_copy(tier: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tier, make, make.spec(tiny_bert))
    tier.park(engine)
    for _ in range(2):
        engine.close(make.context())
    assert engine.memory().devices == {"emulated:0": 0}
    assert tier.device.used() == 0
    tier.forget(engine)


def test_a_tensor_that_was_forgotten_sees_nobody_elses_bytes(tier: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tier, make, make.spec(tiny_bert))
    forgotten, size = next(engine._placed.modules.parameters()).data, tier.device.used()
    engine.close(make.context())
    assert tier.device.used() == 0
    tier.device.allocate(size).view[:] = bytes([1]) * size
    assert not forgotten.any()


def test_the_probe_tells_a_damaged_copy(tier: Any, make: Any, tiny_bert: Path) -> None:
    engine = load(tier, make, make.spec(tiny_bert))
    before = engine.probe(make.context())
    tier.park(engine)
    view = tier.copies[engine].block.view
    view[: len(view) // 2] = bytes(len(view) // 2)
    tier.wake(engine)
    assert not engine.probe_matches(before, engine.probe(make.context()))
    engine.close(make.context())


def test_a_model_is_alive_as_long_as_it_can_run(tier: Any, make: Any, tiny_bert: Path) -> None:
    """A12: parked and closed it is not."""
    engine = load(tier, make, make.spec(tiny_bert))
    assert engine.alive()
    tier.park(engine)
    assert not engine.alive()
    tier.wake(engine)
    assert engine.alive()
    engine.close(make.context())
    assert not engine.alive()


async def test_a_wake_that_restored_nothing_loads_the_model_again(
    make: Any, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: without a wake check the answers of empty memory were served."""
    model = attrs.evolve(make.spec(tiny_bert), wake_check=WakeCheck.NEVER)
    ask = {"model": model.name, "input": TEXTS[:3]}
    async with serving([model]) as (http, registry):
        before = (await http.post("/v1/embeddings", json=ask)).json()["data"]
        await registry.park(model.name)
        monkeypatch.setattr("sie_adapters_torch._image._copy", lambda _, __, storage, out: storage.fill_(0))
        after = (await http.post("/v1/embeddings", json=ask)).json()["data"]
        told = [one.reason for one in registry.decisions() if one.action == "wake failed"]
    assert after == before
    assert len(told) == 1
    assert "does not answer after its wake" in told[0]


# --- causal models and LoRA ------------------------------------------------------------------------------


class Generator(OffloadsTensors):
    """Another author's engine around a causal model."""

    def __init__(self, tier: Any, model: Any) -> None:
        self.devices = ("emulated:0",)
        self.model, self.buffer, self._held = model, tier.put(model), tier.device.used

    def memory(self) -> MemoryReport:
        return MemoryReport({"emulated:0": self._held()})

    def answer(self) -> bytes:
        with torch.inference_mode():
            ids = torch.arange(1, 25).reshape(2, 12)
            logits = self.model(input_ids=ids).logits
            more = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
            )
        result: bytes = logits.numpy().tobytes() + more.numpy().tobytes()
        return result


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def test_a_causal_model_with_tied_weights(tier: Any) -> None:
    engine = Generator(tier, llama())
    before, state = engine.answer(), state_of(engine.model)
    embedding = engine.model.model.embed_tokens.weight
    for _ in range(2):
        tier.park(engine)
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            engine.answer()
        tier.wake(engine)
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight is embedding
        assert state_of(engine.model) == state
        assert engine.answer() == before


@pytest.fixture
def adapted(tier: Any) -> Generator:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what peft uses of transformers is not ours to mend
        model = peft.get_peft_model(llama(), config)
    return Generator(tier, model.eval())


def test_a_peft_model_keeps_its_parameters(tier: Any, adapted: Generator) -> None:
    names = {name: id(parameter) for name, parameter in adapted.model.named_parameters()}
    assert any("lora_A" in name for name in names)
    with adapted.model.disable_adapter():
        plain = adapted.answer()
    before, state = adapted.answer(), state_of(adapted.model)
    assert plain != before
    for _ in range(2):
        tier.park(adapted)
        tier.wake(adapted)
        assert {name: id(parameter) for name, parameter in adapted.model.named_parameters()} == names
        assert state_of(adapted.model) == state
        assert adapted.answer() == before
    with adapted.model.disable_adapter():
        assert adapted.answer() == plain


def test_merging_a_lora_marks_the_backup_stale(tier: Any, adapted: Generator) -> None:
    tier.park(adapted)
    tier.wake(adapted)
    before = adapted.answer()
    adapted.model.merge_adapter()
    adapted.mark_stale()
    merged = adapted.answer()
    assert merged != before
    tier.park(adapted)
    tier.wake(adapted)
    assert adapted.answer() == merged


def test_a_lora_that_was_added_later_comes_back_too(tier: Any, adapted: Generator) -> None:
    """It is in ordinary memory here; a device engine would put it in a buffer of its own."""
    import peft

    tier.park(adapted)
    tier.wake(adapted)
    adapted.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.model.set_adapter("second")
    adapted.model.requires_grad_(False)
    before = adapted.answer()
    tier.park(adapted)
    tier.wake(adapted)
    assert adapted.answer() == before


# --- over and over ---------------------------------------------------------------------------------------


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_cycles_leave_nothing(tier: Any) -> None:
    """16 MiB there and back, by every way: with a backup, without, stale."""

    class Keeper(OffloadsTensors):
        devices = ("emulated:0",)

    engine: Any = Keeper()
    engine.net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).requires_grad_(False)
    engine.buffer = tier.put(engine.net)
    engine.memory = lambda: MemoryReport({"emulated:0": 8 * MIB})
    held, rss = tier.device.used(), 0
    for cycle in range(60):
        tier.park(engine)
        assert tier.device.used() == 0
        tier.wake(engine)
        assert tier.device.used() == held
        if cycle % 3 == 1:
            engine.drop_backup()
            tier.forget(engine)
        elif cycle % 3 == 2:
            engine.mark_stale()
        if cycle == 10:
            gc.collect()
            rss = _rss()
    gc.collect()
    assert _rss() - rss < 4 * MIB
    copies = sum(copy.block.size for copy in tier.copies.values())
    assert tier.arena.idle + copies == -(-len(engine.buffer.view) // 4096) * 4096


# --- in the house ----------------------------------------------------------------------------------------


async def test_two_models_take_turns_on_a_device_for_one(make: Any, minilm: ModelSpec) -> None:
    device, ledger = EmulatedDevice("emulated:0", 128 * MIB), Ledger()
    ledger.add_account("host", total=4096 * MIB)
    ledger.add_account(device.name, total=device.total())
    registry = Registry(Plugins.load(), ledger, [device], RegistrySettings(host_cache_bytes=512 * MIB, load_wait_s=100))
    registry.apply([attrs.evolve(minilm, name=name, device="emulated:0") for name in ("one", "two")])
    engines: dict[str, set[int]] = {"one": set(), "two": set()}
    answers: dict[str, set[bytes]] = {"one": set(), "two": set()}
    for turn in range(20):
        name = ("one", "two")[turn % 2]
        with await registry.acquire(name, wait_s=100) as lease:
            engine: Any = lease.engine
            vectors = await lease.worker.call(make.embed, engine, TEXTS[:3], hook="run", timeout=60)
            engines[name].add(id(engine))
            answers[name].add(vectors.tobytes())
        ledger.check()
        assert device.used() <= 88 * MIB
        other = ("two", "one")[turn % 2]
        assert registry.status(other).residency is (Residency.PARKED if turn else Residency.UNLOADED)
    assert [len(ids) for ids in engines.values()] == [1, 1]
    assert len(answers["one"] | answers["two"]) == 1
    assert np.isfinite(np.frombuffer(answers["one"].pop(), np.float32)).all()
    assert {decision.action for decision in registry.decisions()} >= {"park"}
    await registry.shutdown(60.0)
    ledger.check()
    assert not ledger.claims()
    assert device.used() == 0
    await asyncio.sleep(0)


def test_an_engine_is_an_engine() -> None:
    assert issubclass(OffloadsTensors, Engine)
