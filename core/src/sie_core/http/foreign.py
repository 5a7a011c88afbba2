"""Fields of other servers that speak OpenAI's and Cohere's API: those that would change an answer are done or refused.

What would change nothing (``user``, ``priority``, and undocumented fields) is ignored, as clients expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from sie_core.errors import InvalidInput, Unsupported
from sie_core.http.checks import shown

__all__ = ["EMBED", "EMBEDDINGS", "RERANK", "either", "refuse_undone"]


@frozen
class _Undone:
    """A field that is refused, but for the values that ask for nothing."""

    why: str
    harmless: tuple[Any, ...] = ()


_NATIVE: Final = _Undone("a field of /v1/encode and /v1/score")
_PROMPTS: Final = _Undone("prompts are chosen by 'input_type', or written as 'instruction'")
_LIMIT: Final = _Undone("texts are cut at the model's own limit only ('truncate')")
_SCALE: Final = _Undone("scores come on the model's own scale; 'raw_scores' asks for those before it")
_LENGTH: Final = _Undone("vectors come as the model makes them, and can be made of length 1, not the reverse", (True,))

EMBEDDINGS: Final[Mapping[str, _Undone]] = {
    "normalize": _LENGTH,
    "normalized": _LENGTH,
    "encoding_type": _Undone("the dtype is 'output_dtype' here", ("float",)),
    "late_chunking": _Undone("texts are encoded one by one", (False,)),
    "return_multivector": _Undone("token vectors come from /v1/encode", (False,)),
    "prompt": _PROMPTS,
    "prompt_name": _PROMPTS,
    "messages": _Undone("texts stand in 'input'"),
    "add_special_tokens": _Undone("texts are read as the model was trained to", (True,)),
    "truncate_prompt_tokens": _LIMIT,
    "max_tokens": _LIMIT,
    "truncation_side": _Undone("nothing is cut off at a text's start", ("right",)),
    "embed_dtype": _Undone("the dtype is 'output_dtype' here", ("float32",)),
    "endianness": _Undone("base64 has the lowest byte first", ("native", "little")),
    "embedding_types": _Undone("a field of /v2/embed; one dtype is 'output_dtype' here"),
    "output_types": _NATIVE,
    "params": _NATIVE,
    "options": _NATIVE,
}
RERANK: Final[Mapping[str, _Undone]] = {
    "rank_fields": _Undone("documents are ranked by their 'text' only", (["text"],)),
    "relevant_spans": _Undone("no spans are found in documents", (False,)),
    "max_chunks_per_doc": _Undone("a document is read as one text", (1,)),
    "normalize": _SCALE,
    "activation": _SCALE,
    "use_activation": _SCALE,
    "prompt": _PROMPTS,
    "prompt_name": _PROMPTS,
    "truncate_prompt_tokens": _LIMIT,
    "params": _NATIVE,
    "options": _NATIVE,
}
EMBED: Final[Mapping[str, _Undone]] = {
    "max_tokens": _LIMIT,
    "normalize": _Undone("vectors come as the model makes them"),
    "output_dtype": _Undone("dtypes are 'embedding_types' here"),
    "encoding_format": _Undone("dtypes are 'embedding_types' here", ("float",)),
    "modality": _Undone("images stand in 'images' or 'inputs' here", ("text",)),
    "options": _NATIVE,
    "params": _NATIVE,
}


def refuse_undone(body: Mapping[Any, Any], table: Mapping[str, _Undone]) -> None:
    """Refuse what would change the answer and is not done. Raises Unsupported."""
    for name in body:
        undone = table.get(name)
        if undone is None:
            continue
        value = body.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in undone.harmless):
            supported = tuple(str(one).lower() if isinstance(one, bool) else str(one) for one in undone.harmless)
            raise Unsupported(
                f"{name!r} of {shown(value)} is not supported on this path: {undone.why}",
                supported=supported,
                param=name,
            )


def either(body: Mapping[Any, Any], *names: str) -> tuple[str, Any]:
    """The value of a field that has several names, and the name that it came by. Raises InvalidInput for two values."""
    found, value = names[0], body.get(names[0])
    for name in names[1:]:
        other = body.get(name)
        if other is None:
            continue
        if value is not None and (type(value) is not type(other) or value != other):
            raise InvalidInput(f"{found!r} is {shown(value)} and {name!r} {shown(other)}: send one of them", param=name)
        found, value = name, other
    return found, value
