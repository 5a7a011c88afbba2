"""From items to token ids. Thread-safe: the tokenizer is only read, and it releases the GIL while it works."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import InputTooLong, InvalidInput, Item, ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._growth import check_growth
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._python_tokenizer import PythonTokenizer

__all__ = ["Tokeniser", "Tokens"]


_SPECIAL_TOKENS = ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "unk_token", "mask_token")


@frozen(eq=False)
class Tokens:
    """One item's ids, int64 (n,), special ones included; the first ``prompt`` of them come from the prompt.

    ``types``: token type ids, int64 (n,); ``None``: all 0. ``seen``: how many of the leading tokens the others attend
    to; ``None``: all. ``read``: how many were read from the item, where others were added; ``None``: all.
    """

    ids: NDArray[np.int64]
    prompt: int = 0
    types: NDArray[np.int64] | None = None
    seen: int | None = None
    read: int | None = None

    @property
    def read_tokens(self) -> int:
        return len(self.ids) if self.read is None else self.read

    @property
    def attended(self) -> int:
        return len(self.ids) if self.seen is None else self.seen


class Tokeniser:
    """A model's fast tokenizer with its limit.

    ``limit``: tokens an input may have, special ones included. ``filler_id``: the token that stands for nothing yet: a
    mask token, where there is none that of the end.
    """

    def __init__(
        self, backend: Any, *, limit: int | None, vocabulary: int, pad_id: int, filler_id: int | None = None
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.limit = limit
        self.vocabulary = vocabulary
        self.pad_id = pad_id
        self.filler_id = pad_id if filler_id is None else filler_id
        self._before, self._after = _special_ids(backend)
        # Some models ship a tokenizer with more words than they have rows for.
        self._may_exceed = backend.get_vocab_size() > vocabulary
        self._prompts: dict[str, list[int]] = {}
        self.inputs: tuple[str, ...] = ()
        """What its models take, by the names that transformers has for it."""
        self.unknown_id: int | None = None
        self.positions: int | None = None
        """Those that were found by trying, where the files promise more."""
        self.pads_left = False
        self.cuts_left = False
        """Whether the start of a text is left out where it is too long, not its end."""
        self.special_ids: dict[str, int] = {}
        """Ids by the names that transformers has for them: ``cls_token``, ``eos_token``, …"""

    @classmethod
    def load(cls, files: ModelFiles, options: LoadOptions, config: Any, *, slow: bool = False) -> Tokeniser:
        """``slow``: take one that transformers has in Python only, too. Raises ModelSourceInvalid."""
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
        fast = getattr(wrapper, "is_fast", False)
        if not fast and not slow:
            raise ModelSourceInvalid(f"{files.folder}: the model has no fast tokenizer (tokenizer.json)")
        # A copy: the wrapper sets padding and truncation on its own, and calls from several threads would clash.
        backend: Any = Tokenizer.from_str(wrapper.backend_tokenizer.to_str()) if fast else PythonTokenizer(wrapper)
        if fast:
            check_growth(backend.normalizer, files.folder)
        if files.lower_case:
            _lowercase_first(backend, files)
        _end_with_eos(backend, wrapper, files)
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = int(getattr(text_config, "vocab_size", 0) or backend.get_vocab_size())
        if not vocabulary // 2 <= backend.get_vocab_size() <= 2 * vocabulary:
            # transformers makes a tokenizer of special tokens alone where the vocabulary is missing.
            raise ModelSourceInvalid(
                f"{files.folder}: the tokenizer knows {backend.get_vocab_size()} words and the model {vocabulary}: "
                "its files (tokenizer.json, vocab.txt) are missing or of another model"
            )
        pad_id = wrapper.pad_token_id if wrapper.pad_token_id is not None else 0
        filler_id = wrapper.mask_token_id if wrapper.mask_token_id is not None else wrapper.eos_token_id
        made = cls(backend, limit=files.max_length, vocabulary=vocabulary, pad_id=pad_id, filler_id=filler_id)
        made.inputs, made.unknown_id = tuple(wrapper.model_input_names), wrapper.unk_token_id
        made.pads_left, made.cuts_left = wrapper.padding_side == "left", wrapper.truncation_side == "left"
        named = {name: getattr(wrapper, f"{name}_id", None) for name in _SPECIAL_TOKENS}
        made.special_ids = {name: int(found) for name, found in named.items() if found is not None}
        return made

    def restrict(self, positions: int | None) -> None:
        """No text may have more tokens, whatever limit a call has."""
        self.positions = positions
        self.limit = self.within(self.limit)

    def within(self, limit: int | None) -> int | None:
        """A limit, or the model's positions where those are fewer."""
        known = [n for n in (limit, self.positions) if n is not None]
        return min(known) if known else None

    def id_of(self, token: str) -> int | None:
        """The id of a token as it stands in the vocabulary; ``None``: there is none, or the model has no row for it."""
        found: int | None = self._backend.token_to_id(token)
        return found if found is not None and found < self.vocabulary else None

    def __call__(
        self,
        items: Sequence[Item],
        *,
        prompt: str,
        truncate: bool,
        limit: int | None = None,
        marker: int | None = None,
    ) -> list[Tokens]:
        """One ``Tokens`` an item, in order. Raises InvalidInput and InputTooLong with the item's ``index``.

        ``limit`` is used in place of the tokenizer's own. ``marker``: an id that goes after the first one.
        """
        texts = [(index, item.text) for index, item in enumerate(items) if item.text is not None]
        found: dict[int, list[int]] = {}
        if texts:
            found = dict(zip([index for index, _ in texts], self._encode(texts, prompt), strict=True))
        for index, item in enumerate(items):
            if index not in found:
                found[index] = self._from_ids(item, index, prompt)
        if marker is not None:
            found = {index: _marked(ids, marker, given=items[index].text is None) for index, ids in found.items()}
        skip = len(self._before) + len(self._prompt_ids(prompt)) if prompt else 0
        return [
            self._cut(found[index], index, skip, truncate=truncate, limit=self.within(limit or self.limit))
            for index in range(len(items))
        ]

    def _encode(self, texts: Sequence[tuple[int, str]], prompt: str) -> list[list[int]]:
        whole = [prompt + text for _, text in texts] if prompt else [text for _, text in texts]
        try:
            if len(whole) == 1:
                return [self._backend.encode(whole[0]).ids]
            return [encoding.ids for encoding in self._backend.encode_batch_fast(whole)]
        except (TypeError, UnicodeError):
            _check_unicode(texts)
            raise

    def _from_ids(self, item: Item, index: int, prompt: str) -> list[int]:
        given = item.token_ids
        if given is None:
            raise InvalidInput("the item has neither text nor token ids", index=index, param="input")
        ids, before, after = self.check_ids(given, index), self._before, self._after
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

    def _cut(self, ids: list[int], index: int, skip: int, *, truncate: bool, limit: int | None) -> Tokens:
        if not ids:
            raise InvalidInput("the text has no tokens", index=index, param="input")
        if limit is not None and len(ids) > limit:
            if not truncate:
                raise InputTooLong(tokens=len(ids), limit=limit, index=index)
            ids = self._shortened(ids, limit)
        array = np.asarray(ids, dtype=np.int64)
        self.check_known(array, index)
        return Tokens(array, min(skip, len(ids)))

    def _shortened(self, ids: list[int], limit: int) -> list[int]:
        before, after = self._before, self._after
        if not self.cuts_left:
            return [*ids[: max(0, limit - len(after))], *after][:limit]
        kept = max(0, limit - len(before) - len(after))
        end = len(ids) - len(after)
        return [*before, *ids[end - kept : end], *after][:limit]

    def check_known(self, ids: NDArray[np.int64], index: int) -> None:
        """Raises InvalidInput with ``index`` for an id that the model has no row for."""
        if self._may_exceed and int(ids.max()) >= self.vocabulary:
            raise InvalidInput(
                f"the tokenizer gives token id {ids.max()}, and the model knows {self.vocabulary}", index=index
            )

    # --- texts that are put together by somebody else ------------------------------------------------

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts, without special ones. Raises InvalidInput with the text's ``index``."""
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        except (TypeError, UnicodeError):
            _check_unicode(enumerate(texts))
            raise

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The same as the tokenizers library has them, with tokens and offsets (in code points)."""
        try:
            found: list[Any] = self._backend.encode_batch(texts, add_special_tokens=False)
        except (TypeError, UnicodeError):
            _check_unicode(enumerate(texts))
            raise
        return found

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The special ids before and after a text."""
        return self._before, self._after

    @property
    def marks_subwords(self) -> bool:
        """Whether tokens that go on with a word have a mark of their own, as ## in WordPiece."""
        return bool(getattr(self._backend.model, "continuing_subword_prefix", None))

    def pair(self, first: str, second: str) -> Any:
        """What the tokenizers library makes of two texts, special ids included."""
        return self._backend.encode(first, second)

    def check_ids(self, ids: Sequence[int], index: int | None, param: str = "input") -> list[int]:
        """Ids that a client sent. Raises InvalidInput for one that is not in the vocabulary."""
        wrong = next((token for token in ids if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise InvalidInput(
                f"token id {wrong} is not in the model's vocabulary of {self.vocabulary}", index=index, param=param
            )
        return list(ids)


def _marked(ids: list[int], marker: int, *, given: bool) -> list[int]:
    """The ids with the marker after the first, unless they were ``given`` with it."""
    return ids if given and ids[1:2] == [marker] else [*ids[:1], marker, *ids[1:]]


def _check_unicode(texts: Iterable[tuple[int, str]]) -> None:
    for index, text in texts:
        try:
            text.encode()
        except UnicodeError as error:
            raise InvalidInput(f"the text is not valid Unicode: {error}", index=index) from error


def _lowercase_first(backend: Any, files: ModelFiles) -> None:
    """As sentence-transformers does it for ``do_lower_case``. Raises ModelSourceInvalid."""
    from tokenizers import normalizers

    if isinstance(backend, PythonTokenizer):
        raise ModelSourceInvalid(f"{files.folder}: do_lower_case is true, which needs a fast tokenizer")
    own = backend.normalizer
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own is not None else [])])


def _end_with_eos(backend: Any, wrapper: Any, files: ModelFiles) -> None:
    """Put the end token after a text where ``add_eos_token`` says so: some releases of transformers leave it out, and
    last-token pooling would read a word. Raises ModelSourceInvalid."""
    from tokenizers import processors

    about = read_object(files.folder / "tokenizer_config.json") or {}
    if about.get("add_eos_token") is not True:
        return
    eos = wrapper.eos_token_id
    before, after = _special_ids(backend)
    if eos is not None and after[-1:] == [eos]:
        return
    if eos is None or after or isinstance(backend, PythonTokenizer):
        raise ModelSourceInvalid(f"{files.folder}: add_eos_token is true, and the tokenizer puts no end token")
    names = {backend.id_to_token(each): each for each in (*before, eos)}
    start, end = [backend.id_to_token(each) for each in before], backend.id_to_token(eos)
    first, second = (
        [*(f"{name}:{kind}" for name in start), f"{text}:{kind}", f"{end}:{kind}"]
        for kind, text in enumerate(("$A", "$B"))
    )
    backend.post_processor = processors.TemplateProcessing(
        single=first, pair=[*first, *second], special_tokens=list(names.items())
    )


def _special_ids(backend: Any) -> tuple[list[int], list[int]]:
    """The special ids that the tokenizer puts before and after a text."""
    sample = "a"
    plain, full = (backend.encode(sample, add_special_tokens=special).ids for special in (False, True))
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise ModelSourceInvalid("the tokenizer changes a text's tokens when it adds special ones: not supported")
