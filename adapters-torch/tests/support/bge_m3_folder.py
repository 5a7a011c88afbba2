"""A BGE-M3 made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["save_bge_m3"]


def save_bge_m3(folder: Path, make: Any, *, dims: int = 32, pickled: bool = False) -> Path:
    """An XLM-RoBERTa with the two heads."""
    import torch
    from safetensors.torch import save_file

    make.transformer(folder, "xlm-roberta")
    make.edit_json(folder / "tokenizer_config.json", eos_token="[SEP]")
    torch.manual_seed(7)
    # The bias keeps most of the sparse weights above 0, whatever this release's random numbers are.
    for name, outputs, scale, bias in (("sparse_linear", 1, 0.1, 1.0), ("colbert_linear", dims, 0.3, 0.1)):
        tensors = {"weight": torch.randn(outputs, 32) * scale, "bias": torch.full((outputs,), bias)}
        if pickled:
            torch.save(tensors, folder / f"{name}.pt")
        else:
            save_file(tensors, folder / f"{name}.safetensors")
    return folder
