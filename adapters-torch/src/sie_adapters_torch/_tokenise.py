"""From items to token ids. Thread-safe: the tokenizer is only read, and it releases the GIL while it works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import InputTooLong, InvalidInput, Item, ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._options import LoadOptions

__all__ = ["Tokeniser", "Tokens"]


@frozen(eq=False)
class Tokens:
    """One item's ids, int64 (n,), special ones included; the first ``prompt`` of them come from the prompt.

    ``types``: token type ids, int64 (n,); ``None``: all 0. ``seen``: how many of the leading tokens the others attend
    to; ``None``: all.
    """

    ids: NDArray[np.int64]
    prompt: int = 0
    types: NDArray[np.int64] | None = None
    seen: int | None = None

    @property
    def attended(self) -> int:
        return len(self.ids) if self.seen is None else self.seen


class Tokeniser:
    """A model's fast tokenizer with its limit. ``limit``: tokens an input may have, special ones included."""

    def __init__(self, backend: Any, *, limit: int | None, vocabulary: int, pad_id: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.limit = limit
        self.vocabulary = vocabulary
        self.pad_id = pad_id
        self._before, self._after = _special_ids(backend)
        # Some models ship a tokenizer with more words than they have rows for.
        self._may_exceed = backend.get_vocab_size() > vocabulary
        self._prompts: dict[str, list[int]] = {}

    @classmethod
    def load(cls, files: ModelFiles, options: LoadOptions, config: Any) -> Tokeniser:
        """Raises ModelSourceInvalid."""
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        try:
            wrapper: Any = AutoTokenizer.from_pretrained(
                str(files.folder), local_files_only=True, trust_remote_code=options.trust_remote_code, use_fast=True
            )
        except Exception as error:  # the tokenizers library raises that very class for a file it can't read
            text = str(error).strip().splitlines()
            raise ModelSourceInvalid(
                f"{files.folder}: the tokenizer can't be loaded: {type(error).__name__}: {text[0] if text else ''}"
            ) from error
        if not getattr(wrapper, "is_fast", False):
            raise ModelSourceInvalid(f"{files.folder}: the model has no fast tokenizer (tokenizer.json)")
        # A copy: the wrapper sets padding and truncation on its own, and calls from several threads would clash.
        backend = Tokenizer.from_str(wrapper.backend_tokenizer.to_str())
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = int(getattr(text_config, "vocab_size", 0) or backend.get_vocab_size())
        if backend.get_vocab_size() < vocabulary // 2:
            # transformers makes a tokenizer of special tokens alone where the vocabulary is missing.
            raise ModelSourceInvalid(
                f"{files.folder}: the tokenizer knows {backend.get_vocab_size()} words and the model {vocabulary}: "
                "its files (tokenizer.json, vocab.txt) are missing or of another model"
            )
        pad_id = wrapper.pad_token_id if wrapper.pad_token_id is not None else 0
        return cls(backend, limit=files.max_length, vocabulary=vocabulary, pad_id=pad_id)

    def __call__(self, items: Sequence[Item], *, prompt: str, truncate: bool) -> list[Tokens]:
        """One ``Tokens`` an item, in order. Raises InvalidInput and InputTooLong with the item's ``index``."""
        texts = [(index, item.text) for index, item in enumerate(items) if item.text is not None]
        found: dict[int, list[int]] = {}
        if texts:
            found = dict(zip([index for index, _ in texts], self._encode(texts, prompt), strict=True))
        for index, item in enumerate(items):
            if index not in found:
                found[index] = self._from_ids(item, index, prompt)
        skip = len(self._before) + len(self._prompt_ids(prompt)) if prompt else 0
        return [self._cut(found[index], index, skip, truncate=truncate) for index in range(len(items))]

    def _encode(self, texts: Sequence[tuple[int, str]], prompt: str) -> list[list[int]]:
        whole = [prompt + text for _, text in texts] if prompt else [text for _, text in texts]
        try:
            if len(whole) == 1:
                return [self._backend.encode(whole[0]).ids]
            return [encoding.ids for encoding in self._backend.encode_batch_fast(whole)]
        except (TypeError, UnicodeError):
            for index, text in texts:
                try:
                    text.encode()
                except UnicodeError as error:
                    raise InvalidInput(f"the text is not valid Unicode: {error}", index=index) from error
            raise

    def _from_ids(self, item: Item, index: int, prompt: str) -> list[int]:
        given = item.token_ids
        if given is None:
            raise InvalidInput("the item has neither text nor token ids", index=index, param="input")
        wrong = next((token for token in given if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise InvalidInput(
                f"token id {wrong} is not in the model's vocabulary of {self.vocabulary}", index=index, param="input"
            )
        ids, before, after = list(given), self._before, self._after
        if (before or after) and ids[: len(before)] == before and ids[len(ids) - len(after) :] == after:
            ids = ids[len(before) : len(ids) - len(after)]  # the client added them itself
        return [*before, *(self._prompt_ids(prompt) if prompt else ()), *ids, *after]

    def _prompt_ids(self, prompt: str) -> list[int]:
        ids = self._prompts.get(prompt)
        if ids is None:
            if len(self._prompts) >= 64:  # instructions come from requests: keep no more than a few
                self._prompts.clear()
            ids = self._prompts[prompt] = self._backend.encode(prompt, add_special_tokens=False).ids
        return ids

    def _cut(self, ids: list[int], index: int, skip: int, *, truncate: bool) -> Tokens:
        limit = self.limit
        if not ids:
            raise InvalidInput("the text has no tokens", index=index, param="input")
        if limit is not None and len(ids) > limit:
            if not truncate:
                raise InputTooLong(tokens=len(ids), limit=limit, index=index)
            ids = [*ids[: max(0, limit - len(self._after))], *self._after][:limit]
        array = np.asarray(ids, dtype=np.int64)
        if self._may_exceed and int(array.max()) >= self.vocabulary:
            raise InvalidInput(
                f"the tokenizer gives token id {array.max()}, and the model knows {self.vocabulary}", index=index
            )
        return Tokens(array, min(skip, len(ids)))


def _special_ids(backend: Any) -> tuple[list[int], list[int]]:
    """The special ids that the tokenizer puts before and after a text."""
    sample = "a"
    plain, full = (backend.encode(sample, add_special_tokens=special).ids for special in (False, True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ModelSourceInvalid("the tokenizer changes a text's tokens when it adds special ones: not supported")
