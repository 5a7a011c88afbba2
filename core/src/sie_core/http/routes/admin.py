"""``/v1/admin``: what the server holds, and why. Wants the admin role."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from sie_core.config import check_name
from sie_core.errors import InvalidInput, Unsupported
from sie_core.http.endpoint import Handler, Site, checked_name, model_in_path
from sie_core.http.errors import HttpError
from sie_core.http.exchange import Exchange, Watched
from sie_core.http.views import decision, explanation, model_status
from sie_core.http.wire import Reply, pack
from sie_core.sources import parse_source

if TYPE_CHECKING:
    from sie_core.residency import ModelStatus
    from sie_core.serving import Service

__all__ = ["ACTIONS", "decisions", "explain", "lora"]

_LONGEST_SOURCE = 4096  # characters; no path is longer


async def decisions(site: Site, exchange: Exchange) -> Reply:
    """Why models were evicted, refused or dropped; ``?limit=N`` for the newest N, ``?model=NAME`` for those of one."""
    found = list(site.service.decisions())
    asked = _query(exchange, ("limit", "model"))
    if "model" in asked:
        name = checked_name(asked["model"])
        found = [one for one in found if one.model == name or name in one.victims]
    limit = asked.get("limit", "")
    if limit:
        if not limit.isdecimal() or len(limit) > 9:
            raise InvalidInput("'limit' must be a whole number", param="limit")
        found = found[-int(limit) :] if int(limit) else []
    return pack({"decisions": [decision(one) for one in found]}, msgpack=exchange.wants_msgpack)


async def explain(site: Site, exchange: Exchange) -> Reply:
    """Why a model is where it is, and what would have kept it."""
    return pack(explanation(site.service.explain(model_in_path(exchange))), msgpack=exchange.wants_msgpack)


async def lora(site: Site, exchange: Exchange) -> Reply:
    """Load or unload a LoRA adapter, and answer with the model's status."""
    act = _unload_lora if exchange.scope["method"] == "DELETE" else _load_lora
    return await act(site, exchange)


async def _load_lora(site: Site, exchange: Exchange) -> Reply:
    """From ``source`` (none for one that is configured); ``wait_s`` bounds the wait."""
    options = await site.reader.read_settings(exchange)
    _check_known(options, ("source", "wait_s"))
    with Watched(exchange):
        status = await site.service.load_lora(
            model_in_path(exchange), _lora_in_path(exchange), _lora_source(options), wait_s=_seconds(options)
        )
    return pack(model_status(status), msgpack=exchange.wants_msgpack)


async def _unload_lora(site: Site, exchange: Exchange) -> Reply:
    """Once no request uses it; ``?wait_s=N`` bounds the wait."""
    options: dict[str, Any] = dict(_query(exchange, ("wait_s",)))
    with contextlib.suppress(ValueError):  # refused below, as in a body
        options = {name: float(value) for name, value in options.items()}
    with Watched(exchange):
        status = await site.service.unload_lora(
            model_in_path(exchange), _lora_in_path(exchange), wait_s=_seconds(options)
        )
    return pack(model_status(status), msgpack=exchange.wants_msgpack)


def _lora_in_path(exchange: Exchange) -> str:
    name: str = exchange.scope["path_params"]["lora"]
    wrong = check_name(name) if name else "it is empty"
    if wrong is not None:
        raise InvalidInput(f"no name for a LoRA adapter: {wrong}", param="lora")
    return name


def _lora_source(options: dict[str, Any]) -> str | None:
    text = options.get("source")
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidInput("'source' must be a text such as path:/models/billing-lora", param="source")
    if len(text) > _LONGEST_SOURCE:  # it would come back whole in the refusal
        raise InvalidInput(f"'source' has {len(text)} characters; {_LONGEST_SOURCE} at most", param="source")
    try:
        source = parse_source(text, None)
    except ValueError as error:
        raise InvalidInput(str(error), param="source") from error
    if source.kind == "path" and not Path(source.location).is_absolute():
        raise InvalidInput("a 'path:' source must be an absolute path here", param="source")
    return str(source)


async def _load(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    return await service.load(model, wait_s=_seconds(options))


async def _unload(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    force = options.get("force", False)
    if not isinstance(force, bool):
        raise InvalidInput("'force' must be true or false", param="force")
    return await service.unload(model, force=force, wait_s=_seconds(options))


async def _park(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    return await _in_tier(service, service.park(model, wait_s=_seconds(options)))


async def _wake(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    return await _in_tier(service, service.wake(model, wait_s=_seconds(options)))


async def _pin(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    return service.pin(model)


async def _unpin(service: Service, model: str, options: dict[str, Any]) -> ModelStatus:
    return service.unpin(model)


async def _in_tier(service: Service, asked: Awaitable[ModelStatus]) -> ModelStatus:
    try:
        return await asked
    except Unsupported as error:
        if service.has_host_tier:
            raise  # this model can't be parked, others can: the caller's mistake
        raise HttpError(501, "UNSUPPORTED", error.message) from error


def _query(exchange: Exchange, known: Sequence[str]) -> dict[str, str]:
    """The query's fields, of several values the last. Raises InvalidInput for one that is not known, as in a body."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    _check_known(asked, known)
    return {name: values[-1] for name, values in asked.items()}


def _check_known(options: Iterable[Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise InvalidInput(
                f"{str(name)[:80]!r} is no field here; there is {' and '.join(known)}", param=str(name)[:80]
            )


def _seconds(options: dict[str, Any]) -> float | None:
    value = options.get("wait_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InvalidInput("'wait_s' must be a number of seconds", param="wait_s")
    return float(value)


def _handler(
    act: Callable[[Service, str, dict[str, Any]], Awaitable[ModelStatus]], known: Sequence[str] = ("wait_s",)
) -> Handler:
    async def handle(site: Site, exchange: Exchange) -> Reply:
        """Do it, and answer with the model's status. A body is optional: ``wait_s``, and ``force`` for unload."""
        options = await site.reader.read_settings(exchange)
        _check_known(options, known)
        _seconds(options)  # also for what never waits
        with Watched(exchange):
            status = await act(site.service, model_in_path(exchange), options)
        return pack(model_status(status), msgpack=exchange.wants_msgpack)

    return handle


ACTIONS: dict[str, Handler] = {
    "load": _handler(_load),
    "unload": _handler(_unload, ("wait_s", "force")),
    "park": _handler(_park),
    "wake": _handler(_wake),
    "pin": _handler(_pin),
    "unpin": _handler(_unpin),
}
"""``POST /v1/admin/models/{model}/ACTION``."""
