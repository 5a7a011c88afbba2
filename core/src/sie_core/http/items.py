"""One item of a native request: a text, or images, or both."""

from __future__ import annotations

from typing import Any, Final

from sie_core.errors import InvalidInput
from sie_core.http.checks import kind_of, text_of
from sie_core.http.images import Pictures
from sie_core.http.limits import Limits
from sie_core.types import Item

__all__ = ["item_of"]

_OTHER_INPUTS: Final = ("audio", "video", "document", "multivector")


def item_of(value: Any, index: int | None, limits: Limits, pictures: Pictures, param: str = "items") -> Item:
    """Check an item. ``index`` is its place in the request, ``None`` for a query.

    Raises:
        InvalidInput, BodyTooLarge: with the index.
    """
    if not isinstance(value, dict):
        raise InvalidInput(
            f"an item must be an object such as {{text: ...}}, not {kind_of(value)}", index=index, param=param
        )
    identity = value.get("id")
    if identity is not None and not isinstance(identity, str):
        raise InvalidInput(f"'id' must be a string, not {kind_of(identity)}", index=index, param=param)
    for name in _OTHER_INPUTS:
        if value.get(name) is not None:
            raise InvalidInput(f"{name!r} is no input of this server", index=index, param=param)
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
