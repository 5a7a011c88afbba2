"""What a model folder says about a dense encoder: pooling and the steps after it. Read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import (
    ModelFiles,
    Prompts,
    limited,
    read_model,
    read_modules,
    read_prompts,
)
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import DenseOptions, Pooling
from sie_adapters_torch._st_files import check_keys, check_place

__all__ = ["DenseFiles", "HeadStep", "read_dense", "read_dense_step"]


@frozen
class HeadStep:
    """A step after pooling. ``dense`` has its weights in ``folder``; ``activation`` is a class of ``torch.nn``;
    ``truncate`` keeps the first ``outputs`` numbers."""

    kind: Literal["normalise", "dense", "layer_norm", "truncate"]
    folder: Path | None = None
    inputs: int = 0
    outputs: int = 0
    bias: bool = True
    activation: str = "Identity"
    residual: bool = False


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


def read_dense(folder: Path, options: DenseOptions, *, weights_needed: bool = True) -> DenseFiles:
    """Read a dense encoder's folder. Raises ModelSourceInvalid, UnsafeSource."""
    steps = _modules(folder) or [("Transformer", folder)]
    prompts, about = read_prompts(folder, options)
    model = read_model(steps[0][1], options, weights_needed=weights_needed)
    assert model.transformer is not None
    model.transformer.check("feature-extraction", "token_embeddings", "last_hidden_state", adapter="torch-dense")
    pooling: Pooling = options.pooling or "mean"
    include_prompt, head = True, []
    for kind, place in steps[1:]:
        if kind == "Pooling":
            found, include_prompt = _pooling(place, known=options.pooling)
            pooling = options.pooling or found
        elif kind == "Normalize":
            file = place / "config.json"
            normalise = read_object(file) or {}
            check_keys(file, normalise, _PLACES)
            check_place(file, normalise, "sentence_embedding", "torch-dense")
            head.append(HeadStep("normalise"))
        elif kind == "Dense":
            head.append(read_dense_step(place))
        elif kind == "LayerNorm":
            check_keys(place / "config.json", read_object(place / "config.json") or {}, ("dimension",))
            head.append(HeadStep("layer_norm", folder=place))
    if options.normalise is not None:
        head = [step for step in head if step.kind != "normalise"]
        head += [HeadStep("normalise")] if options.normalise else []
    dims = next((step.outputs for step in reversed(head) if step.kind == "dense"), model.hidden_size)
    cut = about.get("truncate_dim")
    if isinstance(cut, int) and 0 < cut < dims:
        head, dims = [*head, HeadStep("truncate", outputs=cut)], cut
    model = limited(model, options.max_length)
    sizes = _matryoshka(model.config, about, options, dims)
    return DenseFiles(model, pooling, include_prompt, tuple(head), prompts, dims, sizes)


_STEPS = ("Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout")


def _modules(folder: Path) -> list[tuple[str, Path]] | None:
    steps = read_modules(folder, _STEPS, adapter="torch-dense")
    if steps is None:
        return None
    file, order = folder / "modules.json", [name for name, _ in steps]
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
    check_keys(file, about, (*_POOLING_FLAGS, *_POOLING_KEYS))
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


_POOLING_KEYS = ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt")
_PLACES = ("module_input_name", "module_output_name")
_DENSE_KEYS = ("in_features", "out_features", "bias", "activation_function", "use_residual", *_PLACES)
_ACTIVATIONS = ("Tanh", "Identity", "GELU", "ReLU", "SiLU", "Sigmoid")


def read_dense_step(
    folder: Path, *, adapter: str = "torch-dense", works_on: str = "sentence_embedding", residual: bool = False
) -> HeadStep:
    """A Dense module. ``residual``: whether it may add its input to its output. Raises ModelSourceInvalid."""
    file = folder / "config.json"
    about = read_object(file) or {}
    check_keys(file, about, _DENSE_KEYS, empty=True)
    inputs, outputs = about.get("in_features"), about.get("out_features")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise ModelSourceInvalid(f"{file} lacks in_features and out_features")
    dotted = str(about.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = dotted.rpartition(".")[2]
    if not dotted.startswith("torch.nn.") or activation not in _ACTIVATIONS:
        raise ModelSourceInvalid(f"{file} asks for {dotted}; {adapter} knows {', '.join(_ACTIVATIONS)}")
    adds = bool(about.get("use_residual"))
    if adds and not residual:
        raise ModelSourceInvalid(f"{file} asks for a residual connection, which {adapter} does not know")
    check_place(file, about, works_on, adapter)
    return HeadStep("dense", folder, inputs, outputs, bool(about.get("bias", True)), activation, adds)


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
