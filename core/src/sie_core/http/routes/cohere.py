"""Rerank and embed, each in two versions, as Cohere's and Jina's clients know them."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from sie_core.errors import Unsupported
from sie_core.http.cohere_inputs import EmbedRequest, RerankRequest, parse_embed, parse_rerank
from sie_core.http.endpoint import Site, allow, checked_name
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.vectors import Pace, convert, not_given, number_bytes
from sie_core.http.wire import Reply, pack, part
from sie_core.serving import ScoreResult
from sie_core.types import EncodeOutput

__all__ = ["embed_v1", "embed_v2", "rerank_v1", "rerank_v2"]

_DTYPES: Final = {"float": "float32", "base64": "float32"}
"""Embedding types that are no dtype of the same name."""


async def rerank_v1(site: Site, exchange: Exchange) -> Reply:
    """Cohere's first version, and Jina's: with the documents if they are wanted."""
    request, result = await _reranked(site, exchange)
    answer = {
        "id": _fresh_id(),
        "object": "list",
        "model": result.model,
        "results": _results(request, result),
        "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
        "meta": _meta("1", search_units=1),
    }
    return pack(answer)


async def rerank_v2(site: Site, exchange: Exchange) -> Reply:
    """Cohere's second version."""
    request, result = await _reranked(site, exchange)
    return pack({"id": _fresh_id(), "results": _results(request, result), "meta": _meta("2", search_units=1)})


async def _reranked(site: Site, exchange: Exchange) -> tuple[RerankRequest, ScoreResult]:
    request = await site.reader.read(exchange, parse_rerank)
    model = checked_name(request.model)
    with Watched(exchange):
        try:
            result = await site.service.score(model, request.query, request.documents, request.params)
        except Unsupported as error:
            if error.param == "options.activation":  # which the request calls otherwise
                message = f"'raw_scores' is not supported by model {model!r}: it has no scores but its own"
                raise Unsupported(message, supported=("false",), param="raw_scores") from error
            raise
    return request, result


def _results(request: RerankRequest, result: ScoreResult) -> list[dict[str, Any]]:
    """Best first; as many as were asked for."""
    scores = [output.score for output in result.outputs]
    order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: request.top_n]
    if not request.return_documents:
        return [{"index": index, "relevance_score": scores[index]} for index in order]
    return [
        {"index": index, "relevance_score": scores[index], "document": {"text": request.documents[index].text}}
        for index in order
    ]


def _meta(version: str, **billed: int) -> dict[str, Any]:
    return {"api_version": {"version": version}, "billed_units": billed}


def _fresh_id() -> str:
    return str(uuid.uuid4())


async def embed_v1(site: Site, exchange: Exchange) -> Reply:
    """Cohere's first version: bare lists of floats for who names no embedding types."""
    request, vectors, answer = await _embedded(site, exchange, "1")
    if request.types_named:
        return pack({**answer, "response_type": "embeddings_by_type", "embeddings": vectors})
    return pack({**answer, "response_type": "embeddings_floats", "embeddings": vectors["float"]})


async def embed_v2(site: Site, exchange: Exchange) -> Reply:
    """Cohere's second version: every embedding type that is asked for, of the same vectors."""
    _, vectors, answer = await _embedded(site, exchange, "2")
    return pack({**answer, "response_type": "embeddings_by_type", "embeddings": vectors})


async def _embedded(
    site: Site, exchange: Exchange, version: str
) -> tuple[EmbedRequest, dict[str, list[Any]], dict[str, Any]]:
    """The request, the vectors by type, and what both versions say beside them."""
    request = await site.reader.read(exchange, parse_embed)
    model = checked_name(request.model)
    each = sum(number_bytes(_DTYPES.get(name, name), as_base64=name == "base64") for name in request.types)
    with Watched(exchange):
        items, _ = await request.pictures.complete(request.items, None, site.remote)
        result = await site.service.encode(
            model, items, request.params, allowance=allow(site, exchange, each, len(items), request.params.output_types)
        )
    answer: dict[str, Any] = {"id": _fresh_id(), "meta": _meta(version, input_tokens=result.tokens)}
    if request.texts is not None:
        answer["texts"] = request.texts
    return request, await _embeddings(request, result.outputs), answer


async def _embeddings(request: EmbedRequest, outputs: Sequence[EncodeOutput]) -> dict[str, list[Any]]:
    """By type, each vector serialised by itself: the event loop turns in between."""
    pace = Pace()
    found: dict[str, list[Any]] = {}
    for name in request.types:
        vectors: list[Any] = []
        for output in outputs:
            if output.dense is None:
                raise not_given("dense", output)
            vector = np.ascontiguousarray(convert(output.dense, _DTYPES.get(name, name)))
            if name == "base64":
                vectors.append(base64.b64encode(vector.data).decode("ascii"))
            else:
                vectors.append(part(vector))
            await pace.after(vector.size)
        found[name] = vectors
    return found
