"""Finding and reading the memory cgroups of this process, version 1 and 2, nested, in namespaces or not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from attrs import frozen

from sie_core.errors import HostMemoryError

_V1_UNLIMITED = 1 << 60
"""Version 1 has no word for "no limit": it shows the largest page-aligned number there is."""


@frozen
class Level:
    """One directory of a memory controller."""

    path: Path
    version: Literal[1, 2]

    def limit(self) -> int | None:
        """Bytes; ``None``: no limit here (or, in version 2, no memory controller at this level)."""
        if self.version == 1:
            limit = _read_number(self.path / "memory.limit_in_bytes")
            return None if limit is None or limit >= _V1_UNLIMITED else limit
        limits = [_read_number(self.path / name) for name in ("memory.max", "memory.high")]
        return min((limit for limit in limits if limit is not None), default=None)

    def usage(self) -> int:
        """Bytes charged here, page cache included."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        usage = _read_number(self.path / name)
        if usage is None:
            raise HostMemoryError(
                f"{self.path} limits this process's memory, and its usage can't be read from {name}",
                path=self.path / name,
            )
        return usage

    def reclaimable(self) -> int:
        """Bytes of page cache that the kernel gives back on demand; 0 where nobody can tell, or some are protected."""
        names = ("total_active_file", "total_inactive_file") if self.version == 1 else ("active_file", "inactive_file")
        text = _read(self.path / "memory.stat")
        if text is None:
            return 0
        if self.version == 2 and _protects(self.path):
            return 0
        figures = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return sum(_number(figures.get(name, "0"), self.path / "memory.stat") or 0 for name in names)

    def pressure(self) -> str | None:
        """The kernel's account of how long tasks here have waited for memory; ``None`` where there is none."""
        return read_pressure(self.path / "memory.pressure") if self.version == 2 else None


def read_pressure(path: Path) -> str | None:
    """The file's text; ``None`` when there is no such file, or the kernel was told not to keep count."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def find_levels(root: Path) -> Iterator[Level]:
    """The process's own cgroup and all its ancestors that can be seen, innermost first, of each version in use."""
    mounts = list(_mounts(root))
    for version, path in _own_cgroups(root).items():
        here = [(mount, mounted) for kind, mount, mounted in mounts if kind == version]
        seen = [(mount, inner) for mount, mounted in here if (inner := _inside(mount, mounted, path)) is not None]
        # Without a cgroup namespace of its own, a container may be told a path that only its host can see: what is
        # mounted is then its own cgroup.
        for mount, directory in seen or [(mount, mount) for mount, _ in here]:
            for level in (directory, *directory.parents):
                yield Level(level, version)
                if level == mount:
                    break


def _own_cgroups(root: Path) -> dict[Literal[1, 2], str]:
    """By version, the path of this process's memory cgroup, as ``/proc/self/cgroup`` has it."""
    text = _read(root / "proc/self/cgroup")
    own: dict[Literal[1, 2], str] = {}
    for line in (text or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[2] = path
        elif "memory" in controllers.split(","):
            own[1] = path
    return own


def _mounts(root: Path) -> Iterator[tuple[Literal[1, 2], Path, str]]:
    """Version, directory and mounted subtree of each hierarchy that may hold a memory controller."""
    text = _read(root / "proc/self/mountinfo")
    if text is None:
        base = root / "sys/fs/cgroup"
        if (base / "memory").is_dir():
            yield 1, base / "memory", "/"
        if (base / "cgroup.controllers").exists():
            yield 2, base, "/"
        return
    seen = set()
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(types) < 3:
            continue
        mounted, mount = _unescape(fields[3]), root / _unescape(fields[4]).lstrip("/")
        version: Literal[1, 2]
        if types[0] == "cgroup2":
            version = 2
        elif types[0] == "cgroup" and "memory" in types[2].split(","):
            version = 1
        else:
            continue
        if (version, mount) not in seen:
            seen.add((version, mount))
            yield version, mount, mounted


def _inside(mount: Path, mounted: str, path: str) -> Path | None:
    """The directory of the cgroup ``path`` under ``mount``, which shows the subtree ``mounted``."""
    top = mounted.rstrip("/")
    if ".." in path.split("/") or not (path == mounted or path.startswith(top + "/")):
        return None
    inner = mount / path[len(top) :].strip("/")
    return inner if inner.is_dir() else None


def _protects(directory: Path) -> bool:
    """Whether a cgroup below has a ``memory.min``, under which the kernel reclaims nothing.

    What a cgroup protects is bounded by what its parent does, so those right below tell it all; the tree below them
    may be that of a whole machine.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            file = Path(entry.path, "memory.min")
            text = _read(file) if entry.is_dir(follow_symlinks=False) else None
            if text is not None and _number(text, file) != 0:
                return True
    return False


def _read(path: Path) -> str | None:
    """The file's text; ``None`` when there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise HostMemoryError(f"{path} can't be read: {error.strerror or error}", path=path) from error


def _read_number(path: Path) -> int | None:
    text = _read(path)
    return None if text is None else _number(text, path)


def _number(text: str, path: Path) -> int | None:
    """Bytes; ``None`` for ``max``."""
    word = text.strip()
    if word == "max":
        return None
    if not word.isdecimal():
        raise HostMemoryError(f"{path} should hold a number of bytes and holds {word[:40]!r}", path=path)
    return int(word)


def _unescape(text: str) -> str:
    """mountinfo writes spaces and the like as three octal digits."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text
