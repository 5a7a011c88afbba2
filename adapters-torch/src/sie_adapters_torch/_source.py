"""From a source to a folder of files on this machine. The hub client is imported only for ``hf:`` sources."""

from __future__ import annotations

import os
from pathlib import Path

from sie_core import (
    EngineStartError,
    GatedModel,
    MissingDependency,
    ModelSourceInvalid,
    ModelSourceNotFound,
    ModelSpec,
    Source,
    locate,
)

__all__ = ["find_folder"]

_WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")
_PICKLES = ("*.bin",)
_CODE = ("*.py",)
# Exports for other runtimes, several times the size of what is needed.
_SKIPPED = ("onnx/*", "openvino/*", "coreml/*", "gguf/*", "original/*", "*.onnx", "*.msgpack", "*.h5")


def find_folder(
    model: ModelSpec, *, allow_pickle: bool = False, trust_remote_code: bool = False, download: bool = True
) -> Path:
    """The folder that holds the model's files.

    ``download=False``: only look at what is already on this machine.

    Raises:
        ModelSourceNotFound, GatedModel, ModelSourceInvalid: for good.
        EngineStartError: the hub could not be reached; a later try may succeed.
    """
    if model.source is None:
        raise ModelSourceNotFound(f"model {model.name!r} has no source: give it package:, path: or hf:")
    if model.source.kind == "hf":
        wanted = (*_WANTED, *(_PICKLES if allow_pickle else ()), *(_CODE if trust_remote_code else ()))
        return _from_hub(model.source, wanted, download=download)
    folder: Path = locate(model.source)
    if not folder.is_dir():
        raise ModelSourceInvalid(f"{model.source}: {folder} is a file; name the folder that holds config.json")
    return folder


def _from_hub(source: Source, wanted: tuple[str, ...], *, download: bool) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingDependency(f"{source} needs the package huggingface-hub: {error}") from error
    try:
        return Path(
            snapshot_download(
                source.location,
                revision=source.revision,
                allow_patterns=list(wanted),
                ignore_patterns=list(_SKIPPED),
                local_files_only=not download,
            )
        )
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
    except HFValidationError as error:
        raise ModelSourceNotFound(f"{source}: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        if not download or _offline():
            raise ModelSourceNotFound(
                f"{source} is not in the local cache, and downloads are off (HF_HUB_OFFLINE)"
            ) from error
        raise EngineStartError(f"{source}: the hub could not be reached: {error}") from error
    except (OSError, errors.HfHubHTTPError) as error:
        raise EngineStartError(f"{source}: the download failed: {error}") from error


def _offline() -> bool:
    return any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in _OFFLINE)


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
