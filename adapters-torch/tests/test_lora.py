"""LoRA adapters at run time: vectors are PEFT's, the model without them is as it was, and what is unfit is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sie_adapters_torch.dense import DenseOptions
from sie_core import (
    BatchRequest,
    Item,
    LoraEngine,
    MissingDependency,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    Prepared,
    RequestParams,
    ResourceExhausted,
    Task,
    TransitionCancelled,
    TransitionContext,
    UnsafeSource,
    Unsupported,
    locate,
)

# Raised where these tests make adapters by PeftModel, which the engine does not use.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape"),  # it takes biases for damage
]

TOLERANCE = 1e-5
TEXTS = [
    "A man is eating food.",
    " ",
    "é ü 漢字 🙂",
    "word " * 90,
    "The quick brown fox jumps over the lazy dog.",
    "One.",
]
WORDS = ["a red fox", "dog", "the quick fox jumps over the lazy dog under a blue house", "the river runs"]
CTX = TransitionContext()


def vectors(run: Callable[[Any], Any], tokenizer: Any, texts: Sequence[str]) -> Any:
    """Mean pooling over what a transformers model gives, scaled to length 1: what MiniLM's own files ask for."""
    tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        hidden = run(dict(tokens))[0].float()
    mask = tokens["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy()


def pefts_own(base: Path, adapter: Path, texts: Sequence[str]) -> Any:
    """The vectors of PEFT's own loader on a fresh copy of the base."""
    import peft
    from transformers import AutoModel, AutoTokenizer

    model: Any = peft.PeftModel.from_pretrained(AutoModel.from_pretrained(str(base)), str(adapter)).eval()
    return vectors(lambda tokens: model(**tokens), AutoTokenizer.from_pretrained(str(base)), texts)


@pytest.fixture(scope="session")
def base(minilm: ModelSpec) -> Path:
    assert minilm.source is not None
    return Path(locate(minilm.source))


@pytest.fixture(scope="session")
def lora(save_lora: Any, base: Path) -> Callable[..., str]:
    """Make an adapter for MiniLM; the same settings give the same one. Read only."""
    made: dict[str, str] = {}

    def make(**settings: Any) -> str:
        key = repr(sorted(settings.items()))
        if key not in made:
            made[key] = save_lora(base, **settings)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_lora(save_lora: Any, tiny_bert: Path) -> Callable[..., str]:
    made: dict[int, str] = {}

    def make(seed: int = 1) -> str:
        if seed not in made:
            made[seed] = save_lora(tiny_bert, seed=seed)
        return made[seed]

    return make


def folder_of(source: str) -> Path:
    return Path(source.removeprefix("path:"))


# --- vectors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear", "r": 3, "use_rslora": True},
        {"target_modules": ["word_embeddings", "intermediate.dense", "key"]},
        {"target_modules": ["query", "output.dense"], "rank_pattern": {"query": 2}, "alpha_pattern": {"query": 40}},
        {"target_modules": ["query", "intermediate.dense"], "use_dora": True},
        {"target_modules": ["value"], "layers_to_transform": [1, 4], "lora_bias": True, "lora_dropout": 0.5},
        {"target_modules": r".*\.[02]\..*(query|value)", "exclude_modules": r".*\.2\..*value"},
        {"target_modules": ["query", "key"], "rank_pattern": {r"layer\.[0-3]\..*key": 2, "^encoder.*5.*": 3}},
        {"target_modules": ["value"], "layers_to_transform": [1], "layers_pattern": "lay.r"},
    ],
    ids=["plain", "all-linear", "embeddings", "patterns", "dora", "layers", "an expression", "expressions", "layers'"],
)
def test_the_vectors_are_those_of_peft(
    load: Any, make: Any, minilm: ModelSpec, base: Path, lora: Any, settings: dict[str, Any]
) -> None:
    engine, source = load(minilm), lora(**settings)
    plain = make.embed(engine, TEXTS)
    engine.lora_load("one", source, CTX)
    ours = make.embed(engine, TEXTS, lora="one")
    assert np.abs(ours - plain).max() > 0.01
    np.testing.assert_allclose(ours, pefts_own(base, folder_of(source), TEXTS), atol=TOLERANCE)
    np.testing.assert_array_equal(make.embed(engine, TEXTS), plain)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("xlm-roberta", "all-linear"), ("distilbert", ["q_lin", "lin1"]), ("qwen3", ["q_proj", "down_proj"]),
        ("t5", ["q", "wo"]), ("mpnet", ["q", "dense"]), ("electra", "all-linear"),
    ],
)  # fmt: skip
def test_other_architectures(load: Any, make: Any, save_lora: Any, tmp_path: Path, kind: str, targets: Any) -> None:
    import peft
    from transformers import AutoModel, AutoTokenizer, T5EncoderModel

    folder = make.modules(make.transformer(tmp_path / kind, kind), pooling="mean")
    source = save_lora(folder, target_modules=targets)
    engine = load(folder)
    texts = WORDS
    plain = make.embed(engine, texts)
    engine.lora_load("one", source, CTX)
    maker: Any = T5EncoderModel if kind == "t5" else AutoModel
    model: Any = peft.PeftModel.from_pretrained(maker.from_pretrained(str(folder)), str(folder_of(source))).eval()
    expected = vectors(
        lambda tokens: model.base_model.model(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
        ),
        AutoTokenizer.from_pretrained(str(folder)), texts,
    )  # fmt: skip
    ours = make.embed(engine, texts, lora="one")
    assert np.abs(ours - plain).max() > 1e-3
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE)
    np.testing.assert_array_equal(make.embed(engine, texts), plain)
    engine.lora_unload("one", CTX)
    np.testing.assert_array_equal(make.embed(engine, texts), plain)


def test_half_precision(load: Any, make: Any, minilm: ModelSpec, base: Path, lora: Any) -> None:
    import attrs

    engine = load(attrs.evolve(minilm, options=DenseOptions(dtype="bfloat16")))
    before, need = engine.memory().devices["cpu"], engine.lora_reserve("one", lora())
    engine.lora_load("one", lora(), CTX)
    assert engine.memory().devices["cpu"] - before == need.min_bytes
    assert need.min_bytes == sum(tensor.nbytes for tensor in load_file(folder_of(lora()) / WEIGHTS).values()) // 2
    ours = make.embed(engine, TEXTS, lora="one")
    assert np.abs(ours - pefts_own(base, folder_of(lora()), TEXTS)).max() < 0.05


def test_items_of_one_batch_choose_for_themselves(load: Any, make: Any, minilm: ModelSpec, lora: Any) -> None:
    engine = load(minilm)
    before = make.embed(engine, TEXTS)
    engine.lora_load("one", lora(), CTX)
    engine.lora_load("two", lora(seed=2), CTX)
    alone = {name: make.embed(engine, TEXTS, lora=name) for name in (None, "one", "two")}
    np.testing.assert_array_equal(alone[None], before)
    assert np.abs(alone["one"] - alone["two"]).max() > 0.01
    mixed = [(name, index) for index in range(len(TEXTS)) for name in ("two", None, "one")]
    prepared = [prepare(engine, TEXTS[index], lora=name, dimensions=None)[0] for name, index in mixed]
    for (name, index), output in zip(mixed, engine.run(prepared), strict=True):
        np.testing.assert_array_equal(output.dense, alone[name][index])
        assert output.tokens == prepared[mixed.index((name, index))].tokens


def prepare(engine: Any, *texts: str, **params: Any) -> Sequence[Prepared]:
    prepared: Sequence[Prepared] = engine.prepare(
        BatchRequest(Task.ENCODE, [Item(text=text) for text in texts], RequestParams(**params))
    )
    return prepared


@pytest.mark.parametrize("threads", [1, 3])
def test_lanes_side_by_side(load: Any, make: Any, minilm: ModelSpec, lora: Any, threads: int) -> None:
    import attrs

    texts = [f"{word} {' '.join(make.words[:n])}" for n in range(0, 24, 4) for word in make.words[:8]]
    engine = load(attrs.evolve(minilm, options=DenseOptions(threads=threads)))
    engine.lora_load("one", lora(), CTX)
    one_by_one = np.concatenate([make.embed(engine, [text], lora="one") for text in texts])
    np.testing.assert_allclose(make.embed(engine, texts, lora="one"), one_by_one, atol=TOLERANCE)


def test_the_probe_is_that_of_the_model_alone(load: Any, minilm: ModelSpec, lora: Any) -> None:
    engine = load(minilm)
    before = engine.probe(CTX)
    engine.lora_load("one", lora(target_modules="all-linear"), CTX)
    assert engine.probe(CTX) == before


def test_the_model_itself_is_not_touched(load: Any, minilm: ModelSpec, lora: Any) -> None:
    """Its modules are the plain ones all the time: the model without adapters can't become slower."""
    engine: Any = load(minilm)
    module = engine._placed.modules[0]
    modules, tensors = list(module.modules()), {name: id(each) for name, each in module.named_parameters()}
    versions = [each._version for each in module.parameters()]
    engine.lora_load("one", lora(target_modules="all-linear"), CTX)
    assert all(now is then for now, then in zip(module.modules(), modules, strict=True))
    assert {name: id(each) for name, each in module.named_parameters()} == tensors
    assert [each._version for each in module.parameters()] == versions


# --- coming and going --------------------------------------------------------------------------------


def test_unloading(load: Any, make: Any, minilm: ModelSpec, lora: Any) -> None:
    engine: Any = load(minilm)
    assert isinstance(engine, LoraEngine)
    plain, empty = make.embed(engine, TEXTS), engine.memory()
    engine.lora_unload("one", CTX)
    for name, seed in (("one", 1), ("two", 2)):
        engine.lora_load(name, lora(seed=seed), CTX)
    two = make.embed(engine, TEXTS, lora="two")
    engine.lora_unload("one", CTX)
    engine.lora_unload("one", CTX)
    with pytest.raises(Unsupported, match="no LoRA adapter 'one'; loaded are two") as caught:
        make.embed(engine, TEXTS, lora="one")
    assert caught.value.param == "lora"
    assert caught.value.supported == ("two",)
    np.testing.assert_array_equal(make.embed(engine, TEXTS, lora="two"), two)
    engine.lora_unload("two", CTX)
    with pytest.raises(Unsupported, match="none is loaded"):
        make.embed(engine, TEXTS, lora="two")
    np.testing.assert_array_equal(make.embed(engine, TEXTS), plain)
    assert engine.memory() == empty


def test_an_adapter_that_went_between_preparing_and_running(load: Any, make: Any, minilm: ModelSpec, lora: Any) -> None:
    engine = load(minilm)
    engine.lora_load("one", lora(), CTX)
    batch = [*prepare(engine, "a"), *prepare(engine, "b", lora="one")]
    engine.lora_unload("one", CTX)
    with pytest.raises(Unsupported, match="no LoRA adapter 'one'"):
        engine.run(batch)


def test_another_adapter_of_the_same_name(load: Any, make: Any, minilm: ModelSpec, lora: Any, tmp_path: Path) -> None:
    engine = load(minilm)
    engine.lora_load("one", lora(), CTX)
    held, first = engine.memory(), make.embed(engine, TEXTS, lora="one")
    with pytest.raises(ModelSourceNotFound):
        engine.lora_load("one", f"path:{tmp_path / 'nowhere'}", CTX)
    np.testing.assert_array_equal(make.embed(engine, TEXTS, lora="one"), first)
    engine.lora_load("one", lora(seed=2), CTX)
    assert np.abs(make.embed(engine, TEXTS, lora="one") - first).max() > 0.01
    assert engine.memory() == held


def test_as_many_as_the_options_allow(load: Any, make: Any, minilm: ModelSpec, lora: Any) -> None:
    import attrs

    assert load(minilm).max_loras == 8
    engine = load(attrs.evolve(minilm, options=DenseOptions(max_loras=1)))
    assert engine.max_loras == 1
    engine.lora_load("one", lora(), CTX)
    with pytest.raises(ResourceExhausted, match="max_loras"):
        engine.lora_load("two", lora(seed=2), CTX)
    engine.lora_load("one", lora(seed=2), CTX)
    none = load(attrs.evolve(minilm, options=DenseOptions(max_loras=0)))
    for call in (lambda: none.lora_reserve("one", lora()), lambda: none.lora_load("one", lora(), CTX)):
        with pytest.raises(Unsupported, match="max_loras is 0"):
            call()
    with pytest.raises(ValueError, match="max_loras must not be negative"):
        DenseOptions(max_loras=-1)


# --- what is refused ---------------------------------------------------------------------------------

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def config(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / CONFIG).write_text(
        json.dumps({**json.loads((folder / CONFIG).read_text()), **changes})
    )


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(change(tensors), folder / WEIGHTS)

    return damage


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return weights(lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()})


def rewritten(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def piped(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


LAYER = "base_model.model.encoder.layer.0.attention.self."
FILES_TELL: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("gone", shutil.rmtree, ModelSourceNotFound, "there is no folder"),
    ("no config", lambda folder: (folder / CONFIG).unlink(), ModelSourceInvalid, "no adapter_config.json"),
    ("no JSON", rewritten(CONFIG, b"{"), ModelSourceInvalid, "not valid JSON"),
    ("another method", config(peft_type="IA3"), ModelSourceInvalid, "peft_type 'IA3'"),
    ("no method", config(peft_type=None), ModelSourceInvalid, "peft_type None"),
    ("whole modules", config(modules_to_save=["pooler"]), ModelSourceInvalid, "sets modules_to_save"),
    ("biases", config(bias="lora_only"), ModelSourceInvalid, "bias is 'lora_only'"),
    ("pissa", config(init_lora_weights="pissa_niter_4"), ModelSourceInvalid, "changed weights of the model"),
    ("activated", config(alora_invocation_tokens=[1]), ModelSourceInvalid, "alora_invocation_tokens"),
    ("from the future", config(use_magic=True), ModelSourceInvalid, "sets use_magic"),
    ("no weights", lambda folder: (folder / WEIGHTS).unlink(), ModelSourceInvalid, "no adapter_model.safetensors"),
    ("cut", truncated, ModelSourceInvalid, "truncated"),
    ("empty", weights(lambda tensors: {}), ModelSourceInvalid, "holds no weights"),
    ("base weights", renamed("lora_A.", "base_layer."), ModelSourceInvalid, "no LoRA layer's"),
    ("pickled", pickled, UnsafeSource, "allow_pickle: true"),
    ("whole numbers", weights(lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()}),
     ModelSourceInvalid, "type I8; LoRA weights are floating-point"),
    ("a pipe for a config", piped(CONFIG), ModelSourceInvalid, "adapter_config.json is not a regular file"),
    ("a pipe for weights", piped(WEIGHTS), ModelSourceInvalid, "model.safetensors is not a regular file"),
]  # fmt: skip
LOADING_TELLS: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("other layers", config(target_modules=["q_proj"]), ModelSourceInvalid, "does not fit the model.*q_proj"),
    ("fewer layers", config(target_modules=["query"]), ModelSourceInvalid, "no place for .*value.lora_"),
    ("more layers", config(target_modules=["query", "value", "key"]), ModelSourceInvalid, "it lacks .*key.lora_"),
    ("another rank", config(r=3), ModelSourceInvalid, "does not fit the model.*size mismatch"),
    ("a giant's rank", config(r=10**12), ModelSourceInvalid, "says r: 1000000000000, and the weights are of rank 4"),
    ("a giant in a pattern", config(rank_pattern={"query": 10**12}), ModelSourceInvalid, "size mismatch"),
    ("no finite answer", config(lora_alpha=float("inf")), ModelSourceInvalid, "not finite"),
    ("a wrong rank", config(r="many"), ModelSourceInvalid, "does not fit the model"),
    ("no layer for it", config(target_modules=["LayerNorm"]), ModelSourceInvalid, "does not fit the model.*LayerNorm"),
    ("a task's model", renamed("model.encoder", "model.bert.encoder"), ModelSourceInvalid, "no place for bert.encoder"),
    # F4: patterns that would hold the process for ever.
    ("modules without end", config(target_modules=r"(\w+\.?)+!"), ModelSourceInvalid, "target_modules take more than"),
    ("none of them without end", config(exclude_modules=r"(\w+\.?)+!"), ModelSourceInvalid, "exclude_modules take"),
    ("ranks without end", config(rank_pattern={r"(\w+\.?)+!": 2}), ModelSourceInvalid, "rank_pattern take more than"),
    ("alphas without end", config(alpha_pattern={"query": 2, r"(\w+\.?)+!": 2}), ModelSourceInvalid, "alpha_pattern"),
    ("layers without end", config(layers_to_transform=[0], layers_pattern=[r"(\w+\.?)+!"]), ModelSourceInvalid,
     "layers_pattern take more than"),
    ("a pattern with deep nests", config(target_modules="(?:" * 60 + "x" + "{,99})" * 60), ModelSourceInvalid, "LoRA"),
    ("names without end", config(target_modules=[f"m{n}" for n in range(5001)]), ModelSourceInvalid, "5001 entries"),
    ("no expression", config(target_modules="(query"), ModelSourceInvalid, "does not fit the model"),
    ("other shapes", weights(lambda tensors: {name: tensor[:, :3].contiguous() for name, tensor in tensors.items()}),
     ModelSourceInvalid, "size mismatch"),
]  # fmt: skip
ALL = FILES_TELL + LOADING_TELLS


@pytest.mark.parametrize(("damage", "error", "match"), [each[1:] for each in ALL], ids=[each[0] for each in ALL])
def test_what_is_unfit_leaves_nothing(
    load: Any, make: Any, tiny_bert: Path, tiny_lora: Any, tmp_path: Path,
    damage: Callable[[Path], Any], error: type[Exception], match: str,
) -> None:  # fmt: skip
    engine = load(tiny_bert)
    plain, empty = make.embed(engine, WORDS), engine.memory()
    engine.lora_load("good", tiny_lora(seed=2), CTX)
    held, good = engine.memory(), make.embed(engine, WORDS, lora="good")
    folder = Path(shutil.copytree(folder_of(tiny_lora()), tmp_path / "unfit"))
    damage(folder)
    if damage in [each[1] for each in FILES_TELL]:
        with pytest.raises(error, match=match):
            engine.lora_reserve("bad", f"path:{folder}")
    with pytest.raises(error, match=match):
        engine.lora_load("bad", f"path:{folder}", CTX)
    with pytest.raises(Unsupported, match="loaded are good"):
        make.embed(engine, WORDS, lora="bad")
    assert engine.memory() == held
    np.testing.assert_array_equal(make.embed(engine, WORDS), plain)
    np.testing.assert_array_equal(make.embed(engine, WORDS, lora="good"), good)
    engine.lora_load("bad", tiny_lora(), CTX)
    assert np.abs(make.embed(engine, WORDS, lora="bad") - plain).max() > 0.01
    engine.lora_unload("good", CTX)
    engine.lora_unload("bad", CTX)
    assert engine.memory() == empty


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        ("nonsense", ModelSourceNotFound, "not a model source"),
        ("package:no_such_package/lora", ModelSourceNotFound, "pip install"),
        ("hf:org/nowhere", ModelSourceNotFound, "not in the local cache"),
        ("path:/etc/hostname", ModelSourceInvalid, "is a file"),
    ],
)
def test_sources_without_an_adapter(
    load: Any, make: Any, tiny_bert: Path, monkeypatch: Any, source: str, error: type[Exception], match: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engine = load(tiny_bert)
    with pytest.raises(error, match=match):
        engine.lora_reserve("one", source)
    with pytest.raises(error, match=match):
        engine.lora_load("one", source, CTX)


def test_a_package_may_hold_an_adapter(
    load: Any, make: Any, tiny_bert: Path, save_lora: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    package = tmp_path / "my_loras"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copytree(folder_of(save_lora(tiny_bert)), package / "mine")
    monkeypatch.syspath_prepend(tmp_path)
    engine = load(tiny_bert)
    assert engine.lora_reserve("one", "package:my_loras/mine").min_bytes > 0
    engine.lora_load("one", "package:my_loras/mine", CTX)
    assert make.embed(engine, ["a red fox"], lora="one").shape == (1, 32)


def test_pickles_where_they_are_allowed(load: Any, make: Any, tiny_bert: Path, save_lora: Any, tmp_path: Path) -> None:
    source = save_lora(tiny_bert)
    folder = Path(shutil.copytree(folder_of(source), tmp_path / "pickled"))
    pickled(folder)
    plain, engine = load(tiny_bert), load(tiny_bert, allow_pickle=True)
    plain.lora_load("one", source, CTX)
    before = engine.memory().devices["cpu"]
    engine.lora_load("one", f"path:{folder}", CTX)
    assert engine.memory().devices["cpu"] - before <= engine.lora_reserve("one", f"path:{folder}").min_bytes
    np.testing.assert_array_equal(
        make.embed(engine, ["a red fox"], lora="one"), make.embed(plain, ["a red fox"], lora="one")
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(ModelSourceInvalid, match="damaged"):
        engine.lora_load("two", f"path:{folder}", CTX)
    torch.save({"encoder.weight": torch.ones(2)}, folder / "adapter_model.bin")
    with pytest.raises(ModelSourceInvalid, match="no LoRA layer's"):
        engine.lora_load("two", f"path:{folder}", CTX)


def test_without_peft(load: Any, make: Any, tiny_bert: Path, save_lora: Any, monkeypatch: Any) -> None:
    source, engine = save_lora(tiny_bert), load(tiny_bert)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "peft", None)
        for call in (lambda: engine.lora_reserve("one", source), lambda: engine.lora_load("one", source, CTX)):
            with pytest.raises(MissingDependency, match=r"pip install 'sie-adapters-torch\[lora\]'"):
                call()
    engine.lora_load("one", source, CTX)


def test_a_load_that_is_called_off(load: Any, tiny_bert: Path, save_lora: Any) -> None:
    source, engine, cancelled = save_lora(tiny_bert), load(tiny_bert), threading.Event()
    held = engine.memory()
    cancelled.set()
    with pytest.raises(TransitionCancelled):
        engine.lora_load("one", source, TransitionContext(cancelled=cancelled))
    assert engine.memory() == held
    with pytest.raises(Unsupported):
        prepare(engine, "a", lora="one")
