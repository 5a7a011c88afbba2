from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sie_core import format_bytes, parse_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8Gi", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8 GiB", 8 * GIB),
        (" 8GiB ", 8 * GIB),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 1024**2),
        ("1.5GiB", 3 * GIB // 2),
        ("0.1KiB", 102),
        ("2TB", 2 * 10**12),
        ("3kb", 3000),
        ("1EiB", 2**60),
        ("123", 123),
        ("123B", 123),
        ("0", 0),
        ("9223372036854775807", 2**63 - 1),
        (0, 0),
        (34 * 1024**2, 34 * 1024**2),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("-1", "negative"),
        ("-8GiB", "negative"),
        (-1, "negative"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("1e9", "not a size"),
        ("1,024", "not a size"),
        ("1_024", "not a size"),
        ("0x10", "not a size"),
        ("+8GiB", "not a size"),
        ("8GiB 4MiB", "not a size"),
        ("GiB", "not a size"),
        ("٨GiB", "not a size"),
        ("8QiB", "not a unit"),
        ("8 parsecs", "not a unit"),
        ("1.5", "fraction of a byte"),
        ("8EiB", "more bytes"),
        (2**63, "more bytes"),
        ("9" * 5000, "not a size"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
    ],
)
def test_no_sizes(text: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_bytes(text)  # type: ignore[arg-type]


def test_a_bare_letter_is_read_both_ways_and_names_both() -> None:
    with pytest.raises(ValueError, match=r"write 8GiB .* or 8GB"):
        parse_bytes("8g")


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (91547238, "87.3 MiB"),
        (1024**2 - 1, "1.0 MiB"),
        (8 * GIB, "8.0 GiB"),
        (-3 * GIB // 2, "-1.5 GiB"),
        (2**63, "8.0 EiB"),
        (2**80, "1048576.0 EiB"),
    ],
)
def test_readable_sizes(nbytes: int, expected: str) -> None:
    assert format_bytes(nbytes) == expected


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 2**63 - 1))
def test_what_is_printed_can_be_read_again(nbytes: int) -> None:
    printed = format_bytes(nbytes)
    try:
        again = parse_bytes(printed)
    except ValueError:
        assert nbytes > 7.9 * 2**60  # rounding up reached the limit
    else:
        assert abs(again - nbytes) <= max(0.051 * again, 0)


@settings(deadline=None)  # the machine may be busy
@given(st.text(max_size=30) | st.from_regex(r"[0-9. ]{1,12}[kKmMgGiIbB]{0,3}", fullmatch=True))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ValueError as exc:
        assert str(exc)
    else:
        assert 0 <= size < 2**63
