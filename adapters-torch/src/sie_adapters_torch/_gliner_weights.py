"""From a GLiNER model's folder to the gliner package's model, with every weight read from the checkpoint."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from safetensors import SafetensorError
from sie_core import MissingDependency, ModelSourceInvalid

from sie_adapters_torch._checkpoint import read_headers
from sie_adapters_torch._gliner_files import GlinerFiles
from sie_adapters_torch._options import GlinerOptions
from sie_adapters_torch._torch import DTYPES, MAKING

__all__ = ["load_package_model"]


def load_package_model(files: GlinerFiles, options: GlinerOptions) -> Any:
    """The package's model, on the CPU in evaluation mode. Raises LoadError."""
    try:
        from gliner import GLiNER
    except ImportError as error:
        raise MissingDependency(
            f"GLiNER models need their package: pip install 'sie-adapters-torch[gliner]' ({error})"
        ) from error
    from transformers.utils import logging as _logging

    logging: Any = _logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder, maker = files.model.folder, GLiNER
    if not files.model.pickled:
        if len(files.model.weights) != 1:
            raise ModelSourceInvalid(f"{folder}: the gliner package reads weights of one file only")
        read_headers(files.model.weights)
    try:
        with MAKING:
            whole: Any = maker.from_pretrained(
                str(folder),
                local_files_only=True,
                map_location="cpu",
                resize_token_embeddings=not files.own_labels,  # marks are not read there, and the package would warn
                dtype=None if options.dtype == "float32" else DTYPES[options.dtype],
                _attn_implementation="eager" if options.attn == "eager" else None,
            )
        _check_complete(files, whole.model)
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise MissingDependency(f"{folder}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            raise
        text = str(error).strip().splitlines()
        raise ModelSourceInvalid(
            f"{folder}: the gliner package can't load it: {type(error).__name__}: {' '.join(text[:2])}"
        ) from error
    except pickle.UnpicklingError as error:
        raise ModelSourceInvalid(f"{folder}: the pickled weights are damaged: {error}") from error
    whole.eval()
    whole.requires_grad_(False)
    return whole


def _check_complete(files: GlinerFiles, model: torch.nn.Module) -> None:
    """The package leaves weights that a checkpoint lacks as random numbers. Raises ModelSourceInvalid."""
    if files.model.pickled:
        file = files.model.folder / "pytorch_model.bin"
        there = set(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    else:
        there = {entry.name for entry in read_headers(files.model.weights)}
    read = {each.data_ptr() for name, each in model.named_parameters(remove_duplicate=False) if name in there}
    missing = sorted(name for name, each in model.named_parameters() if each.data_ptr() not in read)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    left_over = sorted(name for name in there - known if ".layer." in name or ".layers." in name)
    for what, names in (("lacks", missing), ("has, and its configuration leaves out,", left_over)):
        if names:
            raise ModelSourceInvalid(
                f"{files.model.folder}: the checkpoint {what} {len(names)} weights, first {', '.join(names[:3])}; "
                "it is of another architecture, or incomplete"
            )
