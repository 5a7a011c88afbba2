"""Requests to an engine: OpenAI's routes over loopback, answers and pieces of streams as they come.

Pieces are passed on as the bytes that the engine wrote. They are looked into only where the words in them say that
something is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

from sie_core import InferenceError, InvalidInput, ResourceExhausted, SieError

__all__ = ["checked_answer", "error_of", "pieces", "raise_for"]

_ERROR = b'"error"'
_ABORT = b'"abort"'
_ABORT_TEXT = "'NoneType' object has no attribute 'name'"
"""What 0.5.10 makes of an aborted stream, as if the request had been bad."""
_SOURCES = re.compile(r'\s*\n\s*File "/')
"""Where a validator goes on with the place in the engine's own sources: nothing for clients."""


async def pieces(read: Callable[[], Awaitable[bytes]]) -> AsyncGenerator[list[bytes]]:
    """The JSON objects of a stream of server-sent events, up to its ``[DONE]``: those together that came together.

    ``read`` gives what has come, and nothing once that was all.

    Raises:
        InvalidInput, InferenceError: the engine says so in the stream, or aborted the request.
        EOFError: the stream ended without its end.
    """
    first = True
    begun: list[bytes] = []  # of a line; one with the figures of a long prompt may have many megabytes
    while data := await read():
        if b"\n" not in data:
            begun.append(data)
            continue
        *lines, rest = (b"".join((*begun, data)) if begun else data).split(b"\n")
        begun = [rest] if rest else []
        run: list[bytes] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            event = line[5:].strip()
            if event == b"[DONE]":
                if run:
                    yield run
                return
            # Text can't match: its quotes are escaped.
            if _ERROR in event or _ABORT in event:
                if run:
                    yield run
                    run = []
                _look_into(event, first)
            first = False
            run.append(event)
        if run:
            yield run
    raise EOFError("the engine's stream broke off")


def _look_into(event: bytes, first: bool) -> None:
    piece = json.loads(event)
    error = piece.get("error")
    if error:
        message = str(error.get("message") if isinstance(error, dict) else error)
        code = error.get("code") if isinstance(error, dict) else None
        if not first or message == _ABORT_TEXT or not isinstance(code, int):
            # Once it has begun to answer, the request can't have been at fault.
            raise InferenceError(f"the engine ended the request: {message}")
        raise error_of(code, message)
    _refuse_aborted(piece)


def checked_answer(body: bytes) -> dict[str, Any]:
    """A whole answer. Raises InferenceError for what is none, or was aborted."""
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise InferenceError("the engine's answer is no JSON") from error
    if not isinstance(answer, dict):
        raise InferenceError("the engine's answer is no object")
    _refuse_aborted(answer)
    return answer


def _refuse_aborted(answer: Mapping[str, Any]) -> None:
    for choice in answer.get("choices") or ():
        if choice.get("finish_reason") == "abort":
            raise InferenceError("the engine aborted the request")


def error_of(status: int, message: str) -> SieError:
    """What an answer with an error status means."""
    if status in (400, 404, 413, 422):
        return InvalidInput(message)
    if status == 503:
        return ResourceExhausted(message, retry_after_s=1.0)
    return InferenceError(f"the engine answered {status}: {message}")


def raise_for(status: int, body: bytes) -> NoReturn:
    """Raise what an error's answer means; its texts have several shapes."""
    message = body.decode(errors="replace")[:500]
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if isinstance(told, dict):
        inner = told.get("error", told)
        told_text = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        message = _SOURCES.split(str(told_text or message), maxsplit=1)[0]
    raise error_of(status, message)
