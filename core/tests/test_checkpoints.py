"""Headers of safetensors files: what is read from whole ones, and how damaged ones are refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sie_core import ModelSourceInvalid, TensorEntry, read_header, read_headers

MATRIX = {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}
VECTOR = {"dtype": "I64", "shape": [2], "data_offsets": [24, 40]}
LIMIT = 100 * 1024 * 1024


def write(file: Path, header: Any, data: int = 0) -> Path:
    """A file with this header (bytes stay as they are) and so many bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return file


def test_tensors_are_told_in_the_order_of_the_header(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "late": VECTOR, "early": MATRIX}
    matrix, vector = TensorEntry("early", "BF16", (3, 4), 24), TensorEntry("late", "I64", (2,), 16)
    assert read_header(write(tmp_path / "a.safetensors", header, 40)) == [vector, matrix]
    assert (matrix.elements, vector.elements, TensorEntry("scalar", "F32", (), 4).elements) == (12, 2, 1)


def test_files_of_a_checkpoint_are_read_one_after_the_other(tmp_path: Path) -> None:
    first = write(tmp_path / "1.safetensors", {"a": MATRIX}, 24)
    second = write(tmp_path / "2.safetensors", {"b": MATRIX}, 24)
    assert [entry.name for entry in read_headers([second, first])] == ["b", "a"]
    first.write_bytes(b"")
    with pytest.raises(ModelSourceInvalid, match=r"1\.safetensors"):
        read_headers([second, first])


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F64", [2], 16), ("F8_E4M3", [3], 3), ("F4", [2, 4], 4), ("F6_E2M3", [4], 3), ("C64", [1], 8), ("BOOL", [0], 0)],
)
def test_dtypes_of_every_width(tmp_path: Path, dtype: str, shape: list[int], nbytes: int) -> None:
    about = {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}
    assert read_header(write(tmp_path / "a", {"x": about}, nbytes)) == [TensorEntry("x", dtype, tuple(shape), nbytes)]
    about["data_offsets"] = [0, nbytes + 1]
    with pytest.raises(ModelSourceInvalid, match="does not fill its place"):
        read_header(write(tmp_path / "a", {"x": about}, nbytes + 1))


def test_a_dtype_of_tomorrow_takes_what_the_header_says(tmp_path: Path) -> None:
    about = {"dtype": "F3_X", "shape": [5], "data_offsets": [0, 2]}
    assert read_header(write(tmp_path / "a", {"x": about}, 2)) == [TensorEntry("x", "F3_X", (5,), 2)]


def test_files_without_tensors(tmp_path: Path) -> None:
    assert read_header(write(tmp_path / "a", {})) == []
    assert read_header(write(tmp_path / "b", {"__metadata__": {}})) == []
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [24, 24]}
    entries = read_header(write(tmp_path / "c", {"none": empty, "a": MATRIX}, 24))
    assert [entry.nbytes for entry in entries] == [0, 24]


@pytest.mark.parametrize("kept", [0, 7, 8, 9, 40, 100, -1])
def test_a_file_that_was_cut_is_truncated(tmp_path: Path, kept: int) -> None:
    whole = write(tmp_path / "a.safetensors", {"a": MATRIX, "b": VECTOR}, 40).read_bytes()
    file = tmp_path / "cut.safetensors"
    file.write_bytes(whole[:kept])
    with pytest.raises(ModelSourceInvalid, match=r"cut\.safetensors .*truncated"):
        read_header(file)


def test_a_file_with_more_than_its_header_says(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match="longer than its header says"):
        read_header(write(tmp_path / "a", {"a": MATRIX}, 25))


@pytest.mark.parametrize("length", [0, 1, LIMIT + 1, 2**63, 2**64 - 1])
def test_a_length_that_no_header_has_is_not_read(tmp_path: Path, length: int) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(file, LIMIT + 1024)  # sparse: as long as such a header would need
    with pytest.raises(ModelSourceInvalid, match="no safetensors file"):
        read_header(file)


DAMAGED: dict[str, Any] = {
    "no json": b"{,}",
    "no text": b'{"\xff": 1}',
    "another encoding": json.dumps({"a": MATRIX}).encode("utf-16"),
    "a list": [MATRIX],
    "nested without end": b"[" * 100_000,
    "a tensor that is a number": {"a": 1},
    "no dtype": {"a": {"shape": [3, 4], "data_offsets": [0, 24]}},
    "a dtype that is a number": {"a": {**MATRIX, "dtype": 16}},
    "no shape": {"a": {"dtype": "BF16", "data_offsets": [0, 24]}},
    "a shape that is a text": {"a": {**MATRIX, "shape": "34"}},
    "sizes below zero": {"a": {**MATRIX, "shape": [-3, -4]}},
    "sizes with a point": {"a": {**MATRIX, "shape": [3.0, 4]}},
    "sizes that are truths": {"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}},
    "one offset": {"a": {**MATRIX, "data_offsets": [24]}},
    "three offsets": {"a": {**MATRIX, "data_offsets": [0, 24, 40]}},
    "an end before the beginning": {"a": {**MATRIX, "data_offsets": [24, 0]}},
    "a shape that is too small": {"a": {**MATRIX, "shape": [3, 3]}},
    "a gap before": {"a": {**MATRIX, "data_offsets": [16, 40]}},
    "a gap between": {"a": MATRIX, "b": {**VECTOR, "data_offsets": [32, 48]}},
    "two in one place": {"a": MATRIX, "b": MATRIX},
    "one name twice": b'{"a": %b, "a": %b}' % (json.dumps(MATRIX).encode(), json.dumps(VECTOR).encode()),
    "a product that overflows": {"a": {**MATRIX, "shape": [2**40, 2**40, 0]}},
    "many huge sizes": {"a": {"dtype": "F3_X", "shape": [2**62] * 100_000, "data_offsets": [0, 24]}},
    "a number without end": b'{"a": {"dtype": "F3_X", "shape": [%b], "data_offsets": [0, 24]}}' % (b"9" * 10_000),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused_and_its_file_named(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "model.safetensors", DAMAGED[name], 40)
    with pytest.raises(ModelSourceInvalid, match=r"model\.safetensors has a damaged header") as caught:
        read_header(file)
    assert caught.value.permanent
    assert len(caught.value.message) < 1000


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceInvalid, match="can't be read: Is a directory"):
        read_header(tmp_path)
    with pytest.raises(ModelSourceInvalid, match="can't be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


def test_it_needs_no_engine() -> None:
    code = "import sie_core, sys; sie_core.read_header; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
