"""Checks that requests of several dialects share. Every refusal names the field and the item."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from sie_core.errors import BodyTooLarge, InvalidInput
from sie_core.http.limits import Limits

__all__ = [
    "MAX_ID",
    "check_count",
    "check_fields",
    "check_lora",
    "dimensions_of",
    "instruction_of",
    "kind_of",
    "mapping",
    "optional",
    "options_of",
    "shown",
    "text_of",
]

_SHOWN: Final = 80
_brief: Final = reprlib.Repr().repr
_MAX_NAME: Final = 256
NOWHERE: Final[Mapping[str, str]] = MappingProxyType({})
MAX_ID: Final = 2**31
"""Token ids are int32 for every engine; whether the vocabulary has them is the model's to say."""


def text_of(value: Any, index: int | None, limits: Limits, param: str) -> str:
    """A text that is there and not too large. Raises InvalidInput, BodyTooLarge."""
    if not isinstance(value, str):
        raise InvalidInput(f"a text must be a string, not {kind_of(value)}", index=index, param=param)
    if not value:
        raise InvalidInput("the text is empty", index=index, param=param)
    if len(value) * 4 > limits.item_bytes:  # Four bytes a character at most: short texts need no counting.
        size = len(value.encode())
        if size > limits.item_bytes:
            message = f"the text has {size} bytes, and {limits.item_bytes} is the most"
            raise BodyTooLarge(message, size=size, limit=limits.item_bytes, index=index)
    return value


def check_count(count: int, limits: Limits, param: str, most: int | None = None) -> None:
    """Something, and no more than ``most`` or than a request may hold. Raises InvalidInput."""
    limit = limits.items if most is None else min(most, limits.items)
    if not count:
        raise InvalidInput(f"{param!r} is empty: there is nothing to do", param=param)
    if count > limit:
        message = f"a request may hold {limit} {param} at most, and this one holds {count}: split it"
        raise InvalidInput(message, index=limit, param=param)


def dimensions_of(value: Any, param: str = "dimensions") -> int | None:
    """A size that vectors might have, or none. Raises InvalidInput."""
    if value is None:
        return None
    if type(value) is not int or not 1 <= value < MAX_ID:
        raise InvalidInput(f"{param!r} must be a whole number, 1 or more", param=param)
    return value


def options_of(value: Any, param: str = "options") -> dict[str, Any]:
    """A copy that may be taken from, empty for none. Raises InvalidInput."""
    return {} if value is None else dict(mapping(value, param))


def check_lora(value: Any) -> str | None:
    """The name of a LoRA adapter, or none. Raises InvalidInput."""
    if value is not None and (not isinstance(value, str) or not value or len(value) > _MAX_NAME):
        raise InvalidInput(f"'lora' must be the name of a LoRA adapter, not {shown(value)}", param="lora")
    return value


def instruction_of(value: Any, texts: int, limits: Limits) -> str | None:
    """An instruction that goes before each of so many texts, or none. Raises InvalidInput, BodyTooLarge."""
    found: str | None = optional(value, str, "instruction", "a string")
    if not found or len(found) * 4 * texts <= limits.item_bytes:  # as for texts
        return found
    size = len(found.encode())
    if size > limits.item_bytes:
        message = f"the instruction has {size} bytes, and {limits.item_bytes} is the most"
        raise BodyTooLarge(message, size=size, limit=limits.item_bytes)
    if size * texts > limits.body_bytes:
        message = (
            f"the instruction goes before each of {texts} texts, which makes {size * texts} bytes of it, and "
            f"{limits.body_bytes} is the most: send fewer a request"
        )
        raise BodyTooLarge(message, size=size * texts, limit=limits.body_bytes)
    return found


def optional(value: Any, kind: type, param: str, wanted: str) -> Any:
    """A value of that kind, or none. Raises InvalidInput."""
    if value is not None and not isinstance(value, kind):
        raise InvalidInput(f"{param!r} must be {wanted}, not {kind_of(value)}", param=param)
    return value


def mapping(value: Any, param: str) -> Mapping[Any, Any]:
    """An object. Raises InvalidInput."""
    if not isinstance(value, dict):
        raise InvalidInput(f"{param!r} must be an object, not {kind_of(value)}", param=param)
    return value


def check_fields(
    given: Iterable[Any],
    known: Sequence[str],
    where: str,
    *,
    elsewhere: Mapping[str, str] = NOWHERE,
    index: int | None = None,
    param: str | None = None,
) -> None:
    """Refuse what would be passed over, with where it belongs or what may have been meant.

    ``where`` is what the fields stand in, as a message quotes it; ``elsewhere`` says of fields of other places where
    these are; ``param`` is the error's, that of the unknown field itself where none is given. Raises InvalidInput.
    """
    for name in given:
        if name in known:
            continue
        named = isinstance(name, str)
        if named and name in elsewhere:
            message = f"{name!r} belongs {elsewhere[name]}, not in {where}"
        else:
            near = difflib.get_close_matches(name[:64], known, n=1) if named else []
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            message = f"Unknown field {shown(name)} in {where}; {hint}"
        raise InvalidInput(message, index=index, param=param or str(name)[:_SHOWN])


def shown(value: Any) -> str:
    """A value as an error may quote it."""
    # All of a large value would take time, and of a deep one more than Python's stack.
    text = repr(value[: _SHOWN + 1]) if isinstance(value, str | bytes) else _brief(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def kind_of(value: Any) -> str:
    """What a value is, in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
