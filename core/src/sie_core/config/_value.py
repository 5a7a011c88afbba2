"""What a configuration says, before it has types: values that know where they stand.

Files, environment variables and flags all become :class:`Value` trees, so that one strict reader serves them all and
every problem can be reported with its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from sie_core.errors import ConfigProblem

Kind = Literal["null", "bool", "int", "float", "text", "list", "mapping", "odd"]

INVALID: Final[Any] = object()
"""What a reader returns for a value that it reported."""


class Value:
    """One value. ``note`` says what is peculiar about it: of an ``odd`` one what it is, of a boolean how it is written.

    ``data``: the Python value, ``list[Value]`` or ``dict[str, Value]``; ``keys`` has the line and column of every key.
    """

    __slots__ = ("column", "data", "keys", "kind", "line", "note")

    def __init__(
        self,
        kind: Kind,
        data: Any,
        line: int | None = None,
        column: int | None = None,
        note: str = "",
        keys: dict[str, tuple[int | None, int | None]] | None = None,
    ) -> None:
        self.kind = kind
        self.data = data
        self.line = line
        self.column = column
        self.note = note
        self.keys = keys if keys is not None else {}

    def describe(self) -> str:
        """The value in a sentence that starts with "found"."""
        match self.kind:
            case "null":
                return "nothing (null)"
            case "bool" if self.note and self.note.lower() not in ("true", "false"):
                return f"a boolean ({self.note} is one in YAML)"
            case "bool":
                return f"the boolean {str(self.data).lower()}"
            case "int" | "float":
                return f"the number {shorten(str(self.data))}"
            case "text":
                return f"the text {shorten(self.data)!r}"
            case "list":
                return "a list"
            case "mapping":
                return "a mapping (keys with values)"
            case _:
                return self.note


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


class Where:
    """A place in the configuration: key path, and line and column where it came from a file."""

    __slots__ = ("column", "line", "path")

    def __init__(self, path: str = "", line: int | None = None, column: int | None = None) -> None:
        self.path = path
        self.line = line
        self.column = column

    def key(self, name: str, parent: Value) -> Where:
        """The place of an entry of the mapping ``parent``; a key that is not there stands where the mapping does."""
        line, column = parent.keys.get(name) or (self.line or parent.line, self.column or parent.column)
        return Where(f"{self.path}.{name}" if self.path else name, line, column)

    def item(self, index: int, item: Value) -> Where:
        return Where(f"{self.path}[{index}]", item.line or self.line, item.column or self.column)


class Report:
    """Collects the problems of one layer (a file, a flag, a variable). ``base`` is where its relative paths start."""

    __slots__ = ("base", "file", "mismatches", "problems")

    def __init__(self, file: str, base: Path, problems: list[ConfigProblem] | None = None) -> None:
        self.file = file
        self.base = base
        self.problems: list[ConfigProblem] = [] if problems is None else problems
        self.mismatches = 0

    def add(self, where: Where, message: str) -> Any:
        self.problems.append(
            ConfigProblem(message, path=where.path, file=self.file, line=where.line, column=where.column)
        )
        return INVALID

    def mismatch(self, where: Where, expected: str, value: Value, hint: str = "") -> Any:
        """The value is of another kind than the type takes."""
        self.mismatches += 1
        return self.add(where, f"expected {expected}, found {value.describe()}" + (f"; {hint}" if hint else ""))

    def scratch(self) -> Report:
        """A report whose problems can be thrown away (a union tries its members one by one)."""
        return Report(self.file, self.base)


def suggest(word: str, known: Iterable[str]) -> str:
    """``", did you mean ...?"`` where something close is known, else nothing."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), list(by_lower), 3, 0.6)
    return f", did you mean {' or '.join(by_lower[match] for match in close)}?" if close else ""


def value_of(data: Any) -> Value:
    """A Python object (a flag that the command line has parsed, options set in code) as a value without a place."""
    match data:
        case None:
            return Value("null", None)
        case bool():
            return Value("bool", data)
        case int():
            return Value("int", int(data))
        case float():
            return Value("float", float(data))
        case str():
            return Value("text", str(data))
        case Path():
            return Value("text", str(data))
        case list() | tuple():
            return Value("list", [value_of(item) for item in data])
        case dict():
            odd = next((key for key in data if not isinstance(key, str)), None)
            if odd is not None:
                return Value("odd", None, note=f"a mapping with the key {odd!r}, which is no text")
            return Value("mapping", {key: value_of(item) for key, item in data.items()})
        case _:
            return Value("odd", None, note=f"an object of type {type(data).__name__}")


def oddities(value: Value, where: Where) -> Iterator[tuple[Value, Where]]:
    """What within the value is ``odd``, with its place."""
    if value.kind == "odd":
        yield value, where
    elif value.kind == "list":
        for index, item in enumerate(value.data):
            yield from oddities(item, where.item(index, item))
    elif value.kind == "mapping":
        for key, item in value.data.items():
            yield from oddities(item, where.key(key, value))


def plain(value: Value) -> Any:
    """The value as plain Python objects."""
    if value.kind == "list":
        return [plain(item) for item in value.data]
    if value.kind == "mapping":
        return {key: plain(item) for key, item in value.data.items()}
    return value.data
