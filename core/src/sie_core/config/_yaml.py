"""YAML files as values with places.

PyYAML's ``load`` takes duplicate keys silently and makes numbers of ``12:30:00``; its node tree keeps what was written
and where. So the tree is read here, and scalars are taken more narrowly than YAML 1.1 does.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

from sie_core.config._value import Report, Value, Where, shorten
from sie_core.files import read_file

_MAX_FILE = 16 * 1024**2
_MAX_VALUES = 250_000
_MAX_DEPTH = 100
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]{0,39})")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*)?\.?[0-9_]*([eE][-+]?[0-9]{1,4})?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE)
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,4}")


class _Unreadable(Exception):
    """The file is no configuration at all; ends the reading."""

    def __init__(self, message: str, where: Where | None = None) -> None:
        super().__init__(message)
        self.where = where or Where()


def read_yaml(path: Path, report: Report, *, least: str = "`models:` with a list") -> Value | None:
    """The file's only document, or ``None`` with the reason reported. ``least``: what an empty file lacks."""
    try:
        return _Tree(report).value(_compose(_text(path), least))
    except _Unreadable as exc:
        report.add(exc.where, str(exc))
        return None


def _text(path: Path) -> str:
    try:
        raw = read_file(path, _MAX_FILE)
    except FileNotFoundError:
        raise _Unreadable("there is no such file") from None
    except IsADirectoryError:
        raise _Unreadable("this is a folder, and a configuration is a file") from None
    except OSError as exc:
        if exc.errno == errno.EFBIG:
            raise _Unreadable(f"is larger than {_MAX_FILE // 1024**2} MiB, which no configuration is") from None
        raise _Unreadable(f"can't be read: {exc.strerror or exc}") from exc
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        before = raw[: exc.start].decode("utf-8-sig", "replace")
        raise _Unreadable(f"byte {raw[exc.start]:#04x} is not UTF-8: save the file as UTF-8", _after(before)) from exc


def _compose(text: str, least: str) -> Any:
    # Imported here: whoever has no file to read doesn't pay for it.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(text, loader)
    except yaml.reader.ReaderError as exc:
        code = exc.character if isinstance(exc.character, int) else ord(exc.character)
        message = f"the character {code:#06x} is not allowed in YAML"
        raise _Unreadable(message, _after(text[: exc.position])) from exc
    except yaml.MarkedYAMLError as exc:
        raise _Unreadable(_explain(exc), _at(exc.problem_mark or exc.context_mark)) from exc
    except RecursionError as exc:
        raise _Unreadable("is nested too deeply") from exc
    if node is None:
        raise _Unreadable(f"the file is empty: it needs at least {least}", Where("", 1, 1))
    return node


def _after(text: str) -> Where:
    """The place just behind ``text``."""
    return Where("", text.count("\n") + 1, len(text) - text.rfind("\n"))


def _explain(exc: Any) -> str:
    problem = str(exc.problem or exc.context or "can't be read as YAML")
    if "found another document" in problem:
        return "a second document starts here (---): a configuration is one document"
    if "cannot start any token" in problem:
        mark = exc.problem_mark
        return f"not valid YAML: {problem} (is line {mark.line + 1} indented with a tab? YAML wants blanks)"
    if "undefined alias" in problem:
        return "not valid YAML: this alias (*name) has no anchor (&name) before it"
    context = f" {exc.context}" if exc.context and exc.problem else ""
    return f"not valid YAML: {problem}{context}"


def _at(mark: Any) -> Where:
    return Where("", mark.line + 1, mark.column + 1)


class _Tree:
    """Turns nodes into values. A node that aliases share becomes one shared value, counted as often as it is used."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.done: dict[int, tuple[Value, int]] = {}
        self.open: set[int] = set()

    def value(self, node: Any) -> Value:
        return self._value(node, "")[0]

    def _value(self, node: Any, path: str) -> tuple[Value, int]:
        known = self.done.get(id(node))
        if known is not None:
            return known
        if id(node) in self.open:
            raise _Unreadable("this alias contains itself", _at(node.start_mark))
        if len(self.open) >= _MAX_DEPTH:
            raise _Unreadable(f"is nested more than {_MAX_DEPTH} levels deep", _at(node.start_mark))
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if node.id == "scalar":
            made = (scalar(node, line, column), 1)
        else:
            self.open.add(id(node))
            read = self._list if node.id == "sequence" else self._map
            made = read(node, line, column, path)
            self.open.discard(id(node))
            if made[1] > _MAX_VALUES:
                message = f"holds more than {_MAX_VALUES} values once its aliases are followed"
                raise _Unreadable(message, _at(node.start_mark))
        self.done[id(node)] = made
        return made

    def _list(self, node: Any, line: int, column: int, path: str) -> tuple[Value, int]:
        if node.tag != _TAG + "seq":
            return Value("odd", None, line, column, f"the YAML tag {node.tag!r}, which means nothing here"), 1
        items, count = [], 1
        for index, child in enumerate(node.value):
            item, size = self._value(child, f"{path}[{index}]")
            items.append(item)
            count += size
        return Value("list", items, line, column), count

    def _map(self, node: Any, line: int, column: int, path: str) -> tuple[Value, int]:
        if node.tag != _TAG + "map":
            return Value("odd", None, line, column, f"the YAML tag {node.tag!r}, which means nothing here"), 1
        found: dict[str, Value] = {}
        keys: dict[str, tuple[int | None, int | None]] = {}
        merged: list[Value] = []
        count = 1
        for key_node, child in node.value:
            mark = key_node.start_mark
            where = Where(path, mark.line + 1, mark.column + 1)
            if key_node.tag == _TAG + "merge":
                value, size = self._value(child, f"{path}.<<")
                merged += self._merged(value, where)
                count += size
                continue
            name = self._key(key_node, where)
            below = f"{path}.{name}" if path else str(name)
            value, size = self._value(child, below)
            count += size
            if name is None:
                continue
            if name in found:
                where.path = below
                self.report.add(where, f"the key {name!r} stands here twice (first in line {keys[name][0]})")
                continue
            found[name] = value
            keys[name] = (where.line, where.column)
        for mapping in merged:  # a key of its own wins over a merged one, an earlier merge over a later
            for name, value in mapping.data.items():
                if name not in found:
                    found[name] = value
                    keys[name] = mapping.keys[name]
        return Value("mapping", found, line, column, keys=keys), count

    def _key(self, node: Any, where: Where) -> str | None:
        if node.id != "scalar":
            self.report.add(where, "a key must be text, and this is a list or a mapping")
            return None
        if node.tag == _TAG + "str":
            return str(node.value)
        key = scalar(node, 0, 0)
        hint = "" if key.kind == "odd" else ": put it in quotes"  # what is odd says so itself
        self.report.add(where, f"a key must be text, and this is {key.describe()}{hint}")
        return None

    def _merged(self, value: Value, where: Where) -> list[Value]:
        parts = value.data if value.kind == "list" else [value]
        if any(part.kind != "mapping" for part in parts):
            self.report.add(where, "<< merges mappings: write `<<: *name` with the name of one")
            return []
        return list(parts)


def scalar(node: Any, line: int, column: int) -> Value:
    """A scalar as the value that people mean by it; what YAML 1.1 reads in a surprising way becomes ``odd``."""
    text: str = node.value
    tag = node.tag.removeprefix(_TAG)
    if tag == "str":
        # YAML 1.1 wants a dot in a number with an exponent, people don't.
        return Value("text", text, line, column, "number" if not node.style and _EXPONENT.fullmatch(text) else "")
    if tag == "null":
        return Value("null", None, line, column)
    if tag == "bool" and text.lower() in _BOOLS:
        return Value("bool", _BOOLS[text.lower()], line, column, text)
    if tag == "int" and _INT.fullmatch(text):
        return Value("int", int(text), line, column)
    if tag == "float" and _NOT_FINITE.fullmatch(text):
        return Value("float", float(text.replace(".", "", 1)), line, column)
    if tag == "float" and _FLOAT.fullmatch(text) and any(c.isdigit() for c in text):
        return Value("float", float(text.replace("_", "")), line, column)
    return Value("odd", None, line, column, _odd(tag, shorten(text)))


_BOOLS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


def _odd(tag: str, text: str) -> str:
    if tag in ("int", "float"):
        how = "sixties, as a time" if ":" in text else "octal or another base, or too large"
        return f"{text}, which YAML takes for a number ({how}): write a plain decimal number, or put it in quotes"
    if tag == "timestamp":
        return f"{text}, which YAML takes for a date: put it in quotes"
    if tag in ("merge", "value"):
        return f"{text}, which has a meaning of its own in YAML: put it in quotes"
    return f"the YAML tag {tag!r}, which means nothing here"
