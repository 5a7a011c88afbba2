"""What a safetensors checkpoint takes once torch has loaded it, read from its headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import sie_core
from sie_core import ModelSourceInvalid, TensorEntry

__all__ = ["DTYPE_BYTES", "read_header", "read_headers", "tensor_bytes"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_LOADABLE = frozenset(
    "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL".split()  # what a torch tensor may hold
)


def read_headers(files: Iterable[Path]) -> list[TensorEntry]:
    """The tensors of all shards. Raises ModelSourceInvalid."""
    return [entry for file in files for entry in read_header(file)]


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, all of which torch can load. Raises ModelSourceInvalid."""
    entries = sie_core.read_header(file)
    for entry in entries:
        if entry.dtype not in _LOADABLE:
            raise ModelSourceInvalid(f"{file}: tensor {entry.name!r} is {entry.dtype}, which is not loaded here")
    return entries


def tensor_bytes(entries: Iterable[TensorEntry], dtype: str, *, align: int = 64) -> int:
    """Bytes of the tensors once loaded as ``dtype``, each in a slot of a multiple of ``align`` bytes.

    Floating-point tensors are converted to ``dtype``, others stay as they are.
    """
    item_bytes = DTYPE_BYTES[dtype]
    sizes = (entry.elements * item_bytes if "F" in entry.dtype else entry.nbytes for entry in entries)
    return sum(-(-size // align) * align for size in sizes)
