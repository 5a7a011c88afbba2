"""Requests to embed as OpenAI's clients send them, with the fields of others who speak that API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from sie_core.errors import BodyTooLarge, InvalidInput, Unsupported
from sie_core.http.checks import (
    MAX_ID,
    check_count,
    check_lora,
    dimensions_of,
    instruction_of,
    kind_of,
    optional,
    shown,
    text_of,
)
from sie_core.http.foreign import EMBEDDINGS, either, refuse_undone
from sie_core.http.images import Pictures
from sie_core.http.inputs import DTYPES
from sie_core.http.limits import Limits
from sie_core.types import Item, RequestParams

__all__ = ["ENCODINGS", "INPUT_TYPES", "MODALITIES", "OUTPUT_DTYPES", "TASKS", "EmbeddingsRequest", "parse_embeddings"]

ENCODINGS: Final = ("float", "base64")
INPUT_TYPES: Final = ("query", "document", "passage")
"""OpenAI's API has no word for it; these are what others call it who speak that API otherwise."""
TASKS: Final = ("retrieval.query", "retrieval.passage")
"""The same in Jina's words; its other tasks are LoRA adapters of its own models."""
MODALITIES: Final = ("text", "image")
OUTPUT_DTYPES: Final = ("float", *DTYPES)
EMBEDDING_TYPES: Final = (*ENCODINGS, "binary", "ubinary")
_PLAIN: Final = RequestParams()
_ID_BYTES: Final = 4


@frozen(eq=False)
class EmbeddingsRequest:
    """An OpenAI embeddings request, checked. ``normalize``: vectors shall have the length 1, whatever the model does.

    ``data_url``: the first text that is an image's data URL.
    """

    model: str
    items: tuple[Item, ...]
    params: RequestParams
    pictures: Pictures
    base64: bool = False
    dtype: str = "float32"
    normalize: bool = False
    data_url: int | None = None


def parse_embeddings(body: Mapping[Any, Any], limits: Limits) -> EmbeddingsRequest:
    """Check the body of ``POST /v1/embeddings``. Fields that change nothing are ignored, as OpenAI's clients expect.

    Raises:
        InvalidInput, Unsupported, BodyTooLarge: with ``param`` and the index of the item.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("'model' must be the name of a model", param="model")
    refuse_undone(body, EMBEDDINGS)
    as_base64, dtype = _form(body)
    modality = _one_of(body.get("modality"), MODALITIES, "modality")
    pictures = Pictures(limits)
    items = _items(body.get("input"), limits, pictures, images=modality == "image")
    return EmbeddingsRequest(
        model,
        items,
        _params(body, items, limits),
        pictures,
        as_base64,
        dtype,
        bool(body.get("normalize") or body.get("normalized")),
        next((index for index, item in enumerate(items) if _is_data_url(item.text)), None),
    )


def _is_data_url(text: str | None) -> bool:
    return text is not None and text[:11].lower() == "data:image/"


def _params(body: Mapping[Any, Any], items: tuple[Item, ...], limits: Limits) -> RequestParams:
    """How to encode, by whichever name it was asked for."""
    name, dimensions = either(body, "dimensions", "output_dimension")
    dimensions = dimensions_of(dimensions, name)
    name, truncate = either(body, "truncate", "truncation")
    truncate = optional(truncate, bool, name, "true or false")
    instruction = instruction_of(body.get("instruction"), len(items), limits)
    lora = check_lora(body.get("lora"))
    is_query = _is_query(body)
    if dimensions is None and truncate is None and lora is None and instruction is None and is_query is None:
        return _PLAIN
    return RequestParams(
        instruction=instruction, is_query=is_query, dimensions=dimensions, truncate=truncate, lora=lora
    )


def _is_query(body: Mapping[Any, Any]) -> bool | None:
    kind = _one_of(body.get("input_type"), INPUT_TYPES, "input_type")
    task = _one_of(body.get("task"), TASKS, "task")
    flag = optional(body.get("is_query"), bool, "is_query", "true or false")
    said = {
        name: asked
        for name, value, asked in (
            ("input_type", kind, kind == "query"),
            ("task", task, task == TASKS[0]),
            ("is_query", flag, flag),
        )
        if value is not None
    }
    if len(set(said.values())) > 1:
        raise InvalidInput(f"{' and '.join(said)} contradict each other: send one of them", param=[*said][-1])
    return any(said.values()) if said else None


def _form(body: Mapping[Any, Any]) -> tuple[bool, str]:
    """Whether vectors come in base64, and of which dtype they are."""
    encoding = _one_of(body.get("encoding_format"), ENCODINGS, "encoding_format")
    kind = _one_of(body.get("embedding_type"), EMBEDDING_TYPES, "embedding_type")  # Jina has one field for both
    asked = _one_of(body.get("output_dtype"), OUTPUT_DTYPES, "output_dtype")
    packed = kind if kind not in (None, *ENCODINGS) else None
    if asked is not None and packed is not None and asked != packed:
        raise InvalidInput(f"output_dtype is {asked} and embedding_type {kind}: send one of them", param="output_dtype")
    dtype = asked or packed or "float"
    dtype = "float32" if dtype == "float" else dtype
    as_base64 = encoding == "base64" or (encoding is None and kind == "base64")
    if as_base64 and dtype != "float32":
        # Clients of OpenAI ask for base64 by themselves, and read float32 from it whatever it holds.
        raise Unsupported(
            f"{dtype} vectors come with encoding_format: float only; base64 holds float32",
            supported=("float",),
            param="encoding_format",
        )
    return as_base64, dtype


def _one_of(value: Any, known: tuple[str, ...], param: str) -> str | None:
    if value is not None and value not in known:
        raise Unsupported(
            f"{param} must be one of {', '.join(known)}, not {shown(value)}", supported=known, param=param
        )
    found: str | None = value
    return found


def _items(value: Any, limits: Limits, pictures: Pictures, *, images: bool) -> tuple[Item, ...]:
    if value is None:
        raise InvalidInput("'input' is missing", param="input")
    if images:
        return _images(value, limits, pictures)
    if isinstance(value, str):
        return (Item(text=text_of(value, 0, limits, "input")),)
    if not isinstance(value, list):
        raise InvalidInput(
            f"'input' must be a string, a list of strings, or token ids, not {kind_of(value)}", param="input"
        )
    if value and type(value[0]) is int:
        return (Item(token_ids=_token_ids(value, 0, limits)),)
    check_count(len(value), limits, "input")
    if isinstance(value[0], list):
        return tuple(Item(token_ids=_token_ids(ids, index, limits)) for index, ids in enumerate(value))
    return tuple(Item(text=text_of(text, index, limits, "input")) for index, text in enumerate(value))


def _images(value: Any, limits: Limits, pictures: Pictures) -> tuple[Item, ...]:
    values = value if isinstance(value, list) else [value]
    check_count(len(values), limits, "input")
    for index, one in enumerate(values):
        if not isinstance(one, str):
            message = f"an image must be a data URL, with modality: image, not {kind_of(one)}"
            raise InvalidInput(message, index=index, param="input")
    return tuple(Item(images=pictures.read_all([one], index, "input")) for index, one in enumerate(values))


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
    if min(value) < 0 or max(value) >= MAX_ID:
        raise InvalidInput("there is a token id outside any vocabulary", index=index, param="input")
    return tuple(value)
