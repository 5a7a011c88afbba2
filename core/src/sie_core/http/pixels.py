"""How many pixels an image file makes a decoder hold: decoding a small file may take gigabytes.

Every header that a decoder goes by is read, of every frame, as far as a walk over the file's parts finds them. What
decoders might read in two ways is refused: a second header, parts without end, sizes in unusual types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

__all__ = ["FORMATS", "Malformed", "Truncated", "size_of"]

FORMATS: Final = ("PNG", "JPEG", "GIF", "WebP", "BMP", "TIFF")
"""What can be measured."""

_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG's markers for the start of a frame, whatever its coding."""
_ODD: Final = frozenset({0x00, 0x01, 0xC8, 0xCC, *range(0xD0, 0xD8), 0xDE, *range(0xF0, 0xFE)})
"""Markers before the first scan of which decoders disagree whether a segment follows, or that they all refuse."""
_ALONE: Final = frozenset({0xD8, 0xD9})
"""Markers without a segment."""
_START_OF_SCAN: Final = 0xDA
_PARTS: Final = 65_536
"""Segments, chunks or tags of a file; only a file made to keep the server busy has more."""
_BLOCKS: Final = 4 * _PARTS
"""Blocks of a GIF, of 255 bytes in all that programs write."""
_BMP_HEADERS: Final = frozenset({40, 52, 56, 64, 108, 124})
_TIFF_SIZES: Final = ((256, 257), (322, 323))
"""Tags of width and height: those of a page, and those of its tiles, each of which a decoder holds whole."""
_TIFF_LAYOUTS: Final = {3: "H", 4: "I"}

Size = tuple[int, int]


class Truncated(Exception):
    """The file ends before it says how large the image is."""


class Malformed(Exception):
    """The file could be read in two ways. The text says why."""


def size_of(data: bytes) -> Size | None:
    """Width and height, in pixels, of the largest frame; ``None`` for a format that is not known here.

    Raises:
        Truncated: the file is of a known format and ends within its header.
        Malformed
    """
    walk = next((walk for start, walk in _WALKS if data.startswith(start)), None)
    if walk is None:
        return None
    found: Size | None = None
    try:
        for size in walk(data):
            if found is None or size[0] * size[1] > found[0] * found[1]:
                found = size
    except (struct.error, IndexError, ValueError):
        pass  # What follows a cut is never decoded.
    if found is None:
        raise Truncated
    return found


def _within(most: int) -> Iterator[None]:
    """So many steps. Raises Malformed."""
    for _ in range(most):
        yield None
    raise Malformed("it has too many parts")


def _png(data: bytes) -> Iterator[Size]:
    if data[12:16] != b"IHDR" and len(data) >= 16:
        raise Malformed("it does not begin with its header")
    yield _unpack(">II", data, 16)
    offset = 8
    for _ in _within(_PARTS):
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"IHDR" and offset > 8:
            raise Malformed("it has two headers")
        if kind == b"fcTL":  # a frame of an animation
            yield _unpack(">II", data, offset + 12)
        if kind == b"IEND":
            return
        offset += 12 + length


def _jpeg(data: bytes) -> Iterator[Size]:
    offset, found = 2, False
    for _ in _within(_PARTS):
        offset = data.index(b"\xff", offset)  # Some files have bytes between their segments.
        marker = data[offset + 1]
        if marker in _ODD:
            raise Malformed(f"the marker {marker:02X} before its first scan")
        if marker == _START_OF_SCAN and found:
            return
        if marker in _FRAMES:
            if found:
                raise Malformed("it has two headers")
            found = True
            height, width = struct.unpack_from(">HH", data, offset + 5)
            yield width, height
        if marker == 0xFF:  # Padding.
            offset += 1
        elif marker in _ALONE:
            offset += 2
        else:
            offset += 2 + max(2, struct.unpack_from(">H", data, offset + 2)[0])


def _gif(data: bytes) -> Iterator[Size]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    yield width, height
    offset = 13 + _table(flags)
    steps = _within(_BLOCKS)
    for _ in steps:
        kind = data[offset]
        if kind == 0x3B:
            return
        if kind == 0x21:
            offset += 2
        elif kind == 0x2C:
            left, top, width, height, flags = struct.unpack_from("<HHHHB", data, offset + 1)
            yield left + width, top + height
            offset += 11 + _table(flags)
        else:  # Decoders look for the next block, byte by byte.
            offset += 1
            continue
        while data[offset]:
            offset += 1 + data[offset]
            next(steps)
        offset += 1


def _table(flags: int) -> int:
    """Bytes of a colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(data: bytes) -> Iterator[Size]:
    if not b"WEBP".startswith(data[8:12]):
        raise Malformed("it is a RIFF file, and no WebP")
    offset = 12
    for _ in _within(_PARTS):
        if offset > 12 and offset >= len(data):
            return
        kind, length = struct.unpack_from("<4sI", data, offset)
        yield from _webp_chunk(data, kind, offset + 8)
        # The frames of an animation hold chunks of their own.
        offset += 8 + (16 if kind == b"ANMF" else length + length % 2)


def _webp_chunk(data: bytes, kind: bytes, at: int) -> Iterator[Size]:
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, at + 6)
        yield width & 0x3FFF, height & 0x3FFF
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, at + 1)
        yield (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8X":
        low = struct.unpack_from("<HBHB", data, at + 4)
        yield (low[0] | low[1] << 16) + 1, (low[2] | low[3] << 16) + 1
    elif kind == b"ANMF":
        low = struct.unpack_from("<HBHB", data, at + 6)
        yield (low[0] | low[1] << 16) + 1, (low[2] | low[3] << 16) + 1


def _bmp(data: bytes) -> Iterator[Size]:
    (header,) = struct.unpack_from("<I", data, 14)
    if header == 12:
        yield _unpack("<HH", data, 18)
        return
    width, height = struct.unpack_from("<II", data, 18)
    if header not in _BMP_HEADERS:
        raise Malformed(f"its header has {header} bytes")
    yield width, 2**32 - height if height >> 24 == 0xFF else height  # Negative: the rows come from the top.


def _tiff(data: bytes) -> Iterator[Size]:
    order = "<" if data.startswith(b"II") else ">"
    seen: set[int] = set()
    steps = _within(_PARTS)
    (start,) = struct.unpack_from(f"{order}I", data, 4)
    while start and start not in seen:
        seen.add(start)
        (count,) = struct.unpack_from(f"{order}H", data, start)
        found: dict[int, int] = {}
        for place in range(count):
            next(steps)
            at = start + 2 + 12 * place
            tag, kind, values = struct.unpack_from(f"{order}HHI", data, at)
            if tag not in (256, 257, 322, 323):
                continue
            if tag in found or kind not in _TIFF_LAYOUTS or values != 1:
                raise Malformed("its size is given twice, or not as one whole number")
            (found[tag],) = struct.unpack_from(order + _TIFF_LAYOUTS[kind], data, at + 8)
        if not {256, 257} <= found.keys():
            raise ValueError
        yield from ((found[wide], found[high]) for wide, high in _TIFF_SIZES if {wide, high} <= found.keys())
        (start,) = struct.unpack_from(f"{order}I", data, start + 2 + 12 * count)


def _unpack(layout: str, data: bytes, offset: int) -> Size:
    width, height = struct.unpack_from(layout, data, offset)
    return width, height


_WALKS: Final = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    ((b"GIF87a", b"GIF89a"), _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
    ((b"II*\0", b"MM\0*"), _tiff),
)
