"""From a model folder to a transformers model with every weight read from the checkpoint, or a clear refusal.

transformers fills weights that a checkpoint lacks with random numbers and says so in a log line; here that is an error.
"""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from sie_core import LoadError, MissingDependency, ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._checkpoint import read_headers
from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._torch import DTYPES, MAKING

__all__ = ["HeadKind", "checkpoint_tensors", "load_config", "load_linear", "load_model", "load_tensors", "unused"]

HeadKind = Literal["masked_lm", "sequence_classification", "token_classification"]
"""Heads that belong to a checkpoint."""
_HEADS: dict[HeadKind, tuple[str, str]] = {
    "masked_lm": ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    "sequence_classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", "AutoModelForSequenceClassification"),
    "token_classification": ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", "AutoModelForTokenClassification"),
}

# What transformers and torch stumble into over numbers and names that can't be.
_ODD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)

# Encoder-decoders of which an embedding model is the encoder half.
_ENCODER_HALF = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


def load_config(files: ModelFiles, options: LoadOptions) -> Any:
    """The model's transformers configuration. Raises LoadError."""
    from transformers import AutoConfig

    own_code = "auto_map" in files.config
    try:
        return AutoConfig.from_pretrained(
            str(files.folder), local_files_only=True, trust_remote_code=options.trust_remote_code
        )
    except (*_ODD, OSError) as error:
        if own_code and not options.trust_remote_code:
            raise UnsafeSource(
                f"{files.folder} comes with its own Python code; set trust_remote_code: true to run it"
            ) from error
        kind = files.config.get("model_type")
        raise ModelSourceInvalid(
            f"{files.folder / 'config.json'}: transformers can't use it (model_type {kind!r}): {_first_line(error)}"
        ) from error


def load_model(files: ModelFiles, options: LoadOptions, head: HeadKind | None = None) -> tuple[torch.nn.Module, Any]:
    """The encoder, or the whole model with its head, on the CPU in evaluation mode; and its configuration.

    Raises LoadError.
    """
    from transformers.utils import logging as _logging

    logging: Any = _logging
    # Progress bars and load reports are for notebooks; what matters in them is an error here.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if not files.pickled:
        read_headers(files.weights)
    config = load_config(files, options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    maker, extra = _with_head(config, files, options, head) if head else _encoder_alone(config, files, options)
    extra |= {"attn_implementation": options.attn}
    try:
        try:
            model, info = _read(maker, files, config, options, extra)
        except ValueError:
            if options.attn == "eager":
                raise
            model, info = _read(maker, files, config, options, extra | {"attn_implementation": "eager"})
    except ImportError as error:
        raise MissingDependency(f"{files.folder}: {_first_line(error)}") from error
    except torch.OutOfMemoryError:
        raise
    except (*_ODD, OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            raise
        raise ModelSourceInvalid(
            f"{files.folder}: the weights don't fit the architecture in config.json, or are damaged: "
            f"{_first_line(error)}"
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelSourceInvalid(f"{files.folder}: the pickled weights are damaged: {_first_line(error)}") from error
    _check_complete(files, info, poolers=head is not None)
    model.eval()
    model.requires_grad_(False)
    return model, config


def _with_head(config: Any, files: ModelFiles, options: LoadOptions, head: HeadKind) -> tuple[Any, dict[str, Any]]:
    from transformers.models.auto import modeling_auto

    mapping, auto = _HEADS[head]
    maker = getattr(modeling_auto, mapping).get(type(config), None)
    if isinstance(maker, tuple):
        maker = maker[0]
    if maker is None and options.trust_remote_code and auto in _own_code(files.config):
        return getattr(modeling_auto, auto), {"trust_remote_code": True}
    if maker is None or getattr(config, "is_encoder_decoder", False):
        raise ModelSourceInvalid(
            f"{files.folder}: transformers has no encoder with a head for {head.replace('_', ' ')} "
            f"for model_type {config.model_type!r}"
        )
    return maker, {}


def _encoder_alone(config: Any, files: ModelFiles, options: LoadOptions) -> tuple[Any, dict[str, Any]]:
    import transformers
    from transformers import AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if name := _ENCODER_HALF.get(config.model_type):
        return getattr(transformers, name), {}
    if _changed_decoder(files, config):
        if "AutoModel" not in _own_code(files.config):
            raise ModelSourceInvalid(
                f"{files.folder / 'config.json'} wants a {config.model_type} whose tokens see those that follow them; "
                "transformers has none, and without it the vectors would be wrong"
            )
        if not options.trust_remote_code:
            raise UnsafeSource(
                f"{files.folder} comes with its own Python code for a {config.model_type}, which may attend otherwise "
                "than that of transformers; set trust_remote_code: true to run it"
            )
        return AutoModel, {"trust_remote_code": True}
    if type(config) not in MODEL_MAPPING:
        if options.trust_remote_code:
            return AutoModel, {"trust_remote_code": True}
        raise ModelSourceInvalid(f"{files.folder}: transformers has no encoder for model_type {config.model_type!r}")
    maker = cast(Any, MODEL_MAPPING[type(config)])
    # The pooler serves next-sentence prediction; an embedding never reads it.
    has_pooler = not isinstance(maker, tuple) and "add_pooling_layer" in inspect.signature(maker).parameters
    return (AutoModel if isinstance(maker, tuple) else maker), ({"add_pooling_layer": False} if has_pooler else {})


# Decoders of transformers that know the option themselves.
_KNOW_DIRECTIONS = ("gemma3", "gemma3_text", "gemma4", "gemma4_text")


def _changed_decoder(files: ModelFiles, config: Any) -> bool:
    """Whether a decoder of transformers was made to look ahead, or into something else that only its own code knows."""
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in (
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *_KNOW_DIRECTIONS,
    ):
        return False
    said = files.config
    looks_ahead = said.get("is_causal") is False or bool(said.get("use_bidirectional_attention"))
    return looks_ahead or (type(config).__module__.startswith("transformers.") and "AutoModel" in _own_code(said))


def _own_code(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("auto_map")
    return found if isinstance(found, dict) else {}


def _read(
    maker: Any, files: ModelFiles, config: Any, options: LoadOptions, extra: dict[str, Any]
) -> tuple[torch.nn.Module, dict[str, Any]]:
    with MAKING:
        made = maker.from_pretrained(
            str(files.folder),
            config=config,
            dtype=DTYPES[options.dtype],
            use_safetensors=not files.pickled,
            local_files_only=True,
            output_loading_info=True,
            **extra,
        )
    return cast("tuple[torch.nn.Module, dict[str, Any]]", made)


_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.\d+\.")


def _check_complete(files: ModelFiles, info: dict[str, Any], *, poolers: bool) -> None:
    """Raises ModelSourceInvalid. ``poolers``: whether a pooler that the model has is read."""
    missing = sorted(str(key) for key in info.get("missing_keys") or () if poolers or not unused(str(key)))
    wrong = sorted(str(key) for key in info.get("mismatched_keys") or ())
    if missing or wrong or info.get("error_msgs"):
        names = [*missing, *wrong, *map(str, info.get("error_msgs") or ())]
        raise ModelSourceInvalid(
            f"{files.folder}: the checkpoint lacks {len(names)} of the weights that config.json calls for, "
            f"first {', '.join(names[:3])}; it is of another architecture, or incomplete"
        )
    # Heads and poolers may be left over; whole layers may not: the model would answer, and wrongly.
    left_over = sorted(str(key) for key in info.get("unexpected_keys") or () if _LAYER.search(str(key)))
    if left_over:
        raise ModelSourceInvalid(
            f"{files.folder}: config.json leaves out layers that the checkpoint has, first {', '.join(left_over[:3])}; "
            "they do not belong together"
        )


def unused(key: str) -> bool:
    """Whether a weight is a pooler's."""
    return key.startswith("pooler.") or ".pooler." in key


def load_tensors(folder: Path, names: Iterable[str], dtype: str) -> dict[str, torch.Tensor]:
    """The named tensors of a small ``model.safetensors`` beside the model. Raises ModelSourceInvalid, UnsafeSource."""
    from safetensors.torch import load_file

    file = folder / "model.safetensors"
    if not file.exists():
        if (folder / "pytorch_model.bin").exists():
            raise UnsafeSource(f"{folder} has only pickled weights; torch-dense reads a module's safetensors only")
        raise ModelSourceInvalid(f"{file} is missing")
    read_headers([file])
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelSourceInvalid(f"{file} can't be read: {_first_line(error)}") from error
    if missing := [name for name in names if name not in tensors]:
        raise ModelSourceInvalid(f"{file} lacks {', '.join(missing)}")
    return {name: tensors[name].to(DTYPES[dtype]) for name in names}


def checkpoint_tensors(files: ModelFiles, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The named tensors of the model's own checkpoint, in float32. Raises ModelSourceInvalid."""
    from safetensors import safe_open

    wanted = list(names)
    found: dict[str, torch.Tensor] = {}
    try:
        if files.pickled:  # allowed by now; nothing but tensors is made of it all the same
            for file in sorted(files.folder.glob("pytorch_model*.bin")):
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                found |= {name: content[name].clone() for name in wanted if name in content}
        for file in files.weights:
            with safe_open(file, "pt") as shard:
                found |= {name: shard.get_tensor(name) for name in wanted if name in shard.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, pickle.UnpicklingError, RuntimeError) as error:
        raise ModelSourceInvalid(f"{files.folder}: the weights can't be read: {_first_line(error)}") from error
    if missing := [name for name in wanted if name not in found]:
        raise ModelSourceInvalid(f"{files.folder}: the checkpoint lacks {', '.join(missing)}")
    return {name: tensor.float() for name, tensor in found.items()}


def load_linear(folder: Path, name: str, inputs: int, outputs: int) -> torch.nn.Linear:
    """A linear layer in float32 from a file of its own: ``name.safetensors``, else the pickle ``name.pt``.

    Raises ModelSourceInvalid.
    """
    from safetensors.torch import load_file

    file = folder / f"{name}.safetensors"
    if not file.exists():
        file = folder / f"{name}.pt"
    try:
        if file.suffix == ".pt":  # whoever is here has allowed it; nothing but tensors is made of it all the same
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        else:
            read_headers([file])
            tensors = load_file(file)
    except (SafetensorError, OSError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ModelSourceInvalid(f"{file} can't be read: {_first_line(error)}") from error
    layer = torch.nn.Linear(inputs, outputs)
    layer.requires_grad_(False)
    for part, place in layer.named_parameters():
        tensor = tensors.get(part) if isinstance(tensors, dict) else None
        if not isinstance(tensor, torch.Tensor) or tensor.shape != place.shape:
            raise ModelSourceInvalid(f"{file} has no {part} of shape {tuple(place.shape)}")
        place.copy_(tensor)
    return layer.eval()


def _first_line(error: BaseException) -> str:
    if isinstance(error, LoadError):
        return error.message
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
