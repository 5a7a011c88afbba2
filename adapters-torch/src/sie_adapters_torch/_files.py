"""What a model folder says about its model, read without torch.

The files are those of transformers (``config.json``, ``*.safetensors``) and, where present, of sentence-transformers
(``modules.json`` and what it names). Anything that would change the vectors and is not understood is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from sie_core import ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._options import DenseOptions, LoadOptions, Pooling, TextOptions

__all__ = ["DenseFiles", "HeadStep", "ModelFiles", "Prompts", "read_dense", "read_model", "read_object", "read_prompts"]


@frozen(eq=False)
class ModelFiles:
    """A transformers model: the folder with its ``config.json``, that file, and where its weights are.

    ``weights`` lists the safetensors shards; ``pickled`` is set when there are only ``*.bin`` files. Neither: the
    weights are not on this machine yet.
    ``max_length``: tokens an input may have, as far as the files say.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    max_length: int | None

    @property
    def text_config(self) -> Mapping[str, Any]:
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def hidden_size(self) -> int:
        for key in ("hidden_size", "d_model", "dim", "n_embd"):
            if isinstance(self.text_config.get(key), int):
                return int(self.text_config[key])
        raise ModelSourceInvalid(f"{self.folder / 'config.json'} names no hidden_size")


@frozen
class Prompts:
    """Texts put before an input. ``named`` by name; ``query`` and ``document`` as resolved."""

    named: Mapping[str, str]
    query: str
    document: str


@frozen
class HeadStep:
    """A step after pooling. ``dense`` has its weights in ``folder``; ``activation`` is a class of ``torch.nn``."""

    kind: Literal["normalise", "dense", "layer_norm"]
    folder: Path | None = None
    inputs: int = 0
    outputs: int = 0
    bias: bool = True
    activation: str = "Identity"


@frozen(eq=False)
class DenseFiles:
    """A dense encoder: the transformers model, pooling, the steps after it, prompts and what sizes it can give."""

    model: ModelFiles
    pooling: Pooling
    include_prompt: bool
    head: tuple[HeadStep, ...]
    prompts: Prompts
    dims: int
    matryoshka: tuple[int, ...] | None


# --- JSON ------------------------------------------------------------------------------------------


def _read_json(file: Path) -> Any:
    """The file's content; ``None`` when there is no such file."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceInvalid(f"{file} is no JSON: {error}") from error


def read_object(file: Path) -> dict[str, Any] | None:
    """A JSON object; ``None`` when there is no such file. Raises ModelSourceInvalid."""
    content = _read_json(file)
    if content is not None and not isinstance(content, dict):
        raise ModelSourceInvalid(f"{file} holds no JSON object")
    return content


def _inside(folder: Path, name: object, file: Path) -> Path:
    """A path that a file of the model names. It may not lead out of the model's folder."""
    path = Path(str(name))
    if not isinstance(name, str) or path.is_absolute() or ".." in path.parts:
        raise ModelSourceInvalid(f"{file} names {name!r}, which is not inside the model's folder")
    return folder / path


# --- the transformers part -------------------------------------------------------------------------


def read_model(folder: Path, options: LoadOptions, *, weights_needed: bool = True) -> ModelFiles:
    """Read a transformers model's folder. Raises ModelSourceInvalid, UnsafeSource."""
    config = read_object(folder / "config.json")
    if config is None:
        raise ModelSourceInvalid(f"{folder} holds no config.json: it is no transformers model")
    if not isinstance(config.get("model_type"), str):
        # Some releases of transformers would then guess from the folder's name.
        raise ModelSourceInvalid(f"{folder / 'config.json'} names no model_type")
    weights, pickled = _weights(folder, needed=weights_needed)
    if pickled and not options.allow_pickle:
        raise UnsafeSource(
            f"{folder} has only pickled weights (*.bin), which can run code when read: use a safetensors "
            "version of the model, or set allow_pickle: true"
        )
    return ModelFiles(folder, config, weights, pickled, _max_length(folder, config))


def _weights(folder: Path, *, needed: bool) -> tuple[tuple[Path, ...], bool]:
    single = folder / "model.safetensors"
    if single.exists():
        return (single,), False
    index_file = folder / "model.safetensors.index.json"
    index = read_object(index_file)
    if index is not None:
        names = index.get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelSourceInvalid(f"{index_file} has no weight_map")
        shards = tuple(_inside(folder, name, index_file) for name in sorted(set(names.values()), key=str))
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing and not needed:
            return (), False
        if missing:
            raise ModelSourceInvalid(f"{folder} lacks {len(missing)} of {len(shards)} weight files: {missing[0]}, …")
        return shards, False
    pickles = ("pytorch_model.bin", "pytorch_model.bin.index.json")
    if any((folder / name).exists() for name in pickles):
        return (), True
    if not needed:
        return (), False
    raise ModelSourceInvalid(f"{folder} holds no model.safetensors")


def _max_length(folder: Path, config: Mapping[str, Any]) -> int | None:
    """As sentence-transformers does: its own file, else the smaller of the tokenizer's and the model's limit."""
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json"):
        about = read_object(folder / name)
        if about is not None:
            if isinstance(about.get("max_seq_length"), int):
                return int(about["max_seq_length"])
            break
    tokenizer = read_object(folder / "tokenizer_config.json") or {}
    limits = [tokenizer.get("model_max_length"), _positions(config)]
    # Tokenizers without a limit write 1e30.
    known = [int(limit) for limit in limits if isinstance(limit, int | float) and 0 < limit < 10**9]
    return min(known) if known else None


_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer")


def _positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model has positions for. RoBERTa's kind starts counting after the padding id."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:
        return None
    if config.get("model_type") in _OFFSET_POSITIONS and isinstance(config.get("pad_token_id"), int):
        return positions - int(config["pad_token_id"]) - 1
    return positions


def read_prompts(folder: Path, options: TextOptions) -> tuple[Prompts, Mapping[str, Any]]:
    """Prompts, the options' over the files', and the rest of sentence-transformers' own configuration."""
    file = folder / "config_sentence_transformers.json"
    about = read_object(file) or {}
    in_files = about.get("prompts") or {}
    if not isinstance(in_files, dict) or not all(isinstance(text, str | None) for text in in_files.values()):
        raise ModelSourceInvalid(f"{file}: prompts must map names to texts")
    named = {str(name): text or "" for name, text in in_files.items()} | dict(options.prompts)
    default = named.get(about.get("default_prompt_name") or "", "")

    def first(*names: str) -> str:
        # An empty prompt counts as set: it keeps the default one away, as in sentence-transformers.
        return next((named[name] for name in names if name in named), default)

    query = options.query_prompt if options.query_prompt is not None else first("query")
    document = options.document_prompt
    if document is None:
        document = first("document", "passage", "corpus")
    return Prompts(named, query, document), about


# --- the dense part --------------------------------------------------------------------------------


def read_dense(folder: Path, options: DenseOptions, *, weights_needed: bool = True) -> DenseFiles:
    """Read a dense encoder's folder. Raises ModelSourceInvalid, UnsafeSource."""
    modules = _read_json(folder / "modules.json")
    prompts, about = read_prompts(folder, options)
    steps: list[tuple[str, Path]] = [("Transformer", folder)]
    if modules is not None:
        steps = _modules(folder, modules)
    model = read_model(steps[0][1], options, weights_needed=weights_needed)
    pooling: Pooling = options.pooling or "mean"
    include_prompt, head = True, []
    for kind, place in steps[1:]:
        if kind == "Pooling":
            found, include_prompt = _pooling(place, known=options.pooling)
            pooling = options.pooling or found
        elif kind == "Normalize":
            head.append(HeadStep("normalise"))
        elif kind == "Dense":
            head.append(_dense(place))
        elif kind == "LayerNorm":
            head.append(HeadStep("layer_norm", folder=place))
    if options.normalise is not None:
        head = [step for step in head if step.kind != "normalise"]
        head += [HeadStep("normalise")] if options.normalise else []
    dims = next((step.outputs for step in reversed(head) if step.kind == "dense"), model.hidden_size)
    limit = options.max_length or model.max_length
    positions = _positions(model.text_config)
    if options.max_length and positions is not None and positions < options.max_length:
        raise ModelSourceInvalid(f"max_length is {options.max_length}, and the model has {positions} positions")
    model = ModelFiles(model.folder, model.config, model.weights, model.pickled, limit)
    sizes = _matryoshka(model.config, about, options, dims)
    return DenseFiles(model, pooling, include_prompt, tuple(head), prompts, dims, sizes)


_STEPS = ("Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout")


def _modules(folder: Path, modules: Any) -> list[tuple[str, Path]]:
    file = folder / "modules.json"
    if not isinstance(modules, list) or not modules or not all(isinstance(module, dict) for module in modules):
        raise ModelSourceInvalid(f"{file} lists no modules")
    steps = []
    for module in modules:
        kind, path = str(module.get("type", "")), module.get("path", "")
        if not kind.startswith("sentence_transformers."):
            raise UnsafeSource(f"{file} asks for {kind!r}, code of the model's own; torch-dense can't run it")
        name = kind.rpartition(".")[2]
        if name not in _STEPS:
            raise ModelSourceInvalid(f"{file} asks for a {name} module; torch-dense knows {', '.join(_STEPS)}")
        steps.append((name, _inside(folder, path, file)))
    order = [name for name, _ in steps]
    if order[0] != "Transformer" or order.count("Transformer") != 1 or order.count("Pooling") != 1:
        raise ModelSourceInvalid(f"{file} must start with one Transformer and have one Pooling; it has {order}")
    if order[1] != "Pooling":
        raise ModelSourceInvalid(f"{file} has a {order[1]} before the pooling; torch-dense can't do that")
    return steps


_POOLING: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def _pooling(folder: Path, *, known: Pooling | None) -> tuple[Pooling, bool]:
    file = folder / "config.json"
    about = read_object(file)
    if about is None:
        raise ModelSourceInvalid(f"{file} is missing")
    stated = about.get("pooling_mode")
    modes = [stated] if isinstance(stated, str) else stated
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if about.get(flag)] or ["mean"]
    include_prompt = bool(about.get("include_prompt", True))
    if known is not None:
        return known, include_prompt
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLING:
        raise ModelSourceInvalid(f"{file} asks for {modes} pooling; torch-dense knows {', '.join(_POOLING)}")
    return _POOLING[modes[0]], include_prompt


_ACTIVATIONS = ("Tanh", "Identity", "GELU", "ReLU", "SiLU", "Sigmoid")


def _dense(folder: Path) -> HeadStep:
    file = folder / "config.json"
    about = read_object(file) or {}
    inputs, outputs = about.get("in_features"), about.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise ModelSourceInvalid(f"{file} lacks in_features and out_features")
    dotted = str(about.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = dotted.rpartition(".")[2]
    if not dotted.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise ModelSourceInvalid(f"{file} asks for {dotted}; torch-dense knows {', '.join(_ACTIVATIONS)}")
    if about.get("use_residual"):
        raise ModelSourceInvalid(f"{file} asks for a residual connection, which torch-dense does not know")
    places = (about.get("module_input_name"), about.get("module_output_name"))
    if any(place not in (None, "sentence_embedding") for place in places):
        raise ModelSourceInvalid(f"{file} works on {places}; torch-dense knows a Dense after the pooling only")
    return HeadStep("dense", folder, inputs, outputs, bool(about.get("bias", True)), activation)


def _matryoshka(
    config: Mapping[str, Any], about: Mapping[str, Any], options: DenseOptions, dims: int
) -> tuple[int, ...] | None:
    """Sizes that a request may ask for; ``None``: any up to ``dims``."""
    sizes = options.matryoshka
    if sizes is None:
        declared = config.get("matryoshka_dimensions") or about.get("matryoshka_dimensions")
        if isinstance(declared, list) and all(isinstance(size, int) for size in declared):
            sizes = tuple(declared)
        elif config.get("is_matryoshka") is True:
            return None
    return tuple(sorted({size for size in sizes or () if 0 < size <= dims}))
