"""Requests of Cohere's and Jina's clients: rerank and embed, each in both versions.

Fields that change nothing in an answer (``priority``) are ignored; one that would change it and can't be honoured is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from sie_core.errors import InvalidInput, Unsupported
from sie_core.http.checks import (
    check_count,
    check_lora,
    dimensions_of,
    instruction_of,
    kind_of,
    optional,
    shown,
    text_of,
)
from sie_core.http.foreign import EMBED, RERANK, either, refuse_undone
from sie_core.http.images import Pictures
from sie_core.http.limits import Limits
from sie_core.http.task_inputs import MAX_SCORED
from sie_core.types import Item, RequestParams

__all__ = ["EMBEDDING_TYPES", "EmbedRequest", "RerankRequest", "parse_embed", "parse_rerank"]

EMBEDDING_TYPES: Final = ("float", "int8", "uint8", "binary", "ubinary", "base64")
INPUT_TYPES: Final = ("search_document", "search_query", "classification", "clustering", "image")
_RAW: Final = {"activation": "identity"}
"""What a cross-encoder is asked for where a request wants its scores as they are before the activation."""
_INPUTS: Final = ("texts", "images", "inputs")


@frozen(eq=False)
class RerankRequest:
    """A request to rerank, checked. ``top_n``: how many results are wanted; ``None``: all."""

    model: str
    query: Item
    documents: tuple[Item, ...]
    params: RequestParams
    top_n: int | None = None
    return_documents: bool = False


@frozen(eq=False)
class EmbedRequest:
    """A Cohere request to embed, checked. ``texts``: what to send back with the vectors; ``None`` with images.

    ``types_named``: whether the request had embedding types.
    """

    model: str
    items: tuple[Item, ...]
    params: RequestParams
    pictures: Pictures
    types: tuple[str, ...]
    types_named: bool
    texts: tuple[str, ...] | None


def _model(body: Mapping[Any, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("'model' must be the name of a model", param="model")
    return model


# --- rerank ----------------------------------------------------------------------------------------


def parse_rerank(body: Mapping[Any, Any], limits: Limits) -> RerankRequest:
    """Check the body of a rerank request. Raises InvalidInput, Unsupported, BodyTooLarge."""
    model = _model(body)
    query = _text_in(body.get("query"), None, limits, "query")
    raw = body.get("documents")
    if not isinstance(raw, list):
        raise InvalidInput(
            f"'documents' must be a list of strings or of {{text: ...}}, not {kind_of(raw)}", param="documents"
        )
    check_count(len(raw), limits, "documents", MAX_SCORED)
    refuse_undone(body, RERANK)
    documents = tuple(Item(text=_text_in(one, index, limits, "documents")) for index, one in enumerate(raw))
    name, top_n = either(body, "top_n", "top_k")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidInput(f"{name!r} must be a whole number, 1 or more", param=name)
    params = RequestParams(
        instruction=instruction_of(body.get("instruction"), len(documents), limits),
        truncate=_truncate(body),
        lora=check_lora(body.get("lora")),
        options=_RAW if optional(body.get("raw_scores"), bool, "raw_scores", "true or false") else {},
    )
    wanted = optional(body.get("return_documents"), bool, "return_documents", "true or false")
    return RerankRequest(model, Item(text=query), documents, params, top_n, bool(wanted))


def _text_in(value: Any, index: int | None, limits: Limits, param: str) -> str:
    """A string, or an object with one."""
    if isinstance(value, dict):
        if "text" not in value:
            raise InvalidInput("there is no 'text'", index=index, param=param)
        value = value["text"]
    elif value is None and index is None:
        raise InvalidInput(f"{param!r} is missing", param=param)
    return text_of(value, index, limits, param)


def _truncate(body: Mapping[Any, Any]) -> bool | None:
    """Whether to cut long documents. Whoever says how long they may be wants them cut: to what the model takes."""
    name, value = either(body, "truncate", "truncation")
    asked: bool | None = optional(value, bool, name, "true or false")
    limit = dimensions_of(body.get("max_tokens_per_doc"), "max_tokens_per_doc")
    return asked if asked is not None or limit is None else True


# --- embed -----------------------------------------------------------------------------------------


def parse_embed(body: Mapping[Any, Any], limits: Limits) -> EmbedRequest:
    """Check the body of a request to embed. Raises InvalidInput, Unsupported, BodyTooLarge."""
    model = _model(body)
    kind = body.get("input_type")
    if kind is not None and kind not in INPUT_TYPES:
        message = f"input_type must be one of {', '.join(INPUT_TYPES)}, not {shown(kind)}"
        raise Unsupported(message, supported=INPUT_TYPES, param="input_type")
    refuse_undone(body, EMBED)
    pictures = Pictures(limits)
    items, texts = _embed_inputs(body, limits, pictures)
    name, dimensions = either(body, "output_dimension", "dimensions")
    params = RequestParams(
        is_query=kind == "search_query",
        dimensions=dimensions_of(dimensions, name),
        truncate=_cut(body.get("truncate")),
        lora=check_lora(body.get("lora")),
    )
    types = body.get("embedding_types")
    return EmbedRequest(model, items, params, pictures, _embedding_types(types), types is not None, texts)


def _embed_inputs(
    body: Mapping[Any, Any], limits: Limits, pictures: Pictures
) -> tuple[tuple[Item, ...], tuple[str, ...] | None]:
    given = [name for name in _INPUTS if body.get(name) is not None]
    if len(given) != 1:
        raise InvalidInput("give one of 'texts', 'images' and 'inputs'", param=given[1] if given else "texts")
    (name,) = given
    values = body[name]
    if not isinstance(values, list):
        raise InvalidInput(f"{name!r} must be a list, not {kind_of(values)}", param=name)
    check_count(len(values), limits, name)
    if name == "texts":
        texts = tuple(text_of(value, index, limits, name) for index, value in enumerate(values))
        return tuple(Item(text=text) for text in texts), texts
    if name == "images":
        return tuple(Item(images=pictures.read_all([value], index, name)) for index, value in enumerate(values)), None
    items = tuple(_mixed(value, index, limits, pictures) for index, value in enumerate(values))
    plain = all(not item.images for item in items)
    return items, tuple(item.text or "" for item in items) if plain else None


def _mixed(value: Any, index: int, limits: Limits, pictures: Pictures) -> Item:
    """``{content: [{type: text, text}, {type: image_url, image_url: {url}}]}``."""
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list) or not content:
        raise InvalidInput("an input must have a 'content': a list of parts", index=index, param="inputs")
    texts: list[str] = []
    images: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(text_of(part.get("text"), index, limits, "inputs"))
        elif kind == "image_url":
            images.append({name: part.get(name) for name in ("data", "url", "image_url")})
        else:
            raise InvalidInput(
                f"a part must be of type text or image_url, not {shown(kind)}", index=index, param="inputs"
            )
    text = text_of("\n".join(texts), index, limits, "inputs") if texts else None
    return Item(text=text, images=pictures.read_all(images, index, "inputs") if images else ())


def _embedding_types(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("float",)
    if not isinstance(value, list) or not value:
        raise InvalidInput("'embedding_types' must be a list such as ['float']", param="embedding_types")
    for name in value:
        if name not in EMBEDDING_TYPES:
            message = f"embedding type {shown(name)} is none of {', '.join(EMBEDDING_TYPES)}"
            raise Unsupported(message, supported=EMBEDDING_TYPES, param="embedding_types")
    return tuple(dict.fromkeys(value))


def _cut(value: Any) -> bool | None:
    if value is None:
        return None
    if value not in ("NONE", "END"):
        message = f"truncate must be NONE or END, not {shown(value)}: a text's start is never cut off here"
        raise Unsupported(message, supported=("NONE", "END"), param="truncate")
    return bool(value == "END")
