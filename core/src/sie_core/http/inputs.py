"""Native requests to encode, checked by hand: every refusal names the field and the item, and costs microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from attrs import frozen

from sie_core.errors import InvalidInput, Unsupported
from sie_core.http.checks import (
    check_count,
    check_fields,
    check_lora,
    dimensions_of,
    instruction_of,
    mapping,
    optional,
    options_of,
    shown,
)
from sie_core.http.images import Pictures
from sie_core.http.items import ITEM_FIELDS, item_of
from sie_core.http.limits import Limits
from sie_core.http.vectors import Ranges
from sie_core.types import Item, RequestParams

__all__ = [
    "DTYPES",
    "OUTPUT_TYPES",
    "EncodeRequest",
    "parse_encode",
]

OUTPUT_TYPES: Final = ("dense", "sparse", "multivector")
SPARSE_DTYPES: Final = ("float32", "float16")
"""Indices would not survive anything else: beside other outputs, sparse ones then stay float32."""
DTYPES: Final = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
_PARAMS: Final = (
    "output_types",
    "output_dtype",
    "instruction",
    "is_query",
    "dimensions",
    "truncate",
    "lora",
    "ranges",
    "options",
)
_ENCODE: Final = ("model", "items", "params")
_IN_ITEMS: Final = dict.fromkeys(ITEM_FIELDS, "in an item of 'items'")
_NOT_BESIDE: Final = {**_IN_ITEMS, **dict.fromkeys(_PARAMS, "under 'params'")}
_NOT_IN_PARAMS: Final = {**_IN_ITEMS, "model": "beside 'params'", "items": "beside 'params'"}
_NOT_IN_ITEMS: Final = dict.fromkeys(_PARAMS, "under 'params'")
_PLAIN: Final = RequestParams()


@frozen(eq=False)
class EncodeRequest:
    """A native encode request, checked."""

    items: tuple[Item, ...]
    params: RequestParams
    pictures: Pictures
    dtype: str = "float32"
    ranges: Ranges | None = None


# --- native ----------------------------------------------------------------------------------------


def parse_encode(body: Mapping[Any, Any], limits: Limits) -> EncodeRequest:
    """Check the body of ``POST /v1/encode``. Raises InvalidInput, Unsupported, BodyTooLarge."""
    check_fields(body, _ENCODE, "the request", elsewhere=_NOT_BESIDE)
    raw = body.get("items")
    if not isinstance(raw, list):
        raise InvalidInput("'items' must be a list of {text: ...}", param="items")
    check_count(len(raw), limits, "items")
    pictures = Pictures(limits)
    items = tuple(item_of(value, index, limits, pictures, elsewhere=_NOT_IN_ITEMS) for index, value in enumerate(raw))
    params = body.get("params")
    if params is None:
        return EncodeRequest(items, _PLAIN, pictures)
    return _native_params(items, pictures, mapping(params, "params"), limits)


def _native_params(
    items: tuple[Item, ...], pictures: Pictures, params: Mapping[Any, Any], limits: Limits
) -> EncodeRequest:
    check_fields(params, _PARAMS, "'params'", elsewhere=_NOT_IN_PARAMS, param="params")
    options = options_of(params.get("options"), "params.options")
    if "output_types" in options:
        raise InvalidInput("'output_types' belongs beside 'options', not in it", param="params.options")

    def option(name: str) -> Any:
        """Clients put these beside ``options`` or into it."""
        inner, outer = options.pop(name, None), params.get(name)
        if inner is not None and outer is not None and _differ(inner, outer):
            raise InvalidInput(f"{name!r} is {shown(outer)} and, in 'options', {shown(inner)}", param=name)
        return inner if outer is None else outer

    asked = option("output_dtype")
    dtype = "float32" if asked is None else asked
    if dtype not in DTYPES:
        raise Unsupported(
            f"output_dtype must be one of {', '.join(DTYPES)}, not {shown(dtype)}",
            supported=DTYPES,
            param="output_dtype",
        )
    output_types = _output_types(params.get("output_types"))
    if output_types == ("sparse",) and dtype not in SPARSE_DTYPES:
        raise Unsupported(
            f"sparse output comes as {' or '.join(SPARSE_DTYPES)}, not {dtype}: its indices would not survive",
            supported=SPARSE_DTYPES,
            param="output_dtype",
        )
    return EncodeRequest(
        items,
        RequestParams(
            output_types=output_types,
            instruction=instruction_of(option("instruction"), len(items), limits),
            is_query=optional(option("is_query"), bool, "is_query", "true or false"),
            dimensions=dimensions_of(option("dimensions")),
            truncate=optional(option("truncate"), bool, "truncate", "true or false"),
            lora=check_lora(option("lora")),
            options=options,
        ),
        pictures,
        dtype,
        _ranges(option("ranges"), dtype),
    )


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except RecursionError:  # nothing that is right is so deep
        return True


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


def _ranges(value: Any, dtype: str) -> Ranges | None:
    """The smallest and the largest number of each dimension, as int8 and uint8 want them. Raises InvalidInput."""
    if value is None:
        return None
    if dtype not in ("int8", "uint8"):
        raise InvalidInput("'ranges' goes with output_dtype int8 and uint8 only", param="ranges")
    try:
        given = np.array(value)
    except (TypeError, ValueError, OverflowError):
        given = np.zeros(0)
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        ranges = given.astype(np.float32) if given.dtype.kind in "iuf" else np.zeros(0, dtype=np.float32)
    if ranges.ndim != 2 or len(ranges) != 2 or not ranges.size or not np.isfinite(ranges).all():
        raise InvalidInput("'ranges' must be [[smallest, ...], [largest, ...]], a number a dimension", param="ranges")
    if (ranges[0] > ranges[1]).any():
        raise InvalidInput("'ranges' must give the smallest numbers first", param="ranges")
    return ranges
