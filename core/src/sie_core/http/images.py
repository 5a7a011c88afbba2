"""Images in requests: bytes, base64, data URLs and, where the configuration allows it, addresses to fetch.

Nothing is decoded here: that is the adapter's. What an image costs to decode is read from its header.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from sie_core.errors import BodyTooLarge, InvalidInput
from sie_core.http.checks import check_fields, kind_of
from sie_core.http.limits import Limits
from sie_core.http.pixels import FORMATS, Malformed, Truncated, size_of
from sie_core.types import Item

if TYPE_CHECKING:
    from sie_core.http.remote import RemoteImages

__all__ = ["Pictures"]

_WANTED: Final = (
    "an image must be {data: bytes, format: ...}, in JSON with the bytes as base64, or a data URL such as "
    "data:image/png;base64,..."
)
_MEDIA: Final = frozenset({"image_url", "video_url", "audio_url", "input_image", "image", "video", "audio"})
"""What a part of a message may name by an address."""
_SOURCES: Final = ("data", "url", "image_url")
_FIELDS: Final = (*_SOURCES, "format", "type")
_SUM: Final = 8
"""The images of a request may have so many times the pixels of the largest one together."""
_AT_A_TIME: Final = 4
"""Images of a request that are fetched side by side."""


@frozen
class _Elsewhere:
    """An image that is still to be fetched: the ``place``-th of an item (``None``: of the query)."""

    index: int | None
    place: int
    url: str
    param: str


class Pictures:
    """The images of one request, counted and measured as they are read."""

    __slots__ = ("_bytes", "_count", "_elsewhere", "_limits", "_parts", "_pixels")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0
        self._pixels = 0
        self._bytes = 0
        self._elsewhere: list[_Elsewhere] | None = None
        self._parts: list[tuple[int, dict[str, Any], str]] | None = None

    def read_all(self, value: Any, index: int | None, param: str) -> tuple[bytes, ...]:
        """The images of one item; nothing yet for those that are to be fetched.

        Raises:
            InvalidInput, BodyTooLarge: with the index.
        """
        if not isinstance(value, list):
            raise InvalidInput("'images' must be a list", index=index, param=param)
        self._take(len(value), index, param)
        return tuple(self._read(image, place, index, param) for place, image in enumerate(value))

    def _take(self, count: int, index: int | None, param: str) -> None:
        self._count += count
        if self._count > self._limits.images:
            message = f"a request may hold {self._limits.images} images at most (server.max_images): split it"
            raise InvalidInput(message, index=index, param=param)

    def _read(self, image: Any, place: int, index: int | None, param: str) -> bytes:
        if isinstance(image, Mapping):
            check_fields(image, _FIELDS, "an image", index=index, param=param)
            if sum(image.get(name) is not None for name in _SOURCES) > 1:
                raise InvalidInput("an image has one of 'data', 'url' and 'image_url'", index=index, param=param)
        data = _data_of(image)
        if isinstance(data, str):
            if _is_address(data):
                self._elsewhere = self._elsewhere or []
                self._elsewhere.append(_Elsewhere(index, place, data, param))
                return b""
            data = _decoded(data, index, param)
        if not isinstance(data, bytes) or not data:
            raise InvalidInput(f"{_WANTED}; this one is {kind_of(image)}", index=index, param=param)
        self._measure(data, index, param)
        return data

    def _measure(self, data: bytes, index: int | None, param: str) -> None:
        limits = self._limits
        if len(data) > limits.image_bytes:
            message = f"the image has {len(data)} bytes, and {limits.image_bytes} is the most (server.max_image_bytes)"
            raise BodyTooLarge(message, size=len(data), limit=limits.image_bytes, index=index)
        try:
            size = size_of(data)
        except Truncated:
            raise InvalidInput("the image is truncated: it ends within its header", index=index, param=param) from None
        except Malformed as error:
            raise InvalidInput(f"the image is damaged: {error}", index=index, param=param) from None
        if size is None:
            known = ", ".join(FORMATS)
            raise InvalidInput(f"unknown image format: send one of {known}", index=index, param=param)
        pixels = size[0] * size[1]
        if pixels == 0:
            raise InvalidInput("the image has no pixels", index=index, param=param)
        if pixels > limits.image_pixels:
            message = (
                f"the image has {size[0]} x {size[1]} pixels, and {limits.image_pixels} is the most "
                "(server.max_image_pixels)"
            )
            raise InvalidInput(message, index=index, param=param)
        self._pixels += pixels
        if self._pixels > _SUM * limits.image_pixels:
            message = f"the images of a request may have {_SUM * limits.image_pixels} pixels together: split it"
            raise InvalidInput(message, index=index, param=param)

    def read_part(self, part: dict[str, Any], index: int, param: str) -> None:
        """Check a part of a message, whose image stays where it is.

        An engine would fetch an address, or open a file, from within this machine: what it is given is data.

        Raises:
            InvalidInput, BodyTooLarge: with the index.
        """
        for name, value in part.items():
            if name not in _MEDIA or value is None:
                continue
            url = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(url, str):
                continue  # the engine knows what else there may be
            if name == "image_url" and _is_address(url):
                self._take(1, index, param)
                self._parts = self._parts or []
                self._parts.append((index, part, url))
            elif url[:5].lower() != "data:":
                message = f"{name!r} must be a data URL such as data:image/png;base64,..."
                raise InvalidInput(message, index=index, param=param)
            elif name == "image_url":
                self._take(1, index, param)
                self._measure(_decoded(url, index, param), index, param)

    # --- images that are elsewhere ---------------------------------------------------------------------

    async def complete(
        self, items: Sequence[Item], query: Item | None, remote: RemoteImages | None
    ) -> tuple[Sequence[Item], Item | None]:
        """Fetch what is missing. ``remote=None``: the configuration does not allow it.

        Raises:
            InvalidInput, BodyTooLarge: with the index.
        """
        if self._elsewhere is None:
            return items, query
        mended = list(items)
        fetched = await self._fetch([(one.url, one.index, one.param) for one in self._elsewhere], remote)
        for one, data in zip(self._elsewhere, fetched, strict=True):
            if one.index is not None:
                mended[one.index] = _with_image(mended[one.index], one.place, data)
            elif query is not None:
                query = _with_image(query, one.place, data)
        return mended, query

    async def complete_parts(self, remote: RemoteImages | None) -> None:
        """The same for the parts of messages, which get data URLs in the place of addresses. Raises as ``complete``."""
        if self._parts is None:
            return
        fetched = await self._fetch([(url, index, "messages") for index, _, url in self._parts], remote)
        for (_, part, _), data in zip(self._parts, fetched, strict=True):
            whole = "data:image;base64," + base64.b64encode(data).decode("ascii")
            value = part["image_url"]
            part["image_url"] = {**value, "url": whole} if isinstance(value, Mapping) else whole

    async def _fetch(
        self, wanted: Sequence[tuple[str, int | None, str]], remote: RemoteImages | None
    ) -> Sequence[bytes]:
        """What is at these addresses, a few at a time; all of them in the time that one may take."""
        if remote is None:
            _, index, param = wanted[0]
            raise InvalidInput(
                "images are not fetched from elsewhere here (server.allow_image_urls): send the bytes",
                index=index,
                param=param,
            )
        places = asyncio.Semaphore(_AT_A_TIME)

        async def one(url: str, index: int | None, param: str) -> bytes:
            async with places:
                return await self._fetched(url, index, param, remote)

        try:
            async with asyncio.timeout(remote.timeout_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*each)) for each in wanted]
        except TimeoutError:
            message = f"the images can't be fetched: they did not come within {remote.timeout_s:g} s together"
            raise InvalidInput(message, param=wanted[0][2]) from None
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0]  # noqa: B904 - it has its cause already
        return [task.result() for task in tasks]

    async def _fetched(self, url: str, index: int | None, param: str, remote: RemoteImages) -> bytes:
        try:
            data = await remote.fetch(url, self._limits.image_bytes)
        except InvalidInput as error:
            error.index, error.param = index, param
            raise
        except BodyTooLarge as error:
            error.index = index
            raise
        if not data:
            raise InvalidInput("the image can't be fetched: it is empty", index=index, param=param)
        self._bytes += len(data)
        if self._bytes > self._limits.body_bytes:
            most = self._limits.body_bytes
            message = f"the images of a request have more than {most} bytes together, which a body may have: split it"
            raise BodyTooLarge(message, size=self._bytes, limit=most, index=index)
        self._measure(data, index, param)
        return data


def _is_address(text: str) -> bool:
    return text[:8].lower().startswith(("http://", "https://"))


def _with_image(item: Item, place: int, data: bytes) -> Item:
    return evolve(item, images=(*item.images[:place], data, *item.images[place + 1 :]))


def _data_of(image: Any) -> Any:
    """``{data}``, ``{url}`` and OpenAI's ``{type: image_url, image_url: {url}}``, or the bare value."""
    if not isinstance(image, Mapping):
        return image
    for name in _SOURCES:
        value = image.get(name)
        if value is not None:
            return value.get("url") if name == "image_url" and isinstance(value, Mapping) else value
    return None


def _decoded(text: str, index: int | None, param: str) -> bytes:
    """The bytes of base64, bare or in a data URL. Raises InvalidInput."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        kind, _, coding = head[5:].lower().rpartition(";")
        if not comma or coding.strip() != "base64" or not (kind.startswith("image/") or not kind):
            raise InvalidInput(
                "a data URL must be an image in base64: data:image/png;base64,...", index=index, param=param
            )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("the image's base64 is broken or truncated", index=index, param=param) from None
