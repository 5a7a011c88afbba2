"""Vectors on the wire: the dtypes of the native dialect, and the two encodings of the OpenAI dialect."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from sie_core.errors import Unsupported
from sie_core.http.wire import msgpack_array
from sie_core.types import EncodeOutput, Item, SparseVector

__all__ = ["convert", "native_items", "openai_data"]

_CHUNK: Final = 16_384
"""Numbers turned into JSON between two turns of the event loop (well under a millisecond)."""


def convert(array: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """An array of floats in another dtype, shape (..., dims).

    ``binary`` and ``ubinary`` pack the signs of eight numbers into one byte (the first number is the highest bit), as
    int8 and uint8. ``int8`` scales each vector so that its largest number is 127, which keeps cosine similarity and
    gives up the length; ``uint8`` is the same shifted by 128.
    """
    if dtype in ("float32", "float16"):
        return array.astype(np.dtype(dtype).newbyteorder("<"), copy=False)
    if dtype in ("binary", "ubinary"):
        packed = np.packbits(array > 0, axis=-1)
        return packed if dtype == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    largest = np.abs(array).max(axis=-1, keepdims=True)
    scaled = np.rint(array * (127.0 / np.where(largest > 0, largest, 1.0)))
    return scaled.astype(np.int8) if dtype == "int8" else (scaled + 128).astype(np.uint8)


async def native_items(
    items: Sequence[Item], outputs: Sequence[EncodeOutput], wanted: Sequence[str], dtype: str, *, msgpack: bool
) -> list[Any]:
    """One entry an item, in order, ready to be packed. Lets the event loop turn now and then, as ``openai_data`` does.

    Raises Unsupported when the model did not give an output that was asked for.
    """
    entries: list[Any] = []
    pace = _Pace()
    for item, output in zip(items, outputs, strict=True):
        entry: dict[str, Any] = {} if item.id is None else {"id": item.id}
        for name in wanted:
            value = getattr(output, name)
            if value is None:
                raise _not_given(name, output)
            if name == "sparse":
                entry[name] = _sparse(value, dtype, msgpack=msgpack)
                await pace.after(value.values.size)
            else:
                entry[name] = _dense(value, dtype, msgpack=msgpack)
                await pace.after(value.size)
        entries.append(entry if msgpack else orjson.Fragment(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)))
    return entries


def _dense(value: NDArray[np.float32], dtype: str, *, msgpack: bool) -> dict[str, Any]:
    """A vector, or the matrix of a multivector."""
    return {"dims": value.shape[-1], "dtype": dtype, "values": _wrap(convert(value, dtype), msgpack=msgpack)}


def _sparse(value: SparseVector, dtype: str, *, msgpack: bool) -> dict[str, Any]:
    """Sparse weights come as floats only: their indices would not survive a packed dtype."""
    values = convert(value.values, "float16" if dtype == "float16" else "float32")
    indices = value.indices.astype("<i4", copy=False)
    return {
        "dtype": values.dtype.name,
        "indices": _wrap(indices, msgpack=msgpack),
        "values": _wrap(values, msgpack=msgpack),
    }


def _wrap(array: NDArray[Any], *, msgpack: bool) -> Any:
    return msgpack_array(array) if msgpack else np.ascontiguousarray(array)


def _not_given(name: str, output: EncodeOutput) -> Unsupported:
    there = [kind for kind in ("dense", "sparse", "multivector") if getattr(output, kind) is not None]
    message = f"this model gives no {name} output; it gives {', '.join(there)}"
    return Unsupported(message, supported=there, param="output_types")


class _Pace:
    """Counts numbers, and yields to the event loop after every ``_CHUNK`` of them."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _CHUNK

    async def after(self, numbers: int) -> None:
        self._left -= numbers
        if self._left <= 0:
            self._left = _CHUNK
            await asyncio.sleep(0)


async def openai_data(outputs: Sequence[EncodeOutput], *, as_base64: bool) -> bytes:
    """The ``data`` list, serialised. Lets the event loop turn now and then: a large answer stops nobody else."""
    parts: list[bytes] = []
    pace = _Pace()
    for index, output in enumerate(outputs):
        vector = output.dense
        if vector is None:
            raise _not_given("dense", output)
        if as_base64:
            text = base64.b64encode(np.ascontiguousarray(vector, "<f4").data)
            parts.append(b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, text))
        else:
            values = orjson.dumps(np.ascontiguousarray(vector, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
            parts.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, values))
        if len(outputs) > 1:
            await pace.after(vector.size)
    return b"[" + b",".join(parts) + b"]"
