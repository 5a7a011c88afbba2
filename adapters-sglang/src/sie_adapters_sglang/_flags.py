"""SGLang's own command line, by version, from snapshots that were read off each release's real parser."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NoReturn

from attrs import frozen

from sie_adapters_sglang._errors import BadOptions

__all__ = ["Flags", "flags_for", "supported_versions", "version_key"]

_TYPES = {"int": int, "float": float, "str": str}


def version_key(version: str) -> tuple[int, ...]:
    """Sorts releases: ``0.5.9`` < ``0.5.10`` < ``0.5.10.post1``. What is no plain release sorts before all."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?(?:\+.*)?", version)
    return tuple(int(part or 0) for part in found.groups()) if found else (-1,)


@cache
def supported_versions() -> tuple[str, ...]:
    """Versions with a snapshot, oldest first."""
    names = (entry.name for entry in (files(__package__) / "flags").iterdir())
    return tuple(sorted((name.removesuffix(".json") for name in names if name.endswith(".json")), key=version_key))


@frozen
class Flags:
    """What one version's parser takes. ``known``: by option string, what its parser says of it."""

    version: str
    known: dict[str, dict[str, Any]]

    def has(self, flag: str) -> bool:
        return flag in self.known

    def check(self, argv: Sequence[str], *, what: str = "option") -> None:
        """Parse as the engine would, without its abbreviations.

        Raises:
            BadOptions: an unknown flag (with a suggestion), a value that is missing, of another type or no choice.
        """
        for word in argv:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self.known:
                close = difflib.get_close_matches(flag, self.known, n=2, cutoff=0.6)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise BadOptions(f"SGLang {self.version} has no {what} {flag}{hint}")
        self._parser.parse_args(list(argv))

    @cached_property
    def _parser(self) -> argparse.ArgumentParser:
        parser = _Parser(self.version)
        options: dict[str, list[str]] = {}
        for name, about in self.known.items():
            options.setdefault(json.dumps(about, sort_keys=True), []).append(name)
        for text, names in options.items():
            _declare(parser, names, json.loads(text))
        return parser


def _declare(parser: argparse.ArgumentParser, names: list[str], about: dict[str, Any]) -> None:
    simple = {"true": "store_true", "false": "store_false"}
    action = about["action"]
    if action in simple:
        parser.add_argument(*names, dest=about["dest"], action=simple[action])
    elif action == "boolean":
        positive = [name for name in names if not name.startswith("--no-")]
        parser.add_argument(*positive, dest=about["dest"], action=argparse.BooleanOptionalAction)
    elif action == "const":
        parser.add_argument(*names, dest=about["dest"], action="store_const", const=True)
    else:
        parser.add_argument(
            *names,
            dest=about["dest"],
            action=action,
            type=_TYPES[about["type"]],
            nargs=about.get("nargs"),
            choices=_choices(about),
        )


def _choices(about: dict[str, Any]) -> list[Any] | None:
    listed = about.get("choices")
    return None if listed is None else [_TYPES[about["type"]](choice) for choice in listed]


class _Parser(argparse.ArgumentParser):
    def __init__(self, version: str) -> None:
        super().__init__(prog="sglang", add_help=False, allow_abbrev=False)
        self._version = version

    def error(self, message: str) -> NoReturn:
        raise BadOptions(f"SGLang {self._version} would refuse its command line: {message}")


@cache
def flags_for(version: str) -> Flags:
    """The flags of an installed version: its own snapshot, or that of the newest release before it.

    Raises:
        BadOptions: the version is older or newer than all that are supported.
    """
    supported = supported_versions()
    key = version_key(version)
    if not version_key(supported[0]) <= key <= version_key(supported[-1]):
        raise BadOptions(
            f"SGLang {version} is not supported: install one from {supported[0]} to {supported[-1]} "
            f"(tested: {', '.join(supported)})"
        )
    nearest = max((each for each in supported if version_key(each) <= key), key=version_key)
    content = json.loads((files(__package__) / "flags" / f"{nearest}.json").read_text(encoding="utf-8"))
    return Flags(version, content["flags"])
