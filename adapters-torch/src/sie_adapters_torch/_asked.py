"""What a request asks of a family beyond the fields that all requests have: ``params.options`` and labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sie_core import BatchRequest, InvalidInput, RequestParams, Unsupported

__all__ = ["asked", "boolean", "chosen", "count", "no_instruction", "no_schema", "number", "one_of", "template"]

Check = Callable[[Any], Any]
"""Gives the value, or raises ValueError with what it should be."""
_MAX_TEMPLATE = 4096
_SHOWN = 80


def asked(params: RequestParams, known: Mapping[str, Check]) -> dict[str, Any]:
    """The options that a request sets, checked. Raises InvalidInput, Unsupported."""
    found = {}
    for name, value in params.options.items():
        if name not in known:
            raise Unsupported(
                f"this model has no option {_short(name)!r}; it has {', '.join(known) or 'none'}",
                supported=tuple(known), param=f"options.{_short(name)}",
            )  # fmt: skip
        if value is None:
            continue
        try:
            found[name] = known[name](value)
        except ValueError as error:
            raise InvalidInput(f"the option {name!r} must be {error}", param=f"options.{name}") from error
    return found


def _short(name: Any) -> Any:
    """A name as an error may quote it."""
    return f"{name[:_SHOWN]}…" if isinstance(name, str) and len(name) > _SHOWN else name


def one_of(values: Sequence[str]) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return value

    return check


def number(value: Any) -> float:
    """From 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1")
    return float(value)


def count(value: Any) -> int:
    """1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number of 1 or more")
    return value


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def template(place: str) -> Check:
    """A text that has the place ``place`` in it once. It is used many times over, so it is short."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > _MAX_TEMPLATE or value.count(place) != 1:
            raise ValueError(f"a text of {_MAX_TEMPLATE} characters at most, with one {place} in it")
        return value

    return check


def chosen(model: str, labels: Sequence[str], known: Sequence[str]) -> frozenset[str]:
    """Those of a model's own labels that a request names; none named: all. Raises Unsupported."""
    for label in labels:
        if label not in known:
            raise Unsupported(
                f"{model} has no label {_short(label)!r}; it has {', '.join(known)}",
                supported=tuple(known),
                param="labels",
            )
    return frozenset(labels or known)


def no_instruction(model: str, params: RequestParams) -> None:
    """Raises Unsupported for an instruction, which the model can't be given."""
    if params.instruction is not None:
        raise Unsupported(f"{model} takes no instruction", param="instruction")


def no_schema(model: str, request: BatchRequest) -> None:
    """Raises Unsupported for a schema, by which the model can't extract."""
    if request.output_schema is not None:
        raise Unsupported(f"{model} takes no output_schema", param="output_schema")
