"""How many pixels an image file claims to have, from its first bytes: decoding a small file may take gigabytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

__all__ = ["Truncated", "size_of"]

_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG's markers for the start of a frame, whatever its coding."""
_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a segment."""
_SEGMENTS: Final = 4096
"""No camera writes more before the first frame; whoever makes a file of nothing else shall not keep the server busy."""


class Truncated(Exception):
    """The file ends before it says how large the image is."""


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels; ``None`` for a format that is not known here.

    Raises:
        Truncated: the file is of a known format and ends within its header.
    """
    try:
        if data.startswith(b"\x89PNG\r\n\x1a\n"):
            return _unpack(">II", data, 16)
        if data.startswith(b"\xff\xd8"):
            return _jpeg(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _unpack("<HH", data, 6)
        if data.startswith(b"RIFF") and data[8:12] in (b"WEBP", b""):
            return _webp(data)
        if data.startswith(b"BM"):
            return _bmp(data)
        if data.startswith((b"II*\0", b"MM\0*")):
            return _tiff(data)
    except (struct.error, IndexError, ValueError):
        raise Truncated from None
    return None


def _unpack(layout: str, data: bytes, offset: int) -> tuple[int, int]:
    width, height = struct.unpack_from(layout, data, offset)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    offset = 2
    for _ in range(_SEGMENTS):
        offset = data.index(b"\xff", offset)  # Some files have bytes between their segments.
        marker = data[offset + 1]
        if marker == 0xFF:  # Padding.
            offset += 1
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, offset + 5)
            return width, height
        elif marker in _ALONE:
            offset += 2
        else:
            offset += 2 + max(2, struct.unpack_from(">H", data, offset + 2)[0])
    raise IndexError


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low = struct.unpack_from("<HBHB", data, 24)
        return (low[0] | low[1] << 16) + 1, (low[2] | low[3] << 16) + 1
    raise IndexError


def _bmp(data: bytes) -> tuple[int, int]:
    if struct.unpack_from("<I", data, 14)[0] == 12:
        return _unpack("<HH", data, 18)
    width, height = struct.unpack_from("<ii", data, 18)
    return abs(width), abs(height)  # A negative height: the rows come from the top.


def _tiff(data: bytes) -> tuple[int, int]:
    order = "<" if data.startswith(b"II") else ">"
    found = dict(_tags(data, order))
    return found.get(256, 0), found.get(257, 0)


def _tags(data: bytes, order: str) -> Iterator[tuple[int, int]]:
    """Tags of the first page that are one whole number."""
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, start)
    for place in range(count):
        at = start + 2 + 12 * place
        tag, kind = struct.unpack_from(f"{order}HH", data, at)
        if tag in (256, 257):
            yield tag, struct.unpack_from(f"{order}H" if kind == 3 else f"{order}I", data, at + 8)[0]
