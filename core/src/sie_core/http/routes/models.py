"""``GET /v1/models`` and ``/v1/models/{model}``: both dialects in one body."""

from __future__ import annotations

from sie_core.http.endpoint import Site, model_in_path
from sie_core.http.exchange import Exchange
from sie_core.http.views import model_card, openai_card
from sie_core.http.wire import Reply, pack

__all__ = ["list_models", "show_model"]


async def list_models(site: Site, exchange: Exchange) -> Reply:
    """Every configured model."""
    statuses = await site.service.described()
    known = await site.catalogue.known(statuses)
    answer = {
        "object": "list",
        "data": [openai_card(status, site) for status in statuses],
        "models": [
            model_card(status, one, operator=exchange.operator) for status, one in zip(statuses, known, strict=True)
        ],
    }
    return pack(answer, msgpack=exchange.wants_msgpack)


async def show_model(site: Site, exchange: Exchange) -> Reply:
    """One model; 404 with what may have been meant."""
    status = await site.service.describe(model_in_path(exchange))
    (known,) = await site.catalogue.known([status])
    card = model_card(status, known, operator=exchange.operator)
    return pack({**openai_card(status, site), **card}, msgpack=exchange.wants_msgpack)
