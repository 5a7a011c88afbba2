"""Requests, checked by hand: every refusal names the field and the item, and a check costs microseconds."""

from __future__ import annotations

import base64
import binascii
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from attrs import frozen

from sie_core.errors import BodyTooLarge, InvalidInput, Unsupported
from sie_core.http.limits import Limits
from sie_core.types import EncodeParams, Item

__all__ = [
    "DTYPES",
    "OUTPUT_TYPES",
    "EmbeddingsRequest",
    "EncodeRequest",
    "check_lora",
    "kind_of",
    "parse_embeddings",
    "parse_encode",
    "shown",
]

OUTPUT_TYPES: Final = ("dense", "sparse", "multivector")
DTYPES: Final = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
ENCODINGS: Final = ("float", "base64")
_PARAMS: Final = (
    "output_types",
    "output_dtype",
    "instruction",
    "is_query",
    "dimensions",
    "truncate",
    "lora",
    "options",
)
_OTHER_INPUTS: Final = ("audio", "video", "document", "multivector")
_PLAIN: Final = EncodeParams()
_ID_BYTES: Final = 4
_SHOWN: Final = 80
_MAX_NAME: Final = 256
_MAX_ID: Final = 2**31
"""Token ids are int32 for every engine; whether the vocabulary has them is the model's to say."""


@frozen(eq=False)
class EncodeRequest:
    """A native encode request, checked."""

    items: tuple[Item, ...]
    params: EncodeParams
    dtype: str = "float32"


@frozen(eq=False)
class EmbeddingsRequest:
    """An OpenAI embeddings request, checked."""

    model: str
    items: tuple[Item, ...]
    params: EncodeParams
    base64: bool = False


# --- native ----------------------------------------------------------------------------------------


def parse_encode(body: Mapping[Any, Any], limits: Limits) -> EncodeRequest:
    """Check the body of ``POST /v1/encode``. Raises InvalidInput, Unsupported, BodyTooLarge."""
    raw = body.get("items")
    if not isinstance(raw, list):
        raise InvalidInput("'items' must be a list of {text: ...}", param="items")
    _check_count(len(raw), limits, "items")
    items = tuple(_native_item(index, value, limits) for index, value in enumerate(raw))
    params = body.get("params")
    if params is None:
        return EncodeRequest(items, _PLAIN)
    return _native_params(items, _mapping(params, "params"))


def _native_params(items: tuple[Item, ...], params: Mapping[Any, Any]) -> EncodeRequest:
    for name in params:
        if name not in _PARAMS:
            _unknown(name, _PARAMS, "params")
    inner = params.get("options")
    options = {} if inner is None else dict(_mapping(inner, "params.options"))

    def option(name: str) -> Any:
        """Clients put these beside ``options`` or into it."""
        inner, outer = options.pop(name, None), params.get(name)
        if inner is not None and outer is not None and inner != outer:
            raise InvalidInput(f"{name!r} is {shown(outer)} and, in 'options', {shown(inner)}", param=name)
        return inner if outer is None else outer

    asked = params.get("output_dtype")
    dtype = "float32" if asked is None else asked
    if dtype not in DTYPES:
        raise Unsupported(
            f"output_dtype must be one of {', '.join(DTYPES)}, not {shown(dtype)}",
            supported=DTYPES,
            param="output_dtype",
        )
    return EncodeRequest(
        items,
        EncodeParams(
            output_types=_output_types(params.get("output_types")),
            instruction=_optional(params.get("instruction"), str, "instruction", "a string"),
            is_query=bool(_optional(option("is_query"), bool, "is_query", "true or false")),
            dimensions=_dimensions(option("dimensions")),
            truncate=_optional(option("truncate"), bool, "truncate", "true or false"),
            lora=check_lora(option("lora")),
            options=options,
        ),
        dtype,
    )


def _output_types(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("dense",)
    if not isinstance(value, list) or not value:
        raise InvalidInput("'output_types' must be a list such as ['dense']", param="output_types")
    for name in value:
        if name not in OUTPUT_TYPES:
            message = f"output type {shown(name)} is none of {', '.join(OUTPUT_TYPES)}"
            raise Unsupported(message, supported=OUTPUT_TYPES, param="output_types")
    return tuple(dict.fromkeys(value))


def _native_item(index: int, value: Any, limits: Limits) -> Item:
    if not isinstance(value, dict):
        raise InvalidInput(
            f"an item must be an object such as {{text: ...}}, not {kind_of(value)}", index=index, param="items"
        )
    identity = value.get("id")
    if identity is not None and not isinstance(identity, str):
        raise InvalidInput(f"'id' must be a string, not {kind_of(identity)}", index=index, param="items")
    for name in _OTHER_INPUTS:
        if value.get(name) is not None:
            raise InvalidInput(f"{name!r} is no input of this server", index=index, param="items")
    text = value.get("text")
    images = value.get("images")
    if images is not None and images != []:
        return Item(
            text=None if text is None else _text(text, index, limits, "items"),
            id=identity,
            images=_images(images, index, limits),
        )
    if text is None:
        raise InvalidInput("there is no 'text'", index=index, param="items")
    return Item(text=_text(text, index, limits, "items"), id=identity)


def _images(value: Any, index: int, limits: Limits) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise InvalidInput("'images' must be a list", index=index, param="items")
    images = []
    for image in value:
        data = image.get("data") if isinstance(image, dict) else image
        if isinstance(data, str):  # JSON has no bytes.
            try:
                data = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                data = None
        if not isinstance(data, bytes) or not data:
            message = "an image must be {data: bytes, format: ...}, in JSON with the bytes as base64"
            raise InvalidInput(message, index=index, param="items")
        images.append(data)
    return tuple(images)


# --- OpenAI ----------------------------------------------------------------------------------------


def parse_embeddings(body: Mapping[Any, Any], limits: Limits) -> EmbeddingsRequest:
    """Check the body of ``POST /v1/embeddings``. Fields that it does not know are ignored, as OpenAI's clients expect.

    Raises:
        InvalidInput, BodyTooLarge: with ``param`` and the index of the item.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("'model' must be the name of a model", param="model")
    encoding = body.get("encoding_format")
    if encoding is not None and encoding not in ENCODINGS:
        raise Unsupported(
            f"encoding_format must be float or base64, not {shown(encoding)}",
            supported=ENCODINGS,
            param="encoding_format",
        )
    dimensions = _dimensions(body.get("dimensions"))
    truncate = _optional(body.get("truncate"), bool, "truncate", "true or false")
    lora = check_lora(body.get("lora"))
    plain = dimensions is None and truncate is None and lora is None
    params = _PLAIN if plain else EncodeParams(dimensions=dimensions, truncate=truncate, lora=lora)
    return EmbeddingsRequest(model, _openai_items(body.get("input"), limits), params, encoding == "base64")


def _openai_items(value: Any, limits: Limits) -> tuple[Item, ...]:
    if isinstance(value, str):
        return (Item(text=_text(value, 0, limits, "input")),)
    if value is None:
        raise InvalidInput("'input' is missing", param="input")
    if not isinstance(value, list):
        raise InvalidInput(
            f"'input' must be a string, a list of strings, or token ids, not {kind_of(value)}", param="input"
        )
    if value and type(value[0]) is int:
        return (Item(token_ids=_token_ids(value, 0, limits)),)
    _check_count(len(value), limits, "input")
    if isinstance(value[0], list):
        return tuple(Item(token_ids=_token_ids(ids, index, limits)) for index, ids in enumerate(value))
    return tuple(Item(text=_text(text, index, limits, "input")) for index, text in enumerate(value))


def _token_ids(value: Any, index: int, limits: Limits) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidInput(
            f"a list of token ids must follow on a list of token ids, not {kind_of(value)}", index=index, param="input"
        )
    if not value:
        raise InvalidInput("the list of token ids is empty: there is nothing to encode", index=index, param="input")
    if len(value) * _ID_BYTES > limits.item_bytes:
        most = limits.item_bytes // _ID_BYTES
        message = f"there are {len(value)} token ids, and {most} is the most"
        raise BodyTooLarge(message, size=len(value) * _ID_BYTES, limit=limits.item_bytes, index=index)
    if not set(map(type, value)) == {int}:
        raise InvalidInput("token ids must be whole numbers", index=index, param="input")
    if min(value) < 0 or max(value) >= _MAX_ID:
        raise InvalidInput("there is a token id outside any vocabulary", index=index, param="input")
    return tuple(value)


# --- both ------------------------------------------------------------------------------------------


def _text(value: Any, index: int, limits: Limits, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"a text must be a string, not {kind_of(value)}", index=index, param=param)
    if not value:
        raise InvalidInput("the text is empty: there is nothing to encode", index=index, param=param)
    if len(value) * 4 > limits.item_bytes:  # Four bytes a character at most: short texts need no counting.
        size = len(value.encode())
        if size > limits.item_bytes:
            message = f"the text has {size} bytes, and {limits.item_bytes} is the most"
            raise BodyTooLarge(message, size=size, limit=limits.item_bytes, index=index)
    return value


def _check_count(count: int, limits: Limits, param: str) -> None:
    if not count:
        raise InvalidInput(f"{param!r} is empty: there is nothing to encode", param=param)
    if count > limits.items:
        message = f"a request may hold {limits.items} items at most, and this one holds {count}: split it"
        raise InvalidInput(message, index=limits.items, param=param)


def _dimensions(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value < _MAX_ID:
        raise InvalidInput("'dimensions' must be a whole number, 1 or more", param="dimensions")
    return value


def check_lora(value: Any) -> str | None:
    """The name of a LoRA adapter, or none. Raises InvalidInput."""
    if value is not None and (not isinstance(value, str) or not value or len(value) > _MAX_NAME):
        raise InvalidInput(f"'lora' must be the name of a LoRA adapter, not {shown(value)}", param="lora")
    return value


def _optional(value: Any, kind: type, param: str, wanted: str) -> Any:
    if value is not None and not isinstance(value, kind):
        raise InvalidInput(f"{param!r} must be {wanted}, not {kind_of(value)}", param=param)
    return value


def _mapping(value: Any, param: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{param!r} must be an object, not {kind_of(value)}", param=param)
    return value


def _unknown(name: Any, known: Sequence[str], param: str) -> NoReturn:
    near = difflib.get_close_matches(str(name)[:64], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    raise InvalidInput(f"{shown(name)} is no field of {param!r}; {hint}", param=param)


def shown(value: Any) -> str:
    """A value as an error may quote it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def kind_of(value: Any) -> str:
    """What a value is, in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
