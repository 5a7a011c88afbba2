"""Requests to score and to extract in the native dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import frozen

from sie_core.errors import InvalidInput
from sie_core.http.checks import (
    check_count,
    check_fields,
    check_lora,
    dimensions_of,
    instruction_of,
    kind_of,
    mapping,
    optional,
    options_of,
    text_of,
)
from sie_core.http.images import Pictures
from sie_core.http.items import ITEM_FIELDS, item_of
from sie_core.http.limits import Limits
from sie_core.types import Item, RequestParams

__all__ = ["MAX_LABELS", "MAX_SCORED", "ExtractRequest", "ScoreRequest", "parse_extract", "parse_score"]

MAX_SCORED: Final = 1000
"""Items that a request may have scored."""
MAX_LABELS: Final = 1000
_SCORE: Final = ("model", "query", "items", "instruction", "truncate", "lora", "options")
_EXTRACT: Final = ("model", "items", "params")
_EXTRACT_PARAMS: Final = ("labels", "output_schema", "instruction", "truncate", "lora", "options")
_SCORED: Final = dict.fromkeys(_SCORE, "beside 'items'")
_NOT_SCORED: Final = {
    **dict.fromkeys(ITEM_FIELDS, "in an item of 'items'"),
}
_EXTRACTED: Final = dict.fromkeys(_EXTRACT_PARAMS, "under 'params'")
_NOT_EXTRACTED: Final = {**dict.fromkeys(ITEM_FIELDS, "in an item of 'items'"), **_EXTRACTED}
_NOT_IN_PARAMS: Final = {
    **dict.fromkeys(ITEM_FIELDS, "in an item of 'items'"),
    **dict.fromkeys(_EXTRACT, "beside 'params'"),
}


@frozen(eq=False)
class ScoreRequest:
    """A native request to score, checked."""

    query: Item
    items: tuple[Item, ...]
    params: RequestParams
    pictures: Pictures


@frozen(eq=False)
class ExtractRequest:
    """A native request to extract, checked."""

    items: tuple[Item, ...]
    params: RequestParams
    pictures: Pictures
    labels: tuple[str, ...] = ()
    output_schema: Mapping[str, Any] | None = None


def parse_score(body: Mapping[Any, Any], limits: Limits) -> ScoreRequest:
    """Check the body of ``POST /v1/score``. Raises InvalidInput, BodyTooLarge."""
    check_fields(body, _SCORE, "the request", elsewhere=_NOT_SCORED)
    pictures = Pictures(limits)
    query = body.get("query")
    if query is None:
        raise InvalidInput("'query' is missing", param="query")
    if isinstance(query, str):
        query = {"text": query}
    asked = item_of(query, None, limits, pictures, "query", _SCORED)
    items = _items(body.get("items"), limits, pictures, MAX_SCORED, _SCORED)
    return ScoreRequest(asked, items, _params(body, "options", len(items), limits), pictures)


def parse_extract(body: Mapping[Any, Any], limits: Limits) -> ExtractRequest:
    """Check the body of ``POST /v1/extract``. Raises InvalidInput, BodyTooLarge."""
    check_fields(body, _EXTRACT, "the request", elsewhere=_NOT_EXTRACTED)
    pictures = Pictures(limits)
    items = _items(body.get("items"), limits, pictures, None, _EXTRACTED)
    raw = body.get("params")
    params = {} if raw is None else mapping(raw, "params")
    check_fields(params, _EXTRACT_PARAMS, "'params'", elsewhere=_NOT_IN_PARAMS, param="params")
    schema = optional(params.get("output_schema"), dict, "output_schema", "an object")
    labels = _labels(params.get("labels"), limits)
    asked = _params(params, "params.options", len(items), limits)
    return ExtractRequest(items, asked, pictures, labels, schema)


def _items(
    raw: Any, limits: Limits, pictures: Pictures, most: int | None, elsewhere: Mapping[str, str]
) -> tuple[Item, ...]:
    if not isinstance(raw, list):
        raise InvalidInput(f"'items' must be a list of {{text: ...}}, not {kind_of(raw)}", param="items")
    check_count(len(raw), limits, "items", most)
    return tuple(item_of(value, index, limits, pictures, elsewhere=elsewhere) for index, value in enumerate(raw))


def _params(asked: Mapping[Any, Any], where: str, texts: int, limits: Limits) -> RequestParams:
    options = options_of(asked.get("options"), where)

    def option(name: str, check: Callable[[Any], Any]) -> Any:
        """What stands beside ``options`` wins; what it wins over has to be right too."""
        inner, outer = check(options.pop(name, None)), check(asked.get(name))
        return inner if outer is None else outer

    return RequestParams(
        instruction=option("instruction", lambda value: instruction_of(value, texts, limits)),
        dimensions=dimensions_of(options.pop("dimensions", None)),
        truncate=option("truncate", lambda value: optional(value, bool, "truncate", "true or false")),
        lora=option("lora", check_lora),
        options=options,
    )


def _labels(value: Any, limits: Limits) -> tuple[str, ...]:
    """What to look for; none for models that have labels of their own."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidInput(f"'labels' must be a list of strings, not {kind_of(value)}", param="labels")
    if not value:
        raise InvalidInput("'labels' is empty: name some, or leave it out for the model's own", param="labels")
    if len(value) > MAX_LABELS:
        message = f"a request may have {MAX_LABELS} labels at most, and this one has {len(value)}"
        raise InvalidInput(message, index=MAX_LABELS, param="labels")
    return tuple(dict.fromkeys(text_of(label, index, limits, "labels") for index, label in enumerate(value)))
