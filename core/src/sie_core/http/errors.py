"""From errors to answers: one table for every error of SIE, several dialects, JSON whatever the request accepts.

The native dialect answers ``{"detail": {...}}``, the OpenAI dialect ``{"error": {...}}``; those who rerank get that
and the message outside as well, as ``message``, where Cohere has it, and as ``detail``, where Jina has it; paths that
clients of both use carry both shapes. Everything that leaves the server as an error goes through :func:`render`.
"""

from __future__ import annotations

import enum
import logging
import math
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, ClassVar

from attrs import frozen
from starlette.exceptions import HTTPException

from sie_core import errors as e
from sie_core.http.wire import Reply, pack

__all__ = ["RULES", "Dialect", "HttpError", "Rule", "render", "rule_for"]

_log = logging.getLogger(__name__)

MIN_RETRY_S = 1
MAX_RETRY_S = 120
DEFAULT_RETRY_S = 5.0
"""Said where the error itself was not measured (memory that ran out during inference, a transition called off)."""


class Dialect(enum.Enum):
    """Which clients use a path."""

    NATIVE = "native"
    OPENAI = "openai"
    COHERE = "cohere"
    BOTH = "both"


_FOREIGN = frozenset({Dialect.OPENAI, Dialect.COHERE})
"""Dialects that have 429 for a full queue."""


class HttpError(e.RequestError):
    """A request that HTTP itself refuses: no such path, a wrong method, an unsupported media type."""

    code: ClassVar[str] = "INVALID_INPUT"

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.wire_code = code
        self.param = param
        self.headers = dict(headers or {})
        super().__init__(message)


@frozen
class Rule:
    """How one kind of error looks on the wire.

    ``code=None``: the error's own. ``retry``: the client may send the same request again; anything else is answered
    with ``x-should-retry: false``. ``opaque``: the text stays in the log, since it speaks of the inside of the server.
    """

    status: int
    code: str | None = None
    openai_status: int | None = None
    retry: bool = False
    opaque: bool = False


_LOAD_FAILED = Rule(502, "MODEL_LOAD_FAILED")
_INTERNAL = Rule(500, "INTERNAL_ERROR", opaque=True)
_BUSY = Rule(503, retry=True)

RULES: dict[type[BaseException], Rule] = {
    e.InvalidInput: Rule(400),
    e.InputTooLong: Rule(400),
    e.Unsupported: Rule(400),
    e.BodyTooLarge: Rule(413),
    e.ModelNotFound: Rule(404),
    e.Unauthorized: Rule(401),
    e.Forbidden: Rule(403),
    e.ModelLoading: _BUSY,
    e.LoraLoading: _BUSY,
    e.QueueFull: Rule(503, openai_status=429, retry=True),
    e.ResourceExhausted: _BUSY,
    e.ReserveOutdated: _BUSY,
    e.ShuttingDown: _BUSY,
    e.DeadlineExceeded: Rule(504, retry=True),
    e.ModelSourceNotFound: _LOAD_FAILED,
    e.ModelSourceInvalid: _LOAD_FAILED,
    e.GatedModel: _LOAD_FAILED,
    e.UnsafeSource: _LOAD_FAILED,
    e.MissingDependency: _LOAD_FAILED,
    e.MissingAdapter: _LOAD_FAILED,
    e.NeverFits: _LOAD_FAILED,
    e.DeviceNotFound: _LOAD_FAILED,
    e.EngineStartError: _LOAD_FAILED,
    e.ModelLoadFailed: _LOAD_FAILED,
    e.DeviceOutOfMemory: Rule(503, "RESOURCE_EXHAUSTED", retry=True),
    e.HostOutOfMemory: Rule(503, "RESOURCE_EXHAUSTED", retry=True),
    e.InferenceError: Rule(500),
    e.NonFiniteOutput: Rule(500),
    e.EngineDied: Rule(500, retry=True),
    e.HookFailed: Rule(500),
    e.HookTimeout: Rule(503, "RESOURCE_EXHAUSTED", retry=True),
    e.TransitionCancelled: Rule(503, "MODEL_LOADING", retry=True),
    e.WakeCheckFailed: Rule(503, "MODEL_LOADING", retry=True),
    e.ConfigError: _INTERNAL,
    e.PluginBroken: _INTERNAL,
    e.PluginConflict: _INTERNAL,
    e.PluginIncompatible: _INTERNAL,
    e.HostMemoryError: _INTERNAL,
    e.LedgerError: _INTERNAL,
    # Errors that plugins derive from an inner node of the tree, rather than from a leaf.
    e.RequestError: Rule(400),
    e.Unavailable: _BUSY,
    e.LoadError: _LOAD_FAILED,
    e.OutOfMemory: Rule(503, "RESOURCE_EXHAUSTED", retry=True),
    e.TransitionError: Rule(503, "RESOURCE_EXHAUSTED", retry=True),
    e.PluginError: _INTERNAL,
    e.SieError: _INTERNAL,
}

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

_HTTP_CODES = {
    401: "UNAUTHORIZED",
    403: "FORBIDDEN",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    413: "BODY_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
}

_DETAILS = (
    "index",
    "param",
    "tokens",
    "limit",
    "size",
    "supported",
    "suggestions",
    "items",
    "error_class",
    "permanent",
    "attempts",
)


def rule_for(kind: type[BaseException]) -> Rule | None:
    """The rule of an error type: its own, or that of the nearest ancestor that has one."""
    return next((RULES[ancestor] for ancestor in kind.__mro__ if ancestor in RULES), None)


def render(error: BaseException, dialect: Dialect, *, operator: bool = False) -> Reply:
    """Turn an error into an answer, in JSON: public clients look for nothing else, whatever they accept.

    Unknown exceptions are logged, and become a 500 that says nothing of the inside.

    ``operator``: whether who asks may see the error's whole message and its ``details``.
    """
    error = _translate(error)
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        rule = Rule(error.status, error.wire_code)
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    else:
        rule = rule_for(type(error)) or _INTERNAL
    message = _opaque(error) if rule.opaque else _message(error, operator=operator)
    if isinstance(error, e.InferenceError) and error.__cause__ is not None:
        # What an engine raised would be seen by its client only.
        _log.error("%s", error.message, exc_info=error.__cause__)
    detail = {"code": rule.code or getattr(error, "code", "INTERNAL_ERROR"), "message": message, **_details(error)}
    if operator and isinstance(error, e.SieError) and error.details and not rule.opaque:
        detail["details"] = error.details
    status = rule.openai_status or rule.status if dialect in _FOREIGN else rule.status
    if not rule.retry:
        headers.append((b"x-should-retry", b"false"))
    elif status in (429, 503):
        headers.append((b"retry-after", b"%d" % _retry_after(error)))
    if status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    body = _body(detail, status, dialect)
    return pack(body, status=status, headers=tuple(headers))


def _translate(error: BaseException) -> BaseException:
    """Starlette's own refusals (unknown path, wrong method, a plugin's HTTPException) in our words."""
    if not isinstance(error, HTTPException):
        return error
    status = error.status_code
    code = _HTTP_CODES.get(status, "INVALID_INPUT" if status < 500 else "INTERNAL_ERROR")
    message = error.detail
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"method not allowed; this path takes {(error.headers or {}).get('Allow', 'another')}"
    return HttpError(status, code, message, headers=error.headers)


def _message(error: BaseException, *, operator: bool) -> str:
    index = getattr(error, "index", None)
    text = str(error)
    if isinstance(error, e.SieError):
        text = error.message if operator else error.public
    return text if index is None or text.startswith("item ") else f"item {index}: {text}"


def _opaque(error: BaseException) -> str:
    number = secrets.token_hex(4)
    _log.error("request failed (error %s)", number, exc_info=error)
    return f"internal error {number}; the server's log says more"


def _details(error: BaseException) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _DETAILS:
        value = getattr(error, name, None)
        if not isinstance(value, str | int | float | tuple) or value == ():
            continue
        found[name] = list(value) if isinstance(value, tuple) else value
    if isinstance(error, e.LoadError):
        found |= {"error_class": type(error).__name__, "attempts": found.get("attempts", 1)}
    return found


def _retry_after(error: BaseException) -> int:
    seconds = getattr(error, "retry_after_s", DEFAULT_RETRY_S)
    if not math.isfinite(seconds):
        return MAX_RETRY_S
    return max(MIN_RETRY_S, min(MAX_RETRY_S, math.ceil(seconds)))


def _body(detail: dict[str, Any], status: int, dialect: Dialect) -> dict[str, Any]:
    if dialect is Dialect.NATIVE:
        return {"detail": detail}
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {**detail, "type": kind, "param": detail.get("param")}
    if dialect is Dialect.COHERE:
        return {"message": detail["message"], "detail": detail["message"], "error": error}
    return {"error": error} if dialect is Dialect.OPENAI else {"error": error, "detail": detail}
