"""``POST /v1/embeddings``, as OpenAI's clients know it."""

from __future__ import annotations

import orjson

from sie_core.errors import InvalidInput
from sie_core.http.endpoint import Site, allow, checked_name
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.openai_inputs import EmbeddingsRequest, parse_embeddings
from sie_core.http.vectors import number_bytes, openai_data
from sie_core.http.wire import Reply
from sie_core.types import Capabilities

__all__ = ["embeddings"]


async def embeddings(site: Site, exchange: Exchange) -> Reply:
    """Embed strings, token lists or images."""
    request = await site.reader.read(exchange, parse_embeddings)
    model = checked_name(request.model)
    with Watched(exchange):
        if request.data_url is not None:
            _refuse_pasted(request, (await site.service.describe(model)).capabilities)
        items, _ = await request.pictures.complete(request.items, None, site.remote)
        each = number_bytes(request.dtype, as_base64=request.base64)
        result = await site.service.encode(
            model,
            items,
            request.params,
            allowance=allow(site, exchange, each, len(items), request.params.output_types),
        )
    if request.data_url is not None:  # it may not have been known before what the model takes
        _refuse_pasted(request, site.service.model(result.model).capabilities)
    data = await openai_data(result.outputs, as_base64=request.base64, dtype=request.dtype, normalize=request.normalize)
    return Reply(
        b'{"object":"list","data":%b,"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
        % (data, orjson.dumps(result.model), result.tokens, result.tokens)
    )


def _refuse_pasted(request: EmbeddingsRequest, known: Capabilities | None) -> None:
    """An image that would be read as text, by a model that could see it. Raises InvalidInput."""
    if known is not None and "image" in known.inputs:
        message = "the text is the data URL of an image: send modality: image with it"
        raise InvalidInput(message, index=request.data_url, param="input")
