"""Where models come from: the text of a source, and the folder that it stands for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sie_core.errors import ModelSourceInvalid, ModelSourceNotFound
from sie_core.types import Source

__all__ = ["appearance", "locate", "parse_source"]

_HOW = "write package:IMPORT_NAME/SUBPATH, path:DIR or hf:ORG/NAME@REVISION"
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}", re.ASCII)

_TEXTS = (".json", ".jsonl", ".txt", ".jinja", ".model", ".py", ".tiktoken", ".vocab")
_MOST_TEXT = 512 * 1024 * 1024
"""Bytes of a file that a framework reads as a whole."""
_MOST_INSIDE = 1000


def parse_source(text: str, base: Path | None = None) -> Source:
    """Read ``package:IMPORT_NAME/SUBPATH``, ``path:DIR`` or ``hf:ORG/NAME@REVISION``.

    ``base`` is the folder from which a relative ``path:`` starts; nothing is looked up.

    Raises:
        ValueError: the text is none of these; says how to write it.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("package", "path", "hf"):
        raise ValueError(f"{text!r} is not a model source: {_guess(text)}")
    if not rest or rest != rest.strip() or not rest.isprintable():
        raise ValueError(f"{text!r} is not a model source: what follows {kind}: is empty or has blanks; {_HOW}")
    if kind == "package":
        return _package(text, rest)
    if kind == "path":
        return Source("path", rest, base=base)
    return _hub(text, rest)


def _package(text: str, rest: str) -> Source:
    name, _, subpath = rest.partition("/")
    if _PACKAGE.fullmatch(name) is None:
        raise ValueError(f"{name!r} in {text!r} can't be the name of a Python package (as in `import NAME`)")
    if "\\" in subpath or ".." in PurePosixPath(subpath).parts or subpath.startswith("/"):
        raise ValueError(f"{text!r} would leave its package: name a folder inside it")
    return Source("package", rest.rstrip("/"))


def _hub(text: str, rest: str) -> Source:
    name, at, revision = rest.partition("@")
    if _HUB_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} in {text!r} can't be the name of a model on the hub: write hf:ORG/NAME")
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ValueError(f"{revision!r} in {text!r} can't be a revision: write a branch, a tag or a commit after the @")
    return Source("hf", name, revision=revision or None)


def _guess(text: str) -> str:
    """What was probably meant, when a source has no known kind before its colon."""
    kind, colon, rest = text.partition(":")
    if colon and kind.lower() in ("package", "path", "hf"):
        return f"did you mean {kind.lower()}:{rest}?"
    if text.startswith(("/", "./", "../", "~")):
        return f"did you mean path:{text}?"
    if kind in ("http", "https"):
        return f"sources are no addresses; {_HOW}"
    if not colon and _HUB_NAME.fullmatch(text.partition("@")[0]) and "/" in text:
        return f"did you mean hf:{text} (from the hub) or path:{text} (a folder)?"
    return _HOW


def locate(source: Source) -> Path:
    """The folder with the model's files, for ``package:`` and ``path:`` sources. No package is imported for it.

    Raises:
        ModelSourceNotFound: there is no such folder or package; says how to get it. Always raised for ``hf:``, which is
            the adapter's business.
        ModelSourceInvalid: there is something, and it is not a folder, or may not be looked at; or a file in it is a
            FIFO, a socket or a device, or far larger than files of its kind are.
    """
    if source.kind == "package":
        return _checked(_locate_package(source), source)
    if source.kind == "path":
        return _checked(_locate_path(source), source)
    raise ModelSourceNotFound(f"{source} has no folder on this machine of its own: the adapter fetches it from the hub")


def _checked(folder: Path, source: Source) -> Path:
    """The folder, if its files can be read to their end: frameworks open them without asking what they are."""
    for path in _paths(folder, source):
        try:
            found = path.stat()
        except OSError:  # a link to nowhere: whoever needs the file says so
            continue
        name = str(path)
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise ModelSourceInvalid(f"{source}: {name} is not a regular file")
        if found.st_size > _MOST_TEXT and stat.S_ISREG(found.st_mode) and name.endswith(_TEXTS):
            raise ModelSourceInvalid(
                f"{source}: {name} has {found.st_size} bytes; the limit for such a file is {_MOST_TEXT}"
            )
    return folder


def _paths(folder: Path, source: Source) -> Iterator[Path]:
    """What is in a folder and right below it, hidden names left out."""
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as exc:
        raise ModelSourceInvalid(f"{source}: {folder} can't be looked at: {exc.strerror or exc}") from exc
    for path in paths:
        yield path
        with contextlib.suppress(OSError):  # no folder, or one that is not for us
            yield from sorted(path.iterdir())[:_MOST_INSIDE]


def appearance(text: str) -> tuple[tuple[str, int, int, int], ...]:
    """Name, size in bytes, time of change in ns and inode of each file right in a source's folder. Blocking.

    It differs once one of them was written anew. Empty for ``hf:``, and where there is no such folder.
    """
    try:
        with os.scandir(locate(parse_source(text))) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except (ValueError, ModelSourceNotFound, ModelSourceInvalid, OSError):
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in found))


def _locate_path(source: Source) -> Path:
    try:
        folder = Path(source.location).expanduser()
    except RuntimeError as exc:  # ~user, and there is no such user
        raise ModelSourceNotFound(f"{source}: {exc}") from exc
    if source.base is not None:
        folder = source.base / folder
    folder = folder.absolute()
    if _is_folder(folder, source):
        return folder
    start = "" if Path(source.location).is_absolute() or source.base is None else f" (relative to {source.base})"
    raise ModelSourceNotFound(f"{source}: there is no folder {folder}{start}")


def _locate_package(source: Source) -> Path:
    name, _, subpath = source.location.partition("/")
    top, *inner = name.split(".")
    relative = PurePosixPath(*inner, subpath)
    if ".." in relative.parts or relative.is_absolute():
        raise ModelSourceInvalid(f"{source} would leave its package")
    try:
        # Only the top package: finding an inner one would import what stands above it.
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError) as exc:
        raise ModelSourceNotFound(f"{source}: the package {top!r} can't be found: {exc}") from exc
    if spec is None:
        distribution = top.replace("_", "-")
        raise ModelSourceNotFound(
            f"{source}: the package {top!r} is not installed: `pip install {distribution}` (the distribution may have "
            "another name)"
        )
    roots = list(spec.submodule_search_locations or ())
    if not roots:
        raise ModelSourceInvalid(f"{source}: {top!r} is a module, and has no folder of its own")
    for root in roots:
        folder = Path(root).joinpath(relative)
        if _is_folder(folder, source):
            return folder
    raise ModelSourceNotFound(
        f"{source}: the package {top!r} is installed (in {roots[0]}) and has no folder {str(relative)!r}: "
        "another version of it may"
    )


def _is_folder(path: Path, source: Source) -> bool:
    try:
        if path.is_dir():
            return True
        exists = path.exists()
    except OSError as exc:
        raise ModelSourceInvalid(f"{source}: {path} can't be looked at: {exc.strerror or exc}") from exc
    if exists:
        raise ModelSourceInvalid(f"{source}: {path} is a file, and a model is a folder")
    return False
