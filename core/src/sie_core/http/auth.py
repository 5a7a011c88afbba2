"""API keys: who may ask for what. Keys are stored as SHA-256 and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from sie_core.config import ApiKey, is_loopback, parse_api_key
from sie_core.errors import ConfigError, ConfigProblem, Forbidden, Unauthorized

if TYPE_CHECKING:
    from sie_core.config import ServerConfig

__all__ = ["KeyRing", "check_bind", "role_for"]

_OPEN: Final = frozenset({"/", "/health", "/healthz", "/readyz"})
_ADMIN: Final = "/v1/admin"
_ADMIN_ROLE: Final = "admin"


def role_for(path: str) -> str | None:
    """The role that a path wants; ``None``: anybody may ask."""
    if path in _OPEN:
        return None
    return _ADMIN_ROLE if path == _ADMIN or path.startswith(_ADMIN + "/") else "inference"


class KeyRing:
    """The keys of a server. Without any, everything is allowed, and :func:`check_bind` keeps the server on loopback."""

    def __init__(self, lines: Iterable[str]) -> None:
        """Lines are ``role:name:sha256-of-key``. Raises ConfigError for one that is not."""
        self._keys = tuple(_parse(number, line) for number, line in enumerate(lines, start=1))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Let the request pass, or say why not. True: the client runs the server.

        The key stands in ``Authorization: Bearer``, or in ``api-key`` or ``x-api-key``, where some clients put it.

        Raises:
            Unauthorized: no key, or an unknown one.
            Forbidden: the key's role does not reach this far.
        """
        if not self._keys:
            return True
        wanted = role_for(path)
        if wanted is None:
            return False
        role = self._role_of(_secret(headers))
        if role not in (wanted, _ADMIN_ROLE):
            raise Forbidden(f"this key has the role {role!r}, and {path} wants {wanted!r}")
        return role == _ADMIN_ROLE

    def _role_of(self, secret: bytes) -> str:
        if not secret:
            raise Unauthorized("an API key is required: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(secret).hexdigest()
        role = None
        for key in self._keys:  # Never stops early: the time taken says nothing about which key is near.
            if hmac.compare_digest(key.sha256, digest):
                role = key.role
        if role is None:
            raise Unauthorized("invalid API key")
        return role


def _secret(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and secret.strip():
        return secret.strip()
    return (headers.get(b"api-key") or headers.get(b"x-api-key") or b"").strip()


def _parse(number: int, line: str) -> ApiKey:
    try:
        return parse_api_key(line)
    except ValueError as error:
        raise ConfigError([ConfigProblem(f"key {number}: {error}", path="server.api_keys")]) from None


def check_bind(settings: ServerConfig) -> None:
    """Refuse to listen beyond this machine without keys. Raises ConfigError."""
    if settings.api_keys or settings.allow_insecure_bind or is_loopback(settings.host):
        return
    message = (
        f"{settings.host} can be reached from other machines and no API keys are configured: set server.api_keys_file "
        "(SIE_API_KEYS_FILE), or server.allow_insecure_bind: true to serve everybody"
    )
    raise ConfigError([ConfigProblem(message, path="server.host")])
