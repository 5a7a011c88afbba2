"""What a model folder says about a GLiNER model, read without torch and without the ``gliner`` package."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from sie_core import ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._files import ModelFiles, positions_of, read_weights
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import GlinerOptions

__all__ = ["Encoder", "GlinerFiles", "encoder_of", "read_gliner"]

_CONFIG = "gliner_config.json"
_MORE = {"labels_decoder": "makes labels up", "relations_layer": "finds relations"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
# What transformers takes where a configuration says nothing.
_USUAL = (768, 3072, 12)
_USUAL_OF = {"deberta-v2": (1536, 6144, 24), "modernbert": (768, 1152, 12)}


@frozen
class Encoder:
    """A transformer: vectors of ``hidden`` numbers a token, widened to ``wide``; ``heads`` of attention.

    ``copies``: tables of length x length that attention holds for each head, in float32. ``relative``: whether it has
    DeBERTa's relative positions. ``positions``: tokens that it has positions for; ``None``: any number.
    """

    hidden: int
    wide: int
    heads: int
    copies: int
    relative: bool
    positions: int | None


@frozen(eq=False)
class GlinerFiles:
    """A GLiNER model. ``model.config`` is its encoder's, empty while that is not known.

    ``words``: how many words it reads of a text. ``limit``: how many tokens its encoder may have at a time, special
    ones included; 0 while that is not known. ``spans``: whether it scores spans of up to ``width`` words, by vectors of
    ``hidden`` numbers, else words. ``marks``: what stands before each label, and between labels and text.
    ``backbone``: the model on the hub whose configuration and tokenizer it takes, where the folder has none.
    ``labels_backbone``: the same for the encoder that models with ``own_labels`` have for labels.
    """

    model: ModelFiles
    words: int
    spans: bool
    width: int
    hidden: int
    own_labels: bool
    marks: tuple[str, ...]
    backbone: str | None
    labels_backbone: str | None
    labels_config: Mapping[str, Any]
    limit: int = 0


def read_gliner(folder: Path, options: GlinerOptions, *, weights_needed: bool = True) -> GlinerFiles:
    """Read a GLiNER model's folder. Raises ModelSourceInvalid, UnsafeSource."""
    file = folder / _CONFIG
    config = read_object(file)
    if config is None:
        raise ModelSourceInvalid(f"{folder} holds no {_CONFIG}: it is no GLiNER model")
    for key, does in _MORE.items():
        if config.get(key) is not None:
            raise ModelSourceInvalid(f"{file}: {key} is set: the model {does}; torch-gliner finds entities by labels")
    if config.get("model_type") == "gliner_streaming_span":
        raise ModelSourceInvalid(f"{file}: torch-gliner knows no models that read as a text grows")
    check_code(config, file, options)
    weights, pickled = read_weights(folder, options, needed=weights_needed)
    own = config.get("labels_encoder") is not None
    encoder, labels = _nested(config, "encoder_config", file), _nested(config, "labels_encoder_config", file)
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    labels_tokenizer = (folder / "labels_tokenizer" / "tokenizer_config.json").exists()
    words = _number(config, "max_len", 384, file)
    ent, sep = (str(config.get(key, usual)) for key, usual in (("ent_token", "<<ENT>>"), ("sep_token", "<<SEP>>")))
    lacks_labels = own and not (labels and labels_tokenizer)
    return GlinerFiles(
        model=ModelFiles(folder, encoder, weights, pickled, words),
        words=words,
        spans=config.get("span_mode") != "token_level",
        width=_number(config, "max_width", 12, file),
        hidden=_number(config, "hidden_size", 512, file),
        own_labels=own,
        marks=(ent, sep),
        backbone=None if encoder and has_tokenizer else _hub_name(config, "model_name", file),
        labels_backbone=_hub_name(config, "labels_encoder", file) if lacks_labels else None,
        labels_config=labels,
    )


def check_code(config: Any, file: Path, options: GlinerOptions) -> None:
    """The package runs code that a configuration names without asking. Raises UnsafeSource."""
    inner = list(config.values()) if isinstance(config, dict) else config if isinstance(config, list) else []
    if isinstance(config, dict) and "auto_map" in config and not options.trust_remote_code:
        raise UnsafeSource(f"{file} asks for Python code of the model's own; set trust_remote_code: true to run it")
    for each in inner:
        check_code(each, file, options)


def encoder_of(config: Mapping[str, Any]) -> Encoder:
    """An encoder's sizes, from its configuration."""
    kind = str(config.get("model_type", "deberta-v2"))
    hidden, wide, heads = _USUAL_OF.get(kind, _USUAL)

    def said(*keys: str, usual: int) -> int:
        return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), usual)

    relative = kind in ("t5", "mt5", "umt5") or (kind == "deberta-v2" and not config.get("position_biased_input", True))
    positions = None if relative else positions_of({"max_position_embeddings": 512, **config})
    return Encoder(
        hidden=said("hidden_size", "d_model", "dim", usual=hidden),
        wide=said("intermediate_size", "d_ff", "hidden_dim", usual=wide),
        heads=said("num_attention_heads", "num_heads", "n_heads", usual=heads),
        # DeBERTa has no fused kernel: scores of content, two of positions, and the softmax.
        copies=4 if kind.startswith("deberta") else 2 if relative else 1,
        relative=kind.startswith("deberta"),
        positions=positions,
    )


def _nested(config: Mapping[str, Any], key: str, file: Path) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ModelSourceInvalid(f"{file}: {key} holds no JSON object")
    return found


def _number(config: Mapping[str, Any], key: str, usual: int, file: Path) -> int:
    value = config.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelSourceInvalid(f"{file}: {key} is {value!r}, not a whole number above 0")
    return value


def _hub_name(config: Mapping[str, Any], key: str, file: Path) -> str:
    """A model on the hub; the package would take a folder of that name first. Raises ModelSourceInvalid."""
    name = config.get(key)
    if not isinstance(name, str) or not _HUB_NAME.fullmatch(name) or ".." in name or Path(name).exists():
        raise ModelSourceInvalid(
            f"{file.parent} has no encoder's configuration and tokenizer of its own, and its {key}, {name!r}, names no "
            "model on the hub: save it with a newer release of gliner"
        )
    return name
