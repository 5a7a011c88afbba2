"""Strict reading: a :class:`Value` and a type give a typed object, or problems with places.

Own code rather than cattrs: cattrs turns ``"7"`` into 7 and ``"false"`` into True unless every hook is replaced, knows
no line numbers, and costs 116 ms to import, which every run of ``sie`` would pay. What is left to write is this file.

Types: ``str``, ``int``, ``float``, ``bool``, ``Path``, ``ByteSize``, ``Literal``, enums, unions with ``None`` and
others, lists, tuples, sets, ``dict[str, ...]``, attrs classes, ``Any``.
"""

from __future__ import annotations

import enum
import math
import re
import types
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

import attrs

from sie_core.config._value import INVALID, Report, Value, Where, oddities, plain, suggest
from sie_core.units import BYTES, parse_bytes

Read = Callable[[Value, Where, Report], Any]


@attrs.frozen(eq=False)
class Reader:
    """Reads one type. ``expected`` names it in a sentence."""

    expected: str
    read: Read
    exact: bool = False
    """Whether it takes a few given values only; a union tries such members first."""
    words: tuple[str, ...] = ()
    """The words among those values."""


@cache
def reader(tp: Any) -> Reader:
    """The reader for a type. Raises TypeError for a type that a configuration can't hold."""
    simple = _SIMPLE.get(tp)
    if simple is not None:
        return simple
    if isinstance(tp, NewType):
        return reader(tp.__supertype__)
    origin, args = get_origin(tp), get_args(tp)
    if origin is Annotated:
        return _BYTES if BYTES in tp.__metadata__ else reader(args[0])
    if origin is Literal:
        return _choice({value: value for value in args})
    if origin in (Union, types.UnionType):
        return _union([reader(member) for member in args])
    if origin in _SEQUENCES or tp in _SEQUENCES:
        return _sequence(origin or tp, args)
    if origin in (dict, abc.Mapping) or tp in (dict, abc.Mapping):
        return _mapping(args)
    if isinstance(tp, type) and issubclass(tp, enum.Enum):
        return _choice({member.value: member for member in tp})
    if isinstance(tp, type) and attrs.has(tp):
        return Reader("a mapping (keys with values)", AttrsReader(tp).read)
    raise TypeError(f"a configuration can't hold values of type {tp!r}")


# --- scalars ---------------------------------------------------------------------------------------


def _null(value: Value, where: Where, report: Report) -> Any:
    return None if value.kind == "null" else report.mismatch(where, "nothing (null)", value)


def _text(value: Value, where: Where, report: Report) -> Any:
    if value.kind == "text":
        return value.data
    return report.mismatch(where, "text", value, _quote(value))


def _int(value: Value, where: Where, report: Report) -> Any:
    if value.kind == "int":
        return value.data
    return report.mismatch(where, "a whole number", value, _unquote(value))


def _float(value: Value, where: Where, report: Report) -> Any:
    if value.kind not in ("int", "float") and value.note != "number":
        return report.mismatch(where, "a number", value, _unquote(value))
    number = float(value.data)
    return number if math.isfinite(number) else report.add(where, f"must be a finite number, and is {number}")


def _quote(value: Value) -> str:
    return "put it in quotes" if value.kind in ("bool", "int", "float") and value.line is not None else ""


def _unquote(value: Value) -> str:
    if value.kind != "text" or value.line is None:  # flags and variables have no quotes to remove
        return ""
    try:
        float(value.data)
    except ValueError:
        return ""
    return "remove the quotes"


def _bool(value: Value, where: Where, report: Report) -> Any:
    if value.kind == "bool":
        return value.data
    quoted = value.kind == "text" and value.line is not None
    hint = "write true or false without quotes" if quoted and value.data.lower() in ("true", "false") else ""
    return report.mismatch(where, "true or false", value, hint)


def _bytes(value: Value, where: Where, report: Report) -> Any:
    if value.kind not in ("int", "text"):
        return report.mismatch(where, "a size such as 8GiB", value)
    try:
        return parse_bytes(value.data)
    except ValueError as exc:
        return report.add(where, str(exc))


def _path(value: Value, where: Where, report: Report) -> Any:
    if value.kind != "text" or not value.data.strip() or "\0" in value.data:
        return report.mismatch(where, "a path", value)
    try:
        return report.base / Path(value.data).expanduser()
    except RuntimeError as exc:  # ~user, and there is no such user
        return report.add(where, str(exc))


def _any(value: Value, where: Where, report: Report) -> Any:
    odd = [report.add(place, f"found {item.describe()}") for item, place in oddities(value, where)]
    return INVALID if odd else plain(value)


_UNITS = {"gib": "GiB", "gb": "GB", "mib": "MiB", "mb": "MB", "bytes": "B"}
_UNIT_IN_NAME = re.compile(f"_({'|'.join(_UNITS)})$", re.IGNORECASE)
"""Amounts carry their unit here, not their names: what stood in other releases is told apart from a slip."""
_NULL = Reader("null", _null, exact=True)
_BYTES = Reader("a size such as 8GiB", _bytes)
_SIMPLE: dict[Any, Reader] = {
    str: Reader("text", _text),
    int: Reader("a whole number", _int),
    float: Reader("a number", _float),
    bool: Reader("true or false", _bool),
    Path: Reader("a path", _path),
    None: _NULL,
    type(None): _NULL,
    Any: Reader("anything", _any),
    object: Reader("anything", _any),
}


def _choice(choices: dict[Any, Any]) -> Reader:
    words = [choice for choice in choices if isinstance(choice, str)]
    expected = " or ".join(repr(c) if isinstance(c, str) else str(c) for c in choices)
    if len(choices) > 2:
        expected = "one of " + ", ".join(str(choice) for choice in choices)

    def read(value: Value, where: Where, report: Report) -> Any:
        if value.kind in ("text", "int", "bool", "float", "null"):
            for choice, result in choices.items():
                if type(choice) is type(value.data) and choice == value.data:
                    return result
        hint = _quote(value) if value.note in words else ""  # YAML makes booleans of on and off
        if value.kind == "text":
            hint = suggest(value.data, words).removeprefix(", ")
        return report.mismatch(where, expected, value, hint)

    return Reader(expected, read, exact=True, words=tuple(words))


# --- compounds -------------------------------------------------------------------------------------


def _union(members: Sequence[Reader]) -> Reader:
    # Exact members first, or "auto" would be reported as a malformed size.
    ordered = tuple(sorted(members, key=lambda member: not member.exact))
    expected = " or ".join(member.expected for member in members)
    words = [word for member in members for word in member.words]

    def read(value: Value, where: Where, report: Report) -> Any:
        closest: tuple[Reader, Report] | None = None
        for member in ordered:
            scratch = report.scratch()
            result = member.read(value, where, scratch)
            if result is not INVALID:
                return result
            if _fits_partly(scratch, where):
                closest = (member, scratch)
        near = suggest(value.data, words) if value.kind == "text" else ""
        if closest is None:
            hint = _unquote(value) if _SIMPLE[int] in members or _SIMPLE[float] in members else ""
            if _SIMPLE[str] in members or value.note in words:
                hint = _quote(value)
            return report.mismatch(where, expected, value, near.removeprefix(", ") or hint)
        others = [member.expected for member in members if member is not closest[0] and member is not _NULL]
        for problem in closest[1].problems:
            if problem.path == where.path:
                problem.message += near or (f", or {' or '.join(others)}" if others else "")
        report.problems += closest[1].problems
        return INVALID

    return Reader(expected, read)


def _fits_partly(report: Report, where: Where) -> bool:
    """Whether a member of a union was meant: it complains about the inside of the value, or not about its kind."""
    return len(report.problems) > report.mismatches or any(p.path != where.path for p in report.problems)


_SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    abc.Sequence: tuple,
}


def _sequence(origin: Any, args: tuple[Any, ...]) -> Reader:
    build = _SEQUENCES[origin]
    fixed = origin is tuple and args and args[-1] is not Ellipsis
    inner = [reader(arg) for arg in args if arg is not Ellipsis] or [reader(Any)]

    def read(value: Value, where: Where, report: Report) -> Any:
        if value.kind != "list":
            hint = f"write [{value.data}] for a list of one" if value.kind in ("text", "int", "float") else ""
            return report.mismatch(where, "a list", value, hint)
        if fixed and len(value.data) != len(inner):
            return report.add(where, f"must have {len(inner)} entries, and has {len(value.data)}")
        items = [
            inner[index if fixed else 0].read(item, where.item(index, item), report)
            for index, item in enumerate(value.data)
        ]
        return INVALID if any(item is INVALID for item in items) else build(items)

    return Reader(f"a list of {inner[0].expected}" if args and not fixed else "a list", read)


def _mapping(args: tuple[Any, ...]) -> Reader:
    if args and args[0] is not str:
        raise TypeError(f"keys of a mapping in a configuration are text, and not {args[0]!r}")
    inner = reader(args[1] if args else Any)

    def read(value: Value, where: Where, report: Report) -> Any:
        if value.kind == "null":  # a key with nothing below it
            return {}
        if value.kind != "mapping":
            return report.mismatch(where, "a mapping (keys with values)", value)
        entries = {key: inner.read(item, where.key(key, value), report) for key, item in value.data.items()}
        return INVALID if any(item is INVALID for item in entries.values()) else entries

    return Reader("a mapping (keys with values)", read)


# --- attrs classes ---------------------------------------------------------------------------------


class AttrsReader:
    """Reads a mapping into an attrs class: unknown keys refused, fields typed, validators' errors with their key."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._fields: dict[str, tuple[attrs.Attribute[Any], Reader]] | None = None

    @property
    def fields(self) -> dict[str, tuple[attrs.Attribute[Any], Reader]]:
        """By key. Worked out late, so that a class may hold itself."""
        if self._fields is None:
            hints = get_type_hints(self.cls, include_extras=True)
            self._fields = {
                str(field.alias): (field, reader(hints.get(field.name, Any)))
                for field in attrs.fields(self.cls)
                if field.init
            }
        return self._fields

    def read(self, value: Value, where: Where, report: Report) -> Any:
        values = self.read_fields(value, where, report)
        return INVALID if values is INVALID else self.build(values, value, where, report)

    def read_fields(self, value: Value, where: Where, report: Report, hint: str = "") -> Any:
        """The fields that are there, by key; ``hint`` is added to complaints about unknown keys."""
        if value.kind not in ("mapping", "null"):
            return report.mismatch(where, "a mapping (keys with values)", value)
        entries: dict[str, Value] = value.data or {}
        before = len(report.problems)
        values: dict[str, Any] = {}
        for key, item in entries.items():
            known = self.fields.get(key)
            if known is None:
                self._unknown(key, value, where, report, hint)
                continue
            result = known[1].read(item, where.key(key, value), report)
            if result is not INVALID:
                values[key] = result
        for key, (field, kind) in self.fields.items():
            if field.default is attrs.NOTHING and key not in entries:
                report.add(
                    Where(where.key(key, value).path, where.line, where.column), f"is missing; expected {kind.expected}"
                )
        if len(report.problems) > before:
            self._validate(values, value, where, report)
            return INVALID
        return values

    def _unknown(self, key: str, value: Value, where: Where, report: Report, hint: str) -> None:
        if (stem := _UNIT_IN_NAME.sub("", key)) in self.fields and stem != key:
            unit, given = key.removeprefix(stem).strip("_"), value.data[key]
            amount = given.data if given.kind in ("int", "float") else 4
            report.add(where.key(key, value), f"unknown key {key!r}: write {stem}: {amount}{_UNITS[unit.lower()]}")
            return
        close = suggest(key, self.fields)
        known = hint or ("" if close else "; there is " + (", ".join(sorted(self.fields)) or "nothing to set here"))
        report.add(where.key(key, value), f"unknown key {key!r}{close}{known}")

    def build(self, values: dict[str, Any], value: Value, where: Where, report: Report) -> Any:
        try:
            return self.cls(**values)
        except Exception as exc:  # the class is a plugin author's: whatever it raises is a problem of this mapping
            if not self._validate(values, value, where, report):
                report.add(where, explain(exc))
            return INVALID

    def _validate(self, values: dict[str, Any], value: Value, where: Where, report: Report) -> bool:
        """Ask every field's converter and validator on its own, so that all complaints come, with their keys."""
        before = len(report.problems)
        instance: Any = object.__new__(self.cls)
        present = [(key, field) for key, (field, _) in self.fields.items() if key in values]
        for key, field in present:
            with _reported(where.key(key, value), report):
                object.__setattr__(instance, field.name, _converted(field, instance, values[key]))
        for key, field in present:
            if field.validator is not None and hasattr(instance, field.name):
                with _reported(where.key(key, value), report):
                    field.validator(instance, field, getattr(instance, field.name))
        return len(report.problems) > before


def _converted(field: attrs.Attribute[Any], instance: Any, value: Any) -> Any:
    converter: Any = field.converter
    if converter is None:
        return value
    if isinstance(field.converter, attrs.Converter):
        return converter.__call__(value, instance, field)  # an attribute of the object, so no plain call
    return converter(value)


@contextmanager
def _reported(where: Where, report: Report) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as exc:
        report.add(where, explain(exc))
    except Exception:
        # It looked at a field that could not be read, which is reported already.
        return


def explain(exc: Exception) -> str:
    """What an exception says. attrs' own validators put the field, its type and the value behind the sentence."""
    text = exc.args[0] if exc.args and isinstance(exc.args[0], str) else str(exc)
    return text if isinstance(exc, ValueError | TypeError) and text else f"{type(exc).__name__}: {text}"
