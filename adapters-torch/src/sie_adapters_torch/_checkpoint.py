"""What a safetensors checkpoint holds, read from its headers alone."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen
from sie_core import ModelSourceInvalid

__all__ = ["DTYPE_BYTES", "TensorEntry", "read_header", "read_headers", "tensor_bytes"]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit; more means that this is not a header


@frozen
class TensorEntry:
    """One tensor: ``dtype`` as safetensors names it, ``nbytes`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def nbytes_as(self, item_bytes: int) -> int:
        """Bytes once loaded, when floating-point tensors are converted to ``item_bytes`` each."""
        return self.elements * item_bytes if "F" in self.dtype else self.nbytes


def read_headers(files: Iterable[Path]) -> list[TensorEntry]:
    """The tensors of all shards. Raises ModelSourceInvalid."""
    return [entry for file in files for entry in read_header(file)]


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, after checking that it is as long as its header says. Raises ModelSourceInvalid."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelSourceInvalid(f"{file} is no safetensors file, or is truncated ({size} bytes)")
            header = json.loads(stream.read(length))
        entries, end = _entries(header)
    except OSError as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelSourceInvalid(f"{file} has a damaged header: {error!r}") from error
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise ModelSourceInvalid(f"{file} is {what}: {size} bytes where its header promises {expected}")
    return entries


def _entries(header: dict[str, dict[str, object]]) -> tuple[list[TensorEntry], int]:
    entries, end = [], 0
    for name, about in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = str(about["dtype"]), tuple(int(n) for n in about["shape"])  # type: ignore[attr-defined]
        start, stop = (int(n) for n in about["data_offsets"])  # type: ignore[attr-defined]
        if dtype not in _ITEM_BYTES or stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise ValueError(f"tensor {name!r} does not fill its place")
        entries.append(TensorEntry(name, dtype, shape, stop - start))
        end = max(end, stop)
    return entries, end


def tensor_bytes(entries: Iterable[TensorEntry], dtype: str, *, align: int = 64) -> int:
    """Bytes of the tensors once loaded as ``dtype``, each in a slot of a multiple of ``align`` bytes."""
    item_bytes = DTYPE_BYTES[dtype]
    return sum(-(-entry.nbytes_as(item_bytes) // align) * align for entry in entries)
