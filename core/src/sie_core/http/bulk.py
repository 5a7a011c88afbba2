"""Large bodies: how much they may hold is counted before anything is made of it.

An empty list takes one byte of msgpack and sixty of memory, and a decoder gives the interpreter to nobody else while it
works. So lists, objects and values are counted first, by a walk that makes nothing and stops at the limit. Depth is the
decoders' to refuse: both do.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import numpy as np

from sie_core.errors import BodyTooLarge

__all__ = ["LARGE", "check_bulk"]

LARGE: Final = 64 * 1024
"""Bytes of a body up to which nothing that it may hold takes long or is large."""
MOST_CONTAINERS: Final = 100_000
"""Lists and objects: some for each of the items that a request may hold, and for a schema."""
BYTES_A_VALUE: Final = 8
"""A body may hold as many values as one of the largest size does that has so many bytes for each: token ids have."""

_SLICE: Final = 1 << 20
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[^"]++', re.DOTALL)
"""JSON: a string, or all up to the next one."""
_RUNS: Final = (
    (re.compile(rb"[\x00-\x7f\xc0-\xc3\xe0-\xff]++"), 1),
    (re.compile(rb"(?:[\xcc\xd0].)++", re.DOTALL), 2),
    (re.compile(rb"(?:[\xcd\xd1]..)++", re.DOTALL), 3),
    (re.compile(rb"(?:[\xca\xce\xd2]....)++", re.DOTALL), 5),
    (re.compile(rb"(?:[\xcb\xcf\xd3].{8})++", re.DOTALL), 9),
)
"""Msgpack: numbers, true, false and nil that follow on each other, all of one size."""
_LENGTHS: Final = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_EXTENSIONS: Final = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}


def check_bulk(body: bytes, body_bytes: int, *, msgpack: bool) -> None:
    """Check how much a large body holds. ``body_bytes``: how large one may be. Takes its time: not on the event loop.

    Raises:
        BodyTooLarge: it holds too many lists and objects, or too many values.
    """
    tally = _Tally(max(MOST_CONTAINERS, body_bytes // BYTES_A_VALUE))
    if msgpack:
        _walk(body, tally)
    elif any(count > most for count, most in zip(_at_most(body), (MOST_CONTAINERS, tally.most), strict=True)):
        _scan(body, tally)


class _Tally:
    """Counts, up to the limits. Raises BodyTooLarge."""

    __slots__ = ("_containers", "_values", "most")

    def __init__(self, most: int) -> None:
        self._containers = self._values = 0
        self.most = most

    def add(self, containers: int, values: int) -> None:
        self._containers += containers
        self._values += values
        if self._containers > MOST_CONTAINERS:
            message = f"the body holds more than {MOST_CONTAINERS} lists and objects: split it into several requests"
            raise BodyTooLarge(message, limit=MOST_CONTAINERS)
        if self._values > self.most:
            raise BodyTooLarge(
                f"the body holds more than {self.most} values: split it into several requests", limit=self.most
            )


def _at_most(body: bytes) -> tuple[int, int]:
    """Containers and values of a JSON text, those counted that are only letters of its strings."""
    containers = commas = 0
    letters = np.frombuffer(body, np.uint8)
    for start in range(0, len(letters), _SLICE):  # numpy lets others run meanwhile
        part = letters[start : start + _SLICE]
        containers += int(np.count_nonzero((part == 0x5B) | (part == 0x7B)))
        commas += int(np.count_nonzero(part == 0x2C))
    return containers, commas


def _scan(body: bytes, tally: _Tally) -> None:
    """The same without the letters of strings."""
    for found in _STRINGS.finditer(body):
        start, end = found.span()
        if body[start] == 0x22:
            continue
        while start < end:
            stop = min(end, start + _SLICE)
            tally.add(body.count(b"[", start, stop) + body.count(b"{", start, stop), body.count(b",", start, stop))
            start = stop


def _walk(body: bytes, tally: _Tally) -> None:
    """The heads of all values, one after the other. What is cut off or invalid is left to the decoder."""
    offset, end = 0, len(body)
    while offset < end:
        head = body[offset]
        if 0xA0 <= head < 0xC0:
            offset += head - 0x9F
            tally.add(0, 1)
        elif 0x80 <= head < 0xA0 or 0xDC <= head <= 0xDF:
            offset += 1 if head < 0xA0 else 3 if head % 2 == 0 else 5
            tally.add(1, 1)
        elif head in _LENGTHS or head in _EXTENSIONS:
            layout = _LENGTHS.get(head) or _EXTENSIONS[head]
            try:
                (length,) = struct.unpack_from(layout, body, offset + 1)
            except struct.error:
                return
            offset += 1 + struct.calcsize(layout) + length + (head in _EXTENSIONS)
            tally.add(0, 1)
        elif 0xD4 <= head <= 0xD8:
            offset += 2 + (1 << head - 0xD4)
            tally.add(0, 1)
        else:
            for pattern, size in _RUNS:
                if (run := pattern.match(body, offset, min(end, offset + _SLICE))) is not None:
                    tally.add(0, (run.end() - offset) // size)
                    offset = run.end()
                    break
            else:
                return
