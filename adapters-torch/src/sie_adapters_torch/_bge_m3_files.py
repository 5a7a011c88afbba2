"""What a model folder says about BGE-M3 and its kin, read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attrs import frozen
from sie_core import ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._checkpoint import read_header
from sie_adapters_torch._files import ModelFiles, Prompts, limited, read_model, read_prompts
from sie_adapters_torch._options import BgeM3Options

__all__ = ["COLBERT", "SPARSE", "BgeM3Files", "read_bge_m3"]

SPARSE, COLBERT = "sparse_linear", "colbert_linear"
"""The heads, each a file beside the model: ``weight`` and ``bias`` of a linear layer."""


@frozen(eq=False)
class BgeM3Files:
    """An encoder with two heads. ``dims``: of the vectors of tokens; ``compares``: what documents are scored by."""

    model: ModelFiles
    prompts: Prompts
    dims: int
    vocabulary: int
    compares: Literal["dense", "sparse", "multivector"]


def read_bge_m3(folder: Path, options: BgeM3Options, *, weights_needed: bool = True) -> BgeM3Files:
    """Read the folder of a BGE-M3. Raises ModelSourceInvalid, UnsafeSource."""
    model = limited(read_model(folder, options, weights_needed=weights_needed), options.max_length)
    vocabulary = model.config.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary <= 0:
        raise ModelSourceInvalid(f"{folder / 'config.json'} names no vocab_size")
    if weights_needed:
        for name in (SPARSE, COLBERT):
            _check_there(folder, name, options)
    dims = model.hidden_size  # what the published heads have; only safetensors tell before they are read
    file = folder / f"{COLBERT}.safetensors"
    if file.exists():
        dims = next((entry.shape[0] for entry in read_header(file) if entry.name == "weight"), dims)
    return BgeM3Files(model, read_prompts(folder, options)[0], dims, vocabulary, options.compares)


def _check_there(folder: Path, name: str, options: BgeM3Options) -> None:
    if (folder / f"{name}.safetensors").exists():
        return
    if not (folder / f"{name}.pt").exists():
        raise ModelSourceInvalid(f"{folder} has neither {name}.safetensors nor {name}.pt: it is no BGE-M3")
    if not options.allow_pickle:
        raise UnsafeSource(
            f"{folder} has its {name} as a pickle (*.pt) only: store its weight and bias as {name}.safetensors, or set "
            "allow_pickle: true"
        )
