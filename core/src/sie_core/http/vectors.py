"""Vectors on the wire: the dtypes of the native dialect, and the two encodings of the OpenAI dialect."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from sie_core.errors import InvalidInput, Unsupported
from sie_core.http.wire import msgpack_array, part
from sie_core.types import EncodeOutput, Item, SparseVector

__all__ = ["Pace", "Ranges", "convert", "native_items", "not_given", "number_bytes", "openai_data"]

Ranges: TypeAlias = NDArray[np.float32]
"""float32 (2, dims): the smallest and the largest number of each dimension."""

_CHUNK: Final = 16_384
"""Numbers turned into JSON between two turns of the event loop (well under a millisecond)."""
_LARGEST_HALF: Final = 65_504.0
_SHORTEST: Final = 1e-12
"""A vector that is shorter is as good as none, and stays."""


def convert(array: NDArray[np.float32], dtype: str, ranges: Ranges | None = None) -> NDArray[Any]:
    """An array of floats in another dtype, shape (..., dims).

    ``binary`` and ``ubinary`` pack the signs of eight numbers into one byte (the first number is the highest bit), as
    int8 and uint8. ``int8`` and ``uint8`` cut each dimension's range into 256 steps where ``ranges`` says what it is,
    as sentence-transformers does. Without, ``int8`` scales each vector so that its largest number is 127, which keeps
    cosine similarity and gives up the length; ``uint8`` is the same shifted by 128.

    Raises:
        InvalidInput: ``ranges`` are for vectors of another size.
    """
    if dtype in ("float32", "float16"):
        whole: NDArray[Any] = array if dtype == "float32" else np.clip(array, -_LARGEST_HALF, _LARGEST_HALF)
        floats: NDArray[Any] = whole.astype(np.dtype(dtype).newbyteorder("<"), copy=False)
        return floats
    if dtype in ("binary", "ubinary"):
        packed = np.packbits(array > 0, axis=-1)
        return packed if dtype == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    if ranges is not None:
        return _stepped(array, dtype, ranges)
    if not array.size:
        return array.astype(dtype)
    largest = np.abs(array).max(axis=-1, keepdims=True)
    scaled = np.rint(array * (127.0 / np.where(largest > 0, largest, 1.0)))
    return scaled.astype(np.int8) if dtype == "int8" else (scaled + 128).astype(np.uint8)


def _stepped(array: NDArray[np.float32], dtype: str, ranges: Ranges) -> NDArray[Any]:
    if ranges.shape[-1] != array.shape[-1]:
        message = f"'ranges' are for {ranges.shape[-1]} dimensions, and the vectors have {array.shape[-1]}"
        raise InvalidInput(message, param="ranges")
    starts = ranges[0]
    steps = (ranges[1] - starts) / 255
    steps[steps == 0] = 1.0
    stepped: NDArray[Any] = np.clip(np.floor((array - starts) / steps), 0, 255)
    return stepped.astype(np.uint8) if dtype == "uint8" else (stepped - 128).astype(np.int8)


def number_bytes(dtype: str, *, msgpack: bool = False, as_base64: bool = False) -> float:
    """Bytes that a number of a vector takes on the wire; in JSON about."""
    if dtype == "float32" and not msgpack and not as_base64:
        return 12.0
    packed = dtype in ("binary", "ubinary")
    if msgpack or as_base64:
        size = 1 / 8 if packed else float(np.dtype(dtype).itemsize)
        return size * 4 / 3 if as_base64 else size
    if packed:
        return 4 / 8
    return 9.0 if dtype == "float16" else 4.0


async def native_items(
    items: Sequence[Item],
    outputs: Sequence[EncodeOutput],
    wanted: Sequence[str],
    dtype: str,
    *,
    msgpack: bool,
    ranges: Ranges | None = None,
    vocabulary: int | None = None,
) -> list[Any]:
    """One entry an item, in order, ready to be packed. Lets the event loop turn now and then, as ``openai_data`` does.

    ``vocabulary``: the size of sparse vectors, where it is known.

    Raises:
        Unsupported: the model did not give an output that was asked for.
        InvalidInput: ``ranges`` do not go with its vectors.
    """
    entries: list[Any] = []
    pace = Pace()
    for item, output in zip(items, outputs, strict=True):
        entry: dict[str, Any] = {} if item.id is None else {"id": item.id}
        for name in wanted:
            value = getattr(output, name)
            if value is None:
                raise not_given(name, output)
            if name == "sparse":
                entry[name] = _sparse(value, dtype, vocabulary, msgpack=msgpack)
                await pace.after(value.values.size)
            else:
                write = _dense if name == "dense" else _tokens
                entry[name] = write(value, dtype, ranges, msgpack=msgpack)
                await pace.after(value.size)
        entries.append(entry if msgpack else part(entry))
    return entries


def _dense(value: NDArray[np.float32], dtype: str, ranges: Ranges | None, *, msgpack: bool) -> dict[str, Any]:
    return {"dims": value.shape[-1], "dtype": dtype, "values": _wrap(convert(value, dtype, ranges), msgpack=msgpack)}


def _tokens(value: NDArray[np.float32], dtype: str, ranges: Ranges | None, *, msgpack: bool) -> dict[str, Any]:
    """The matrix of a multivector. Its width under sie-server's name, too."""
    count, dims = value.shape
    return {"token_dims": dims, "num_tokens": count, **_dense(value, dtype, ranges, msgpack=msgpack)}


def _sparse(value: SparseVector, dtype: str, dims: int | None, *, msgpack: bool) -> dict[str, Any]:
    """Sparse weights come as floats only: float32 where the other outputs are packed."""
    values = convert(value.values, dtype if dtype == "float16" else "float32")
    indices = value.indices.astype("<i4", copy=False)
    return {
        "dims": dims,
        "dtype": values.dtype.name,
        "indices": _wrap(indices, msgpack=msgpack),
        "values": _wrap(values, msgpack=msgpack),
    }


def _wrap(array: NDArray[Any], *, msgpack: bool) -> Any:
    return msgpack_array(array) if msgpack else np.ascontiguousarray(array)


def not_given(name: str, output: EncodeOutput) -> Unsupported:
    """The error for an output that was asked for and is not there."""
    there = [kind for kind in ("dense", "sparse", "multivector") if getattr(output, kind) is not None]
    message = f"this model gives no {name} output; it gives {', '.join(there)}"
    return Unsupported(message, supported=there, param="output_types")


class Pace:
    """Counts numbers, and yields to the event loop after every ``_CHUNK`` of them."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _CHUNK

    async def after(self, numbers: int) -> None:
        """So many numbers were written."""
        self._left -= numbers
        if self._left <= 0:
            self._left = _CHUNK
            await asyncio.sleep(0)


async def openai_data(
    outputs: Sequence[EncodeOutput], *, as_base64: bool, dtype: str = "float32", normalize: bool = False
) -> bytes:
    """The ``data`` list, serialised. Lets the event loop turn now and then: a large answer stops nobody else.

    ``normalize`` makes vectors of length 1 first.
    """
    parts: list[bytes] = []
    pace = Pace()
    for index, output in enumerate(outputs):
        vector = output.dense
        if vector is None:
            raise not_given("dense", output)
        if normalize:
            vector = vector / max(float(np.linalg.norm(vector)), _SHORTEST)
        if as_base64:
            text = base64.b64encode(np.ascontiguousarray(vector, "<f4").data)
            parts.append(b'{"object":"embedding","index":%d,"embedding":"%b"}' % (index, text))
        else:
            values = orjson.dumps(np.ascontiguousarray(convert(vector, dtype)), option=orjson.OPT_SERIALIZE_NUMPY)
            parts.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, values))
        if len(outputs) > 1:
            await pace.after(vector.size)
    return b"[" + b",".join(parts) + b"]"
