"""Files that never end, and files that nobody writes to: refused, and not waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core import ModelSourceInvalid, Source, locate, open_file, read_file, read_header
from sie_core.config import load_config
from sie_core.errors import ConfigError

Make = Callable[[Path], object]
ODD: dict[str, Make] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_suffix(".fifo")), path.symlink_to(path.with_suffix(".fifo"))),
}


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> Make:
    return ODD[request.param]


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path, odd: Make) -> None:
    """F12: opening a FIFO waits for a writer, and /dev/zero has no end."""
    odd(tmp_path / "x")
    for read in (open_file, lambda path: read_file(path, 100)):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / "x")


def test_a_regular_file_up_to_a_limit(tmp_path: Path) -> None:
    """F12: links are followed; more than the limit is not read."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(file)
    assert read_file(tmp_path / "link", 100) == b"x" * 100
    with pytest.raises(OSError, match="larger than 99 bytes"):
        read_file(file, 99)
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path, 99)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 99)
    with socket.socket(socket.AF_UNIX) as listening, pytest.raises(OSError, match=r"[Nn]o such device|not a regular"):
        listening.bind(str(tmp_path / "socket"))
        read_file(tmp_path / "socket", 99)


def test_a_configuration_is_a_regular_file(tmp_path: Path, odd: Make) -> None:
    """F12: a FIFO as configuration blocked all reloads and the end."""
    odd(tmp_path / "sie.yaml")
    with pytest.raises(ConfigError, match=r"sie\.yaml: can't be read: not a regular file"):
        load_config(tmp_path / "sie.yaml", environ={})


def test_a_file_with_keys_is_a_regular_file(tmp_path: Path, odd: Make) -> None:
    """F12: the same for API keys."""
    odd(tmp_path / "keys")
    with pytest.raises(ConfigError, match="can't be read: not a regular file"):
        load_config(environ={"SIE_API_KEYS_FILE": str(tmp_path / "keys")})
    (tmp_path / "many").write_bytes(b"#" * 2_000_000)
    with pytest.raises(ConfigError, match="can't be read: larger than"):
        load_config(environ={"SIE_API_KEYS_FILE": str(tmp_path / "many")})


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "vocab.txt", "1_Pooling/config.json"])
def test_a_model_has_regular_files(tmp_path: Path, odd: Make, name: str) -> None:
    """F12: also those that a framework opens, which would wait for ever."""
    folder = tmp_path / "model"
    (folder / name).parent.mkdir(parents=True)
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "monitor")
    (folder / "dangling").symlink_to(tmp_path / "none")
    source = Source("path", str(folder))
    assert locate(source) == folder
    odd(folder / name)
    with pytest.raises(ModelSourceInvalid, match="is not a regular file"):
        locate(source)


def test_a_model_has_no_endless_texts(tmp_path: Path) -> None:
    """F12: a file of gigabytes (a hole, here) that a framework would read as a whole."""
    for name, refused in (("model.safetensors", False), ("tokenizer.json", True)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**10)
        source = Source("path", str(tmp_path))
        if refused:
            with pytest.raises(ModelSourceInvalid, match=r"tokenizer\.json has 10000000000 bytes"):
                locate(source)
        else:
            assert locate(source) == tmp_path


def test_weights_are_regular_files(tmp_path: Path, odd: Make) -> None:
    """F12: headers are read before anything loads."""
    odd(tmp_path / "model.safetensors")
    with pytest.raises(ModelSourceInvalid, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")
