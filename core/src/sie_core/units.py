"""Byte sizes, read and written. Own code: the libraries at hand take ``8Gi`` for 8e9 bytes or refuse it."""

from __future__ import annotations

import re
from typing import Annotated

__all__ = ["ByteSize", "format_apart", "format_bytes", "parse_bytes"]

BYTES = "bytes"
ByteSize = Annotated[int, BYTES]
"""An ``int`` that counts bytes. As the type of a configuration field it takes ``8GiB`` as well as plain bytes."""

_PREFIXES = "kmgtpe"
_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
_UNITS |= {f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate(_PREFIXES)}
_UNITS |= {f"{letter}i{b}": 1024 ** (power + 1) for power, letter in enumerate(_PREFIXES) for b in ("", "b")}
_SIZE = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?) *(?P<unit>[a-zA-Z]{0,8})")
_LIMIT = 2**63
_HOW = "write a size such as 8GiB, 512MiB, 8GB (powers of ten) or plain bytes"


def parse_bytes(value: str | int) -> int:
    """Bytes from ``8GiB``, ``8Gi``, ``1.5 GiB`` (powers of two), ``8GB`` (powers of ten), ``8192`` or an int.

    A fraction of a byte is dropped. Upper and lower case are the same.

    Raises:
        ValueError: not a size, negative, 2**63 or more, or a bare ``8G``, which people read both ways.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a size: {_HOW}")
    size = value if isinstance(value, int) else _from_text(value)
    if size < 0:
        raise ValueError(f"a size can't be negative, and this is {size}")
    if size >= _LIMIT:
        raise ValueError(f"{str(value)[:40]!r} is more bytes than any machine has: {_HOW}")
    return size


def _from_text(text: str) -> int:
    stripped = text.strip()
    if not stripped:
        raise ValueError(f"the size is empty: {_HOW}")
    if stripped.startswith("-"):
        raise ValueError(f"a size can't be negative, and this is {stripped[:40]!r}")
    match = _SIZE.fullmatch(stripped)
    if match is None:
        raise ValueError(f"{stripped[:40]!r} is not a size: {_HOW}")
    number, unit = match["number"], match["unit"].lower()
    if len(unit) == 1 and unit in _PREFIXES:
        big, small = f"{number}{unit.upper()}iB", f"{number}{unit.upper()}B"
        raise ValueError(f"{stripped!r} is read both ways: write {big} (powers of two) or {small} (powers of ten)")
    factor = _UNITS.get(unit)
    if factor is None:
        raise ValueError(f"{match['unit']!r} in {stripped!r} is not a unit of size: {_HOW}")
    if factor == 1 and "." in number:
        raise ValueError(f"{stripped!r} is a fraction of a byte: {_HOW}")
    whole, _, fraction = number.partition(".")
    return int(whole + fraction) * factor // int("1" + "0" * len(fraction))


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Both as ``format_bytes`` has them, or as plain bytes where that would make different sizes look the same."""
    short = format_bytes(one), format_bytes(other)
    return short if one == other or short[0] != short[1] else (f"{one:,} bytes", f"{other:,} bytes")


def format_bytes(nbytes: int) -> str:
    """``91547238`` → ``87.3 MiB``: one decimal, powers of two. Negative sizes (a deficit) keep their sign."""
    sign, size = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    if size < 1024:
        return f"{sign}{size} B"
    power = 1
    while size / 1024**power >= 1023.95 and power < len(
        _PREFIXES
    ):  # what would round to 1024.0 is 1.0 of the next unit
        power += 1
    return f"{sign}{size / 1024**power:.1f} {_PREFIXES[power - 1].upper()}iB"
