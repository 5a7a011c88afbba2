"""``/v1/chat/completions`` and ``/v1/completions`` as OpenAI's clients know them, and the native ``/v1/generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import orjson

from sie_core._traces import forget_traces
from sie_core.http.endpoint import Site, checked_name, known_model
from sie_core.http.exchange import ClientGone, Exchange, Watched
from sie_core.http.generation_inputs import parse_generate, parse_openai
from sie_core.http.sse import EventStream, Taken
from sie_core.http.wire import Reply, pack
from sie_core.serving import Emit, GenerateResult
from sie_core.types import GenerateRequest

__all__ = ["chat", "completions", "generate"]


async def chat(site: Site, exchange: Exchange) -> Reply | None:
    """Answer a conversation."""
    return await _openai(site, exchange, "chat")


async def completions(site: Site, exchange: Exchange) -> Reply | None:
    """Go on from a prompt."""
    return await _openai(site, exchange, "completion")


async def _openai(site: Site, exchange: Exchange, kind: Literal["chat", "completion"]) -> Reply | None:
    asked = await site.reader.read(exchange, lambda body, limits: parse_openai(body, kind, limits))
    model = checked_name(asked.model)
    await asked.pictures.complete_parts(site.remote)
    if asked.stream:
        events = EventStream(exchange)
        await _stream(site, exchange, model, asked.request, events, events.send)
        return None
    with Watched(exchange):
        result = await site.service.generate(model, asked.request)
    return pack(result.answer)


async def generate(site: Site, exchange: Exchange) -> Reply | None:
    """Go on from a prompt, in the native dialect."""
    model = known_model(site, exchange)
    request, stream = await site.reader.read(exchange, parse_generate)
    if stream:
        events = EventStream(exchange)
        native = _NativePieces(events.send)
        await _stream(site, exchange, model, request, events, native, native)
        return None
    whole = _Whole()
    with Watched(exchange):
        result = await site.service.stream(model, request, whole, whole=True)
    answer = {
        "model": result.model,
        "text": "".join(whole.texts),
        "finish_reason": whole.finish_reason,
        "usage": dict(result.usage),
        "ttft_ms": _ttft_ms(result),
    }
    return pack(answer, msgpack=exchange.wants_msgpack)


async def _stream(
    site: Site,
    exchange: Exchange,
    model: str,
    request: GenerateRequest,
    events: EventStream,
    emit: Emit,
    native: _NativePieces | None = None,
) -> None:
    """Send an answer piece by piece, and an error as what it is: a status, or what breaks the answer off."""
    try:
        # Only as long as the engine has it: a server tells of its own last word as if the client had left.
        with Watched(exchange), Taken(exchange, events):
            result = await site.service.stream(model, request, emit)
            if native is not None:
                await native.finish(result)
    except ClientGone:
        raise
    except Exception as error:
        if not events.started:
            raise
        await events.fail(error)
        forget_traces(error)
        return
    await events.end()


def _ttft_ms(result: GenerateResult) -> float | None:
    return None if result.first_s is None else round(result.first_s * 1000, 3)


class _Whole:
    """Gathers an answer's pieces."""

    __slots__ = ("finish_reason", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finish_reason: str | None = None

    async def __call__(self, pieces: bytes) -> None:
        for piece in pieces.split(b"\n"):
            for choice in orjson.loads(piece)["choices"]:
                self.texts.append(choice.get("text") or "")
                self.finish_reason = choice.get("finish_reason") or self.finish_reason


class _NativePieces:
    """Turns OpenAI's pieces into the native dialect's. The last one is held back until all of the figures are there."""

    __slots__ = ("_emit", "_id", "_last", "_seq")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._id = ""
        self._seq = 0
        self._last: str | None = None

    async def __call__(self, pieces: bytes) -> None:
        ready = [made for piece in pieces.split(b"\n") for made in self._made(orjson.loads(piece))]
        if ready:
            await self._emit(b"\n".join(ready))

    async def finish(self, result: GenerateResult) -> None:
        """Send the piece that ends the answer."""
        self._id = result.id
        last = {"finish_reason": self._last, "usage": dict(result.usage), "ttft_ms": _ttft_ms(result)}
        await self._emit(self._numbered({"text_delta": "", "done": True, **last}))

    def _made(self, piece: Mapping[str, Any]) -> Iterator[bytes]:
        self._id = piece["id"]
        for choice in piece["choices"]:
            self._last = choice.get("finish_reason") or self._last
            text = choice.get("text") or ""
            if text:
                logprobs = _logprobs(choice.get("logprobs"))
                shown = {"logprobs": logprobs} if logprobs else {}
                yield self._numbered({"text_delta": text, "done": False, **shown})

    def _numbered(self, said: Mapping[str, Any]) -> bytes:
        self._seq += 1
        return orjson.dumps({"request_id": self._id, "seq": self._seq - 1, **said})


def _logprobs(given: Any) -> list[dict[str, Any]]:
    """OpenAI's columns as one entry a token."""
    if not isinstance(given, dict):
        return []
    tops = given.get("top_logprobs") or []
    return [
        {"token": token, "logprob": value, **({"top_logprobs": tops[place]} if place < len(tops) else {})}
        for place, (token, value) in enumerate(
            zip(given.get("tokens") or [], given.get("token_logprobs") or [], strict=False)
        )
    ]
