"""``POST /v1/score/{model}`` and ``POST /v1/extract/{model}``: the native dialect, JSON or msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sie_core.http.endpoint import Site, allow, known_model
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.task_inputs import parse_extract, parse_score
from sie_core.http.vectors import Pace, number_bytes
from sie_core.http.wire import Reply, pack, part
from sie_core.types import Entity, ExtractOutput, Item

__all__ = ["extract", "score"]

_AS_NUMBERS: Final = 16
"""What writing one entity or class costs, in numbers of a vector."""


async def score(site: Site, exchange: Exchange) -> Reply:
    """Score items against a query; they come back best first."""
    model = known_model(site, exchange)
    request = await site.reader.read(exchange, parse_score)
    with Watched(exchange):
        items, query = await request.pictures.complete(request.items, request.query, site.remote)
        result = await site.service.score(model, query or request.query, items, request.params)
    scores = [output.score for output in result.outputs]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
    answer = {
        "model": result.model,
        "scores": [
            {"item_id": _identity(request.items[index].id, index), "score": scores[index], "rank": rank}
            for rank, index in enumerate(order)
        ],
        "usage": {"input_tokens": result.tokens},
    }
    if request.query.id is not None:
        answer["query_id"] = request.query.id
    return pack(answer, msgpack=exchange.wants_msgpack)


def _identity(given: str | None, index: int) -> str:
    """Clients take strings only: an item without an id is known by its place, as sie-server writes it."""
    return f"item-{index}" if given is None else given


async def extract(site: Site, exchange: Exchange) -> Reply:
    """Find in each item what the labels or the schema name; one entry an item comes back, in order."""
    model = known_model(site, exchange)
    request = await site.reader.read(exchange, parse_extract)
    with Watched(exchange):
        items, _ = await request.pictures.complete(request.items, None, site.remote)
        result = await site.service.extract(
            model,
            items,
            request.params,
            labels=request.labels,
            output_schema=request.output_schema,
            allowance=allow(site, exchange, number_bytes("float32"), len(items)),
        )
    found = await _entries(request.items, result.outputs, msgpack=exchange.wants_msgpack)
    answer = {"model": result.model, "items": found, "usage": {"input_tokens": result.tokens}}
    return pack(answer, msgpack=exchange.wants_msgpack)


async def _entries(items: Sequence[Item], outputs: Sequence[ExtractOutput], *, msgpack: bool) -> list[Any]:
    """One an item, in order. The event loop turns in between: a thousand labels of a thousand items are a million."""
    entries: list[Any] = []
    pace = Pace()
    for index, (item, output) in enumerate(zip(items, outputs, strict=True)):
        entry = {"id": _identity(item.id, index), **_found(output)}
        count = len(output.entities) + len(output.relations) + len(output.classifications) + len(output.objects)
        entries.append(part(entry, msgpack=msgpack))
        await pace.after(_AS_NUMBERS * (1 + count))
    return entries


def _found(output: ExtractOutput) -> dict[str, Any]:
    return {
        "entities": [_entity(entity) for entity in output.entities],
        "relations": [
            {"head": one.head, "tail": one.tail, "relation": one.relation, "score": one.score}
            for one in output.relations
        ],
        "classifications": [{"label": one.label, "score": one.score} for one in output.classifications],
        "objects": [{"label": one.label, "score": one.score, "bbox": list(one.bbox)} for one in output.objects],
        "data": {},  # for what models make by a schema: none of ours does
    }


def _entity(entity: Entity) -> dict[str, Any]:
    """A span of the text, or a box of the image: without the fields of the other."""
    shown: dict[str, Any] = {"text": entity.text, "label": entity.label, "score": entity.score}
    if entity.start is not None:
        shown |= {"start": entity.start, "end": entity.end}
    if entity.bbox is not None:
        shown["bbox"] = list(entity.bbox)
    return shown
