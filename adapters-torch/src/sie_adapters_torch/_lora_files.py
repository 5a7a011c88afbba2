"""What the folder of a LoRA adapter says about it, read without torch and without PEFT.

The files are PEFT's: ``adapter_config.json`` and ``adapter_model.safetensors``. Anything in them that would change the
vectors and is more than LoRA layers around the model's own is refused: the model's weights are everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from sie_core import ModelSourceInvalid, ModelSourceNotFound, Source, TensorEntry, UnsafeSource, parse_source

from sie_adapters_torch._checkpoint import read_header, tensor_bytes
from sie_adapters_torch._json import read_object
from sie_adapters_torch._source import LORA_CONFIG, LORA_PICKLE, LORA_WEIGHTS, find_lora

__all__ = ["LoraFiles", "bounded_ranks", "lora_files", "only_lora"]

# Settings that are about LoRA layers, about training, or about where the adapter comes from. ``bias`` and
# ``init_lora_weights`` are looked at below. All others, those of later releases of PEFT too, are refused when set.
_UNDERSTOOD = frozenset(
    "r lora_alpha lora_dropout target_modules exclude_modules fan_in_fan_out use_rslora use_dora lora_bias "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern "
    "inference_mode task_type peft_type peft_version base_model_name_or_path revision auto_mapping "
    "bias init_lora_weights loftq_config eva_config corda_config lora_ga_config megatron_core qalora_group_size".split()
)
_BASE_UNCHANGED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to start a LoRA that leave the model's own weights as they are; others (PiSSA) train against changed ones."""


@frozen(eq=False)
class LoraFiles:
    """An adapter: its folder and ``adapter_config.json``; ``entries`` are ``None`` where the weights are pickled."""

    folder: Path
    config: Mapping[str, Any]
    entries: tuple[TensorEntry, ...] | None

    def nbytes(self, dtype: str, loaded: Callable[[str], bool], *, align: int) -> int:
        """Bytes of the tensors that are ``loaded``, by name, each in a slot of a multiple of ``align`` bytes."""
        if self.entries is not None:
            return tensor_bytes([entry for entry in self.entries if loaded(entry.name)], dtype, align=align)
        # What a pickle holds is not known without running it: its size, doubled when it may be half precision.
        return (self.folder / LORA_PICKLE).stat().st_size * (2 if dtype == "float32" else 1)


def lora_files(text: str, *, allow_pickle: bool = False) -> LoraFiles:
    """Find and read the adapter that a source (``path:``, ``package:``, ``hf:``) names.

    Raises:
        ModelSourceNotFound, ModelSourceInvalid, GatedModel, UnsafeSource, MissingDependency: for good.
        EngineStartError: the hub could not be reached; a later try may succeed.
    """
    try:
        source = parse_source(text)
    except ValueError as error:
        raise ModelSourceNotFound(str(error)) from error
    folder = find_lora(source, allow_pickle=allow_pickle)
    file = folder / LORA_CONFIG
    # What is no file (a pipe, a device) might never end.
    config = read_object(file) if file.is_file() else None
    if config is None:
        raise ModelSourceInvalid(f"{folder} holds no {LORA_CONFIG}: it is no adapter of PEFT")
    _check(file, config)
    return LoraFiles(folder, config, _entries(folder, source, allow_pickle))


def _check(file: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelSourceInvalid(f"{file} is of peft_type {kind!r}; torch-dense takes LORA")
    if config.get("bias", "none") != "none":
        raise ModelSourceInvalid(
            f"{file}: bias is {config['bias']!r}: it changes the model's own biases, not LoRA alone"
        )
    started = config.get("init_lora_weights", True)
    if started not in _BASE_UNCHANGED:
        raise ModelSourceInvalid(
            f"{file}: init_lora_weights is {started!r}: it was trained on changed weights of the model; convert it to "
            "a plain LoRA (path_initial_model_for_weight_conversion in PEFT's save_pretrained)"
        )
    if others := sorted(key for key, value in config.items() if value and key not in _UNDERSTOOD):
        raise ModelSourceInvalid(
            f"{file} sets {', '.join(others)}; torch-dense takes LoRA layers and nothing beside them"
        )


def _entries(folder: Path, source: Source, allow_pickle: bool) -> tuple[TensorEntry, ...] | None:
    weights, pickle = folder / LORA_WEIGHTS, folder / LORA_PICKLE
    if weights.is_file():
        entries = tuple(read_header(weights))
        only_lora(weights, [entry.name for entry in entries])
        if whole := [entry for entry in entries if "F" not in entry.dtype]:
            raise ModelSourceInvalid(
                f"{weights}: {whole[0].name} is of type {whole[0].dtype}; LoRA weights are floating-point numbers"
            )
        return entries
    if pickle.is_file() and allow_pickle:
        return None
    if pickle.is_file() or source.kind == "hf":  # a pickle on the hub was not even fetched
        raise UnsafeSource(
            f"{source} has no {LORA_WEIGHTS}; pickled weights ({LORA_PICKLE}) can run code when read, and are read "
            "only with allow_pickle: true"
        )
    raise ModelSourceInvalid(f"{folder} holds no {LORA_WEIGHTS}")


def only_lora(file: Path, names: list[str]) -> None:
    """Refuse weights that are the model's own: they would be written over what everybody shares."""
    if not names:
        raise ModelSourceInvalid(f"{file} holds no weights")
    if own := [name for name in names if ".lora_" not in name]:
        raise ModelSourceInvalid(f"{file} holds weights that are no LoRA layer's, first {own[0]}")


def bounded_ranks(folder: Path, settings: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The ranks among ``settings``, for weights of rank ``most`` at most.

    Layers are made as large as the settings say, before anybody compares them with the weights: a wrong number must not
    take memory that nobody booked. With a ``rank_pattern`` a larger one may be about layers that the model does not
    have; it becomes one that still fits no weights.

    Raises ModelSourceInvalid.
    """
    rank, pattern = settings.get("r"), settings.get("rank_pattern")
    if isinstance(rank, int) and rank > most and not pattern:
        raise ModelSourceInvalid(f"{folder / LORA_CONFIG} says r: {rank}, and the weights are of rank {most}")

    def bounded(value: Any) -> Any:
        return min(value, most + 1) if isinstance(value, int) else value

    found = {"r": bounded(rank)} if rank is not None else {}
    if isinstance(pattern, dict):
        found["rank_pattern"] = {key: bounded(value) for key, value in pattern.items()}
    return found
