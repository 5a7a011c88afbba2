"""``POST /v1/encode/{model}``: the native dialect, JSON or msgpack."""

from __future__ import annotations

from time import perf_counter

from sie_core.http.endpoint import Site, allow, known_model
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.inputs import parse_encode
from sie_core.http.vectors import native_items, number_bytes
from sie_core.http.wire import Reply, pack

__all__ = ["encode"]


async def encode(site: Site, exchange: Exchange) -> Reply:
    """Encode items; one entry an item comes back, in order."""
    began = perf_counter()
    model = known_model(site, exchange)
    request = await site.reader.read(exchange, parse_encode)
    msgpack = exchange.wants_msgpack
    with Watched(exchange):
        items, _ = await request.pictures.complete(request.items, None, site.remote)
        each = number_bytes(request.dtype, msgpack=msgpack)
        allowance = allow(site, exchange, each, len(items), request.params.output_types)
        result = await site.service.encode(model, items, request.params, allowance=allowance)
    entries = await native_items(
        request.items,
        result.outputs,
        request.params.output_types,
        request.dtype,
        msgpack=msgpack,
        ranges=request.ranges,
        vocabulary=result.dims.get("sparse"),
    )
    answer = {
        "model": result.model,
        "items": entries,
        "timing": {
            "total_ms": _ms(perf_counter() - began),
            "queue_ms": _ms(result.queue_s),
            "tokenization_ms": _ms(result.tokenise_s),
            "inference_ms": _ms(result.inference_s),
        },
        "usage": {"input_tokens": result.tokens},
    }
    return pack(answer, msgpack=msgpack)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
