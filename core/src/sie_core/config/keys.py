"""API keys as a configuration states them: the hash of each, with a role and a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast

from attrs import field, frozen

from sie_core.config._value import Report, Where
from sie_core.files import read_file

__all__ = ["ApiKey", "parse_api_key"]

_MAX_FILE = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")


@frozen
class ApiKey:
    """``sha256``: 64 lower-case hex digits of the key's SHA-256; never shown whole."""

    role: Literal["inference", "admin"]
    name: str
    sha256: str = field(repr=lambda digest: f"'{digest[:6]}…'")

    @property
    def line(self) -> str:
        return f"{self.role}:{self.name}:{self.sha256}"


def parse_api_key(line: str) -> ApiKey:
    """Read ``role:name:sha256-of-key``.

    Raises:
        ValueError: says what is wrong without repeating the line, which may be a key in clear.
    """
    parts = line.strip().split(":")
    if len(parts) != 3:
        raise ValueError(f"an API key is written role:name:sha256-of-key, and this has {len(parts)} part(s)")
    role, name, digest = (part.strip() for part in parts)
    if role not in ("inference", "admin"):
        raise ValueError("the role of an API key (the part before the first colon) is inference or admin")
    if _NAME.fullmatch(name) is None:
        raise ValueError("the name of an API key is 1 to 64 letters, digits and . _ @ -, and no sign comes first")
    if _HASH.fullmatch(digest) is None:
        raise ValueError(
            f"the hash of API key {name!r} must be 64 hex digits, and has {len(digest)} characters: "
            "`printf %s KEY | sha256sum` makes it"
        )
    return ApiKey(cast("Literal['inference', 'admin']", role), name, digest.lower())


def read_keys_file(path: Path, report: Report) -> list[tuple[str, Where]]:
    """The lines of a key file that hold a key, with their places. Blank lines and lines that start with # are none."""
    where = Where("server.api_keys_file")
    try:
        text = read_file(path, _MAX_FILE).decode("utf-8")
    except UnicodeDecodeError:
        report.add(where, "is not a text file in UTF-8")
        return []
    except OSError as exc:
        report.add(where, f"can't be read: {exc.strerror or exc}")
        return []
    lines = [
        (line, Where("server.api_keys_file", number, 1))
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        # An empty file would open the server to everybody, which is hardly what it was made for.
        report.add(where, "holds no key: write one role:name:sha256-of-key a line, or leave the setting out")
    return lines


def check_keys(entries: Iterable[tuple[str, Where, Report]]) -> tuple[str, ...]:
    """The keys as lines, in order; malformed and repeated ones are reported."""
    names: set[str] = set()
    hashes: dict[str, str] = {}
    lines = []
    for text, where, report in entries:
        try:
            key = parse_api_key(text)
        except ValueError as exc:
            report.add(where, str(exc))
            continue
        if key.name in names:
            report.add(where, f"the API key {key.name!r} stands here twice")
        elif key.sha256 in hashes:
            report.add(where, f"the API keys {hashes[key.sha256]!r} and {key.name!r} are the same key")
        else:
            lines.append(key.line)
        names.add(key.name)
        hashes.setdefault(key.sha256, key.name)
    return tuple(lines)
