"""Making an engine's pieces the server's own: one id, one time and one model name for the whole answer."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import orjson

from sie_core.errors import InferenceError

__all__ = ["Signature", "Splice"]

_HEAD: Final = re.compile(rb'\{(?:"(?:id|object|created|model)": ?(?:"[^"\\]*"|\d+), ?)*"choices": ?')
_OURS: Final = ("id", "object", "created", "model")
_KINDS: Final = {
    "chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"),
    "completion": ("cmpl", "text_completion", "text_completion"),
}


class Signature:
    """What the server says of itself in an answer: its id, its time (seconds since 1970) and the model's name."""

    __slots__ = ("_chunk", "_whole", "created", "id", "model")

    def __init__(self, kind: Literal["chat", "completion"], model: str) -> None:
        prefix, self._whole, self._chunk = _KINDS[kind]
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model

    def sign(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer with our fields instead of the engine's."""
        return self._over(answer, self._whole)

    def sign_piece(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a piece of one."""
        return self._over(piece, self._chunk)

    def _over(self, answer: Mapping[str, Any], kind: str) -> dict[str, Any]:
        mine = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return mine | {name: value for name, value in answer.items() if name not in mine}


class Splice:
    """Turns an engine's pieces into ours, one by one.

    Engines write all four fields in front of ``choices``, as the same bytes in nearly every piece: what was found in
    front of one piece is cut off the next ones unread. Whatever looks different is parsed, which costs ten times as
    much.
    """

    __slots__ = ("_head", "_keep_usage", "_signature", "_theirs", "_width", "usage")

    def __init__(self, signature: Signature, *, keep_usage: bool) -> None:
        self.usage: Mapping[str, Any] | None = None
        """What the engine charges for the answer, once it has said so."""
        self._signature = signature
        self._keep_usage = keep_usage
        self._head = orjson.dumps(signature.sign_piece({}))[:-1] + b',"choices":'
        self._theirs: bytes | None = None
        self._width = 0

    def take(self, piece: bytes) -> bytes | None:
        """The piece as our clients are to see it; ``None`` for the usage, where nobody asked for it.

        Raises InferenceError for what is no piece of an answer.
        """
        theirs = self._theirs
        if theirs is not None and piece.startswith(theirs) and not piece.startswith(b"[]", self._width):
            return self._head + piece[self._width :]
        return self._read(piece)

    def take_all(self, pieces: Sequence[bytes]) -> bytes | None:
        """Pieces that came together, each as ``take`` has it, on a line of its own; ``None``: nothing is left."""
        ready = [one for one in map(self.take, pieces) if one is not None]
        return b"\n".join(ready) if ready else None

    def _read(self, piece: bytes) -> bytes | None:
        try:
            value = orjson.loads(piece)
        except orjson.JSONDecodeError as error:
            raise InferenceError(f"the engine answered what is no JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("choices"), list):
            raise InferenceError("the engine answered what is no piece of an answer")
        self._learn(piece, value)
        if not value["choices"] and isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
            if not self._keep_usage:
                return None
        return orjson.dumps(self._signature.sign_piece(value))

    def _learn(self, piece: bytes, value: Mapping[str, Any]) -> None:
        head = _HEAD.match(piece)
        names = list(value)
        in_front = names[: names.index("choices")]
        if head is not None and b"\n" not in piece and all(name in in_front for name in _OURS):
            self._theirs = head.group()
            self._width = len(self._theirs)
        else:
            self._theirs = None  # What does not stand in front of this piece may stand anywhere in the next.
