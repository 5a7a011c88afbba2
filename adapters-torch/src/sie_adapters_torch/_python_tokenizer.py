"""A tokenizer that transformers has in Python only, such as SigLIP's, with the face of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

__all__ = ["PythonTokenizer"]


@frozen
class _Encoding:
    ids: list[int]


class PythonTokenizer:
    """What ``Tokeniser`` asks of a backend. Thread-safe: nothing is kept from one text to the next."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def get_vocab_size(self) -> int:
        return len(self._wrapper)

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._wrapper.get_vocab().get(token)
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> _Encoding:
        text.encode()  # raises UnicodeError, as the tokenizers library does; what is underneath says something else
        found = self._wrapper(text, add_special_tokens=add_special_tokens, truncation=False, padding=False)
        return _Encoding([int(token) for token in found["input_ids"]])

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[_Encoding]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
