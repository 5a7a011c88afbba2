"""What a model folder says about a sparse encoder, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
from sie_adapters_torch._options import SparseOptions
from sie_adapters_torch._st_files import check_keys, read_transformer

__all__ = ["SparseFiles", "read_sparse"]


@frozen(eq=False)
class SparseFiles:
    """A sparse encoder: a masked language model, and what becomes of its logits."""

    model: ModelFiles
    pooling: Literal["max", "sum"]
    activation: Literal["relu", "log1p_relu"]
    prompts: Prompts
    vocabulary: int


_ENCODERS = ("MLMTransformer", "Transformer")
_POOLING_KEYS = (
    *("pooling_strategy", "activation_function"),
    *("embedding_dimension", "word_embedding_dimension", "chunk_size"),  # of no effect
)
_STEPS = (*_ENCODERS, "SpladePooling")


def read_sparse(folder: Path, options: SparseOptions, *, weights_needed: bool = True) -> SparseFiles:
    """Read a sparse encoder's folder. Raises ModelSourceInvalid, UnsafeSource."""
    place, about = folder, {}
    steps = read_modules(folder, _STEPS, adapter="torch-sparse")
    if steps is not None:
        place, pooling = _checked(folder, steps)
        about = read_object(pooling / "config.json") or {}
        check_keys(pooling / "config.json", about, _POOLING_KEYS, empty=True)
    model = limited(read_model(place, options, weights_needed=weights_needed), options.max_length)
    if steps is not None and steps[0][0] == "Transformer":
        assert model.transformer is not None
        model.transformer.check("fill-mask", "token_embeddings", "logits", adapter="torch-sparse")
    vocabulary = model.text_config.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary <= 0:
        raise ModelSourceInvalid(f"{model.folder / 'config.json'} names no vocab_size")
    pooled = options.pooling or about.get("pooling_strategy", "max")
    activation = options.activation or about.get("activation_function", "relu")
    if pooled not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelSourceInvalid(
            f"{folder} asks for {pooled!r} pooling of {activation!r}; torch-sparse knows max and sum, "
            "relu and log1p_relu"
        )
    return SparseFiles(model, pooled, activation, read_prompts(folder, options)[0], vocabulary)


def _checked(folder: Path, steps: list[tuple[str, Path]]) -> tuple[Path, Path]:
    """The folders of the two steps. Raises ModelSourceInvalid."""
    file, order = folder / "modules.json", [name for name, _ in steps]
    if len(order) != 2 or order[0] not in _ENCODERS or order[1] != "SpladePooling":
        raise ModelSourceInvalid(f"{file} must have a masked language model and then one SpladePooling; it has {order}")
    (name, place), (_, pooling) = steps
    if name == "Transformer":
        task = read_transformer(place).content.get("transformer_task")
        if task != "fill-mask":
            raise ModelSourceInvalid(f"{file}: its Transformer gives {task or 'hidden states'}, not fill-mask logits")
    return place, pooling
