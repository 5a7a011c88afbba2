"""What a safetensors file holds, read from its header alone: enough to say what a model takes before it is loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attrs import frozen

from sie_core.errors import ModelSourceInvalid
from sie_core.files import open_file

__all__ = ["TensorEntry", "read_header", "read_headers"]

_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6,
    "F4": 4, "C64": 64, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
_MAX_HEADER = 100 * 1024 * 1024  # the format's own limit; more means that this is not a header
_MAX_COUNT = 2**63  # of elements or bytes: checked at each step, so that a product of huge sizes is never made


@frozen
class TensorEntry:
    """One tensor: ``dtype`` as safetensors names it (``BF16``), ``nbytes`` in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_headers(files: Iterable[Path]) -> list[TensorEntry]:
    """The tensors of all files of a checkpoint. Raises ModelSourceInvalid."""
    return [entry for file in files for entry in read_header(file)]


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file, in the header's order; the weights themselves are not read.

    Raises:
        ModelSourceInvalid: the file can't be read, is no safetensors file, its header is damaged or larger than the
            format allows (100 MiB), its tensors do not fill it without gaps, or it is not as long as the header says.
            A dtype that is not known here is no error: the size that the header gives for it is taken.
    """
    try:
        size = file.stat().st_size
        with open_file(file) as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ModelSourceInvalid(f"{file} is no safetensors file, or is truncated ({size} bytes)")
            entries, end = _entries(json.loads(str(stream.read(length), "utf-8")))
    except OSError as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelSourceInvalid(f"{file} has a damaged header: {error!r}") from error
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise ModelSourceInvalid(f"{file} is {what}: {size} bytes where its header promises {expected}")
    return entries


def _entries(header: Any) -> tuple[list[TensorEntry], int]:
    """The tensors, and where the last of them ends."""
    if not isinstance(header, dict):
        raise TypeError("it is no object")
    placed = [_entry(name, about) for name, about in header.items() if name != "__metadata__"]
    end = 0
    for start, entry in sorted(placed, key=lambda one: (one[0], one[1].nbytes)):
        if start != end:
            raise ValueError(f"tensor {entry.name!r} does not begin where the one before ends")
        end += entry.nbytes
    return [entry for _, entry in placed], end


def _entry(name: str, about: Any) -> tuple[int, TensorEntry]:
    """Where a tensor begins, and the tensor."""
    if not isinstance(about, dict):
        raise TypeError(f"tensor {name!r} is no object")
    dtype, shape = about["dtype"], _counts(about["shape"])
    start, stop = _counts(about["data_offsets"])
    elements = 1
    for count in shape:
        elements *= count
        if elements >= _MAX_COUNT:
            raise ValueError(f"tensor {name!r} is too large")
    if not isinstance(dtype, str) or stop < start:
        raise ValueError(f"tensor {name!r} has no dtype or no place")
    if dtype in _ITEM_BITS and (stop - start) * 8 != elements * _ITEM_BITS[dtype]:
        raise ValueError(f"tensor {name!r} does not fill its place")
    return start, TensorEntry(name, dtype, shape, stop - start)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(one) is int and 0 <= one < _MAX_COUNT for one in values):
        raise ValueError("sizes and offsets are lists of whole numbers")
    return tuple(values)
