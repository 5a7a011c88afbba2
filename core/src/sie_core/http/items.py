"""One item of a native request: a text, or images, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sie_core.errors import InvalidInput
from sie_core.http.checks import NOWHERE, check_fields, kind_of, text_of
from sie_core.http.images import Pictures
from sie_core.http.limits import Limits
from sie_core.types import Item

__all__ = ["ITEM_FIELDS", "item_of"]

_OTHER_INPUTS: Final = ("audio", "video", "document", "multivector")
ITEM_FIELDS: Final = ("id", "text", "images", "metadata")
"""``metadata`` is the client's own: it changes nothing, and no answer has it."""
_FIELDS: Final = (*ITEM_FIELDS, *_OTHER_INPUTS)


def item_of(
    value: Any,
    index: int | None,
    limits: Limits,
    pictures: Pictures,
    param: str = "items",
    elsewhere: Mapping[str, str] = NOWHERE,
) -> Item:
    """Check an item. ``index`` is its place in the request, ``None`` for a query.

    ``elsewhere`` says of fields of the request where they belong.

    Raises:
        InvalidInput, BodyTooLarge: with the index.
    """
    if not isinstance(value, dict):
        raise InvalidInput(
            f"an item must be an object such as {{text: ...}}, not {kind_of(value)}", index=index, param=param
        )
    check_fields(value, _FIELDS, "an item", elsewhere=elsewhere, index=index, param=param)
    identity = value.get("id")
    if identity is not None and not isinstance(identity, str):
        raise InvalidInput(f"'id' must be a string, not {kind_of(identity)}", index=index, param=param)
    metadata = value.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidInput(f"'metadata' must be an object, not {kind_of(metadata)}", index=index, param=param)
    for name in _OTHER_INPUTS:
        if value.get(name) is not None:
            raise InvalidInput(f"{name!r} is not supported as an input", index=index, param=param)
    text = value.get("text")
    images = value.get("images")
    if images is not None and images != []:
        return Item(
            text=None if text is None else text_of(text, index, limits, param),
            id=identity,
            images=pictures.read_all(images, index, param),
        )
    if text is None:
        raise InvalidInput("there is no 'text'", index=index, param=param)
    return Item(text=text_of(text, index, limits, param), id=identity)
