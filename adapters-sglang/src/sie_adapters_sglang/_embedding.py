"""Embedding engines: vectors by SGLang's own ``/encode``, which says how many tokens each text had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sie_core import (
    BatchRequest,
    EncodeOutput,
    InferenceError,
    InputTooLong,
    InvalidInput,
    Item,
    NonFiniteOutput,
    Task,
    Unsupported,
)

from sie_adapters_sglang._argv import SERVED_NAME
from sie_adapters_sglang._engine import SglangEngine
from sie_adapters_sglang._requests import check_ids

__all__ = ["EmbeddingEngine"]

_PROBE = "The quick brown fox jumps over the lazy dog"
_SPECIALS = 8
"""More special tokens than any model puts around a text."""
_Indexed = list[tuple[int, Item]]


class EmbeddingEngine(SglangEngine):
    """Chat never reaches it: a chat request ends an embedding engine of SGLang."""

    async def encode(self, request: BatchRequest) -> Sequence[EncodeOutput]:
        self._check(request)
        # One call takes texts or token lists, not both.
        items = [await self._fitting(index, item, request) for index, item in enumerate(request.items)]
        texts: _Indexed = [(i, item) for i, item in enumerate(items) if item.text is not None]
        lists: _Indexed = [(i, item) for i, item in enumerate(items) if item.text is None]
        calls = [self._embed(group, request) for group in (texts, lists) if group]
        found = dict(pair for pairs in await asyncio.gather(*calls) for pair in pairs)
        outputs = [found[index] for index in range(len(request.items))]
        broken = [i for i, output in enumerate(outputs) if not np.isfinite(_dense(output)).all()]
        if broken:
            raise NonFiniteOutput(broken)
        return outputs

    def _check(self, request: BatchRequest) -> None:
        wanted = set(request.params.output_types)
        if request.task is not Task.ENCODE or wanted - {"dense"}:
            asked = request.task.value if request.task is not Task.ENCODE else ", ".join(sorted(wanted - {"dense"}))
            raise Unsupported(f"the model gives dense vectors, not {asked}", supported=("dense",), param="output_types")
        for index, item in enumerate(request.items):
            if item.images:
                raise Unsupported("the model takes text, no images", supported=("text",))
            if not (item.text or "").strip() and not item.token_ids:
                raise InvalidInput(f"item {index} is empty", index=index)
            check_ids(item.token_ids or (), self.plan.checkpoint.vocabulary, "items", index)

    async def _fitting(self, index: int, item: Item, request: BatchRequest) -> Item:
        """The item with its instruction; cut to what the model takes, if it is too long and that was asked for."""
        longest = self.capabilities.max_sequence_length
        if item.text is not None:
            item = Item(text=(request.params.instruction or "") + item.text, id=item.id)
        # A token is a byte at least: what is shorter than that needs no look.
        size = len(item.text.encode()) + _SPECIALS if item.text is not None else len(item.token_ids or ())
        if longest is None or size < longest:
            return item
        limit = longest - 1  # the engine refuses a full context
        whole = list(item.token_ids or ()) if item.text is None else await self._tokens(item.text, specials=True)
        if len(whole) <= limit:
            return item
        if not request.params.truncate:
            raise InputTooLong(tokens=len(whole), limit=limit, index=index)
        bare = whole if item.text is None else await self._tokens(item.text, specials=False)
        before, after = _around(whole, bare)
        kept = bare[: limit - len(before) - len(after)]
        return Item(token_ids=(*before, *kept, *after), id=item.id)

    async def _tokens(self, text: str, *, specials: bool) -> list[int]:
        """A text's ids; none where the engine does not tell, as one does whose tokenizer states no length."""
        body = {"model": SERVED_NAME, "prompt": text, "add_special_tokens": specials}
        try:
            answer = await self._client.ask("/tokenize", body, rid=False)
        except InferenceError:
            return []
        return list(answer["tokens"])

    async def _embed(self, group: _Indexed, request: BatchRequest) -> list[tuple[int, EncodeOutput]]:
        body: dict[str, Any]
        if group[0][1].text is not None:
            body = {"text": [item.text for _, item in group]}
        else:
            body = {"input_ids": [list(item.token_ids or ()) for _, item in group]}
        if request.params.dimensions is not None:
            body["dimensions"] = request.params.dimensions
        answers = await self._client.ask("/encode", body, rid=False)
        if not isinstance(answers, list) or len(answers) != len(group):
            raise InferenceError("the engine answered another number of vectors than it was asked for")
        return [(index, _output(answer)) for (index, _), answer in zip(group, answers, strict=True)]

    def _probe_request(self) -> tuple[dict[str, Any], str]:
        return {"text": [_PROBE]}, "/encode"

    def _probe_answer(self, answer: Any) -> bytes:
        return np.asarray(answer[0]["embedding"], dtype=np.float32).tobytes()

    def probe_matches(self, before: bytes, after: bytes) -> bool:
        # Kernels may sum in another order when they are tuned anew; a corrupted copy is off by much more.
        one, other = (np.frombuffer(each, dtype=np.float32) for each in (before, after))
        return one.shape == other.shape and bool(np.allclose(one, other, atol=1e-2))


def _around(whole: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _output(answer: Any) -> EncodeOutput:
    try:
        return EncodeOutput(
            tokens=int(answer["meta_info"]["prompt_tokens"]), dense=np.asarray(answer["embedding"], dtype=np.float32)
        )
    except (LookupError, TypeError, ValueError) as error:
        raise InferenceError("the engine's answer holds no vector") from error


def _dense(output: EncodeOutput) -> NDArray[np.float32]:
    assert output.dense is not None
    return output.dense
