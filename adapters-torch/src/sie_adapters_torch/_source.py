"""From a source to a folder of files on this machine. The hub client is imported only for ``hf:`` sources.

Three things are wanted of a source, by cost: what is on this machine already, the small files that describe the model
(with the headers of its weights, which are a few kilobytes), and all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from sie_core import (
    EngineStartError,
    GatedModel,
    LoadError,
    MissingDependency,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    Source,
    TensorEntry,
    locate,
)

__all__ = ["LORA_CONFIG", "LORA_PICKLE", "LORA_WEIGHTS", "NotCached", "Want", "find_folder", "find_lora", "hub_entries"]

Want = Literal["cached", "files", "all"]
"""``cached``: only what is on this machine; ``files``: all but the weights; ``all``."""

_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "artifact.metadata")
_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin", "sparse_linear.pt", "colbert_linear.pt")
_CODE = ("*.py",)
LORA_CONFIG, LORA_WEIGHTS, LORA_PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# Exports for other runtimes, several times the size of what is needed.
_SKIPPED = ("onnx/*", "openvino/*", "coreml/*", "gguf/*", "original/*", "*.onnx", "*.msgpack", "*.h5")


class NotCached(EngineStartError):
    """Only what is on this machine was wanted, and it would have to be fetched."""


def find_folder(
    model: ModelSpec, want: Want = "all", *, allow_pickle: bool = False, trust_remote_code: bool = False
) -> Path:
    """The folder that holds the model's files.

    Raises:
        ModelSourceNotFound, GatedModel, ModelSourceInvalid, MissingDependency: for good.
        EngineStartError: the hub could not be reached; a later try may succeed.
        NotCached: of a source on the hub where ``cached`` is wanted, and nothing else then.
    """
    if model.source is None:
        raise ModelSourceNotFound(f"model {model.name!r} has no source: give it package:, path: or hf:")
    wanted = [*_FILES, *(_CODE if trust_remote_code else ())]
    if want != "files":
        wanted += [*_WEIGHTS, *(_PICKLES if allow_pickle else ())]
    return _folder(model.source, wanted, only_cached=want == "cached")


def find_lora(source: Source, *, allow_pickle: bool = False) -> Path:
    """The folder that holds a LoRA adapter's files, all of them: they are small. Raises as ``find_folder``."""
    return _folder(source, [LORA_CONFIG, LORA_WEIGHTS, *([LORA_PICKLE] if allow_pickle else [])])


def _folder(source: Source, wanted: list[str], *, only_cached: bool = False) -> Path:
    if source.kind != "hf":
        return _on_this_machine(source)
    try:
        return _from_hub(source, wanted, only_cached=only_cached)
    except LoadError as error:
        if only_cached:
            raise NotCached(error.message) from error
        raise


def _from_hub(source: Source, wanted: list[str], *, only_cached: bool) -> Path:
    with _hub_errors(source):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=wanted,
                ignore_patterns=list(_SKIPPED),
                local_files_only=only_cached,
            )
        )


def hub_entries(source: Source) -> list[TensorEntry] | None:
    """The tensors of a model on the hub, from the headers of its weights; ``None``: it has no safetensors.

    Raises as ``find_folder``.
    """
    with _hub_errors(source):
        from huggingface_hub import errors, get_safetensors_metadata

        try:
            found = get_safetensors_metadata(source.location, revision=source.revision)
        except errors.NotASafetensorsRepoError:
            return None
        except errors.SafetensorsParsingError as error:
            raise ModelSourceInvalid(f"{source}: its weights are no safetensors files: {error}") from error
    return [
        TensorEntry(name, str(info.dtype), tuple(info.shape), info.data_offsets[1] - info.data_offsets[0])
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    ]


def _on_this_machine(source: Source) -> Path:
    folder: Path = locate(source)
    if not folder.is_dir():
        raise ModelSourceInvalid(f"{source}: {folder} is a file; name the folder that holds config.json")
    return folder


@contextmanager
def _hub_errors(source: Source) -> Iterator[None]:
    """Turn the hub client's errors into SIE's, by type."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise MissingDependency(f"{source} needs the package huggingface-hub: {error}") from error
    try:
        yield
    except errors.GatedRepoError as error:
        raise GatedModel(
            f"{source} is gated: accept its terms on the hub and set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelSourceNotFound(f"{source}: the hub has no such revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelSourceNotFound(
            f"{source}: the hub has no such model, or it is private and HF_TOKEN may not read it"
        ) from error
    except errors.HFValidationError as error:
        raise ModelSourceNotFound(f"{source}: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if _offline():
            raise ModelSourceNotFound(
                f"{source} is not in the local cache, and downloads are off (HF_HUB_OFFLINE)"
            ) from error
        raise EngineStartError(f"{source}: the hub could not be reached: {_in_line(error)}") from error
    except OSError as error:  # the client's other errors are OSErrors too: connections, status codes, a full disk
        raise EngineStartError(f"{source}: the download failed: {_in_line(error)}") from error


def _in_line(error: Exception) -> str:
    """The client's message, which may have several lines, as a part of a sentence."""
    return " ".join(str(error).split()).rstrip(".")


def _offline() -> bool:
    return any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in _OFFLINE)


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
