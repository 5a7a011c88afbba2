"""``POST /v1/embeddings``, as OpenAI's clients know it."""

from __future__ import annotations

import orjson

from sie_core.http.endpoint import Site, checked_name
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.inputs import parse_embeddings
from sie_core.http.limits import read_object
from sie_core.http.vectors import openai_data
from sie_core.http.wire import Reply

__all__ = ["embeddings"]


async def embeddings(site: Site, exchange: Exchange) -> Reply:
    """Embed strings or token lists."""
    body = await read_object(exchange, site.limits)
    request = parse_embeddings(body, site.limits)
    with Watched(exchange):
        result = await site.service.encode(checked_name(request.model), request.items, request.params)
    data = await openai_data(result.outputs, as_base64=request.base64)
    return Reply(
        b'{"object":"list","data":%b,"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
        % (data, orjson.dumps(result.model), result.tokens, result.tokens)
    )
