"""The models of the drills on a GPU: an LLM engine and encoders, all with random weights, of any size."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import contestants
from attrs import frozen
from sie_adapters_sglang.adapters import GenerationAdapter, GenerationOptions
from sie_adapters_torch.dense import DenseAdapter
from sie_core import Device, DeviceView, ModelSpec, Source

__all__ = ["CHAT", "CHATS", "Models", "make_models"]

CHAT = "chat"
CHATS = (CHAT, "chat-too")
"""One and the same model, twice: an engine that dies twice in a row is not started again at once."""
HERE = Path(__file__).parent
STANDIN = HERE.parent / "adapters-sglang" / "tests" / "support" / "standin"
VERSION = "0.5.20"
"""What the stand-in passes for."""
ENCODERS = 4
GIB = 1024**3
_STANDIN_TOKENS = 4096
_TOKENS = 16384
_LAYERS = 12


@frozen
class Models:
    """``chats``: the engines' entries in a configuration; ``encoders``: those of the encoders. Each share a folder.

    Bytes: ``assumed`` is what the engine may hold on the device before any launch has shown what it takes, ``encoder``
    what each encoder holds, ``shared`` what the encoders need together beside it; ``host``: all copies on the host.
    """

    chats: tuple[Mapping[str, Any], ...]
    encoders: tuple[Mapping[str, Any], ...]
    engine: str
    assumed: int
    encoder: int
    shared: int
    host: int

    @property
    def encoder_names(self) -> list[str]:
        return [str(entry["name"]) for entry in self.encoders]

    def room(self, promise: int) -> int:
        """Bytes of a device on which the engine, with its promise, and one encoder have room, and not two of these."""
        return promise + self.shared + self.encoder * 3 // 2


def make_models(
    folder: Path, device: Device, nbytes: int, *, python: Path | None, model: Path | None, quick: bool
) -> Models:
    """An engine of about ``nbytes`` of weights, and encoders of a quarter of that each.

    ``python``: an interpreter that has SGLang; ``None``: a stand-in, on an emulated device. ``model``: a folder with a
    model to take instead of one with random weights. Raises RuntimeError.
    """
    if python is None:
        options = _standin(folder, nbytes)
        engine = "the stand-in"
        source = folder / "chat"
    else:
        source = model.resolve() if model is not None else _made(folder / "chat", python, nbytes)
        options = {"python": str(python), "max_total_tokens": _TOKENS, "chunked_prefill_size": 2048, "warmup": False}
        if quick:
            options["extra_args"] = ["--disable-cuda-graph"]  # recording them takes as long as all the rest
        engine = "SGLang"
    save_encoder(folder / "encoder", nbytes // 4)
    served = {"adapter": "sglang-generation", "source": f"path:{source}", "options": options}
    chats = tuple({"name": name, **served} for name in CHATS)
    entry = {"adapter": "torch-dense", "source": f"path:{folder / 'encoder'}"}
    encoders = tuple({"name": f"encoder-{number}", **entry} for number in range(ENCODERS))
    typed = {**options, "extra_args": tuple(options.get("extra_args", ()))}
    spec = ModelSpec(CHAT, "sglang-generation", Source("path", str(source)), options=GenerationOptions(**typed))
    static, beside = _need(GenerationAdapter(), spec, device)
    each, shared = _need(DenseAdapter(), ModelSpec("e", "torch-dense", Source("path", str(folder / "encoder"))), device)
    host = 2 * (static + ENCODERS * each)
    return Models(chats, encoders, engine, static + beside, each, shared, host)


def _need(adapter: DenseAdapter | GenerationAdapter, spec: ModelSpec, device: Device) -> tuple[int, int]:
    """Bytes of a model on the device: those of its own, and its context and headroom."""
    total = device.total()
    free = total - (device.used() or 0)
    view = DeviceView(device.name, device.kind, total=total, free=free, available=free)
    need = adapter.reserve(spec, [view]).ranks[0]
    return need.want_bytes, need.context_bytes + need.headroom_bytes


def _made(folder: Path, python: Path, nbytes: int) -> Path:
    command = [str(python), str(HERE / "gpu_chat.py"), str(folder), str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{python} could not make a model: {done.stderr.strip()[-500:]}")
    return folder


def _standin(folder: Path, nbytes: int) -> dict[str, Any]:
    """Files of which only the headers are read, and an engine that says it holds so much."""
    width = max(8, nbytes // (4 * _STANDIN_TOKENS) // 8 * 8)  # as much KV cache as weights
    model, about = folder / "chat", folder / "site" / f"sglang-{VERSION}.dist-info"
    for each in (model, about):
        each.mkdir(parents=True)
    config = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512}
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
    rows = nbytes // (4 * width)
    entry = {"w": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, 4 * width * rows]}}
    header = json.dumps(entry).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * width * rows)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n", encoding="utf-8")
    how = {"weights_gb": 4 * width * rows / GIB, "kv_gb": 4 * width * _STANDIN_TOKENS / GIB}
    path = os.pathsep.join([str(STANDIN), str(folder / "site")])
    env = {"PYTHONPATH": path, "STANDIN": json.dumps(how)}
    return {"python": sys.executable, "env": env, "max_total_tokens": _STANDIN_TOKENS, "stop_timeout_s": 2.0}


def save_encoder(folder: Path, nbytes: int) -> None:
    """A BERT with random weights of about ``nbytes`` in float32, and MiniLM's words."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    words = contestants.model_folder()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(words / name, folder)
    config = json.loads((words / "config.json").read_text(encoding="utf-8"))
    vocabulary, numbers = int(config["vocab_size"]), nbytes / 4
    # 12 × layers × hidden² + vocabulary × hidden = numbers
    square = 12 * _LAYERS
    hidden = (math.sqrt(vocabulary**2 + 4 * square * numbers) - vocabulary) / (2 * square)
    step = 64 if hidden >= 64 else 8
    hidden = max(8, int(hidden) // step * step)
    made = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=_LAYERS,
        num_attention_heads=hidden // step,
        intermediate_size=4 * hidden,
        max_position_embeddings=512,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = transformers.BertModel(made, add_pooling_layer=False)
    model.save_pretrained(str(folder))
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
