"""What must not reach an engine: what would end it, and what is the server's to say.

SGLang refuses most of what is wrong. Some numbers it takes as they are, and they end its scheduler, for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sie_core import InvalidInput

__all__ = ["check_body", "check_ids"]

_OURS = ("rid", "lora_path", "data_parallel_rank")
_TEMPLATE = ("chat_template", "conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors")
"""Arguments of the chat template that are not for its texts: a template of the client's own runs for as long as it
likes, while the engine takes in nothing else."""
_MOST = {"top_logprobs": 20, "logprobs": 20, "top_k": 2**31 - 1, "min_tokens": 2**31 - 1}
"""As many logprobs as OpenAI gives: more than the vocabulary has is the end of the engine. The others are 32 bits wide
in it."""


def check_body(body: Mapping[str, Any], vocabulary: int | None) -> None:
    """Refuse what the core leaves to the engine, and the engine does not see. Raises InvalidInput."""
    for name in _OURS:
        if name in body:
            raise InvalidInput(f"{name} is not for requests to set", param=name)
    for name in _TEMPLATE:
        if name in _mapping(body.get("chat_template_kwargs")):
            raise InvalidInput(f"chat_template_kwargs: {name} is not for requests to set", param="chat_template_kwargs")
    for name, most in _MOST.items():
        value = body.get(name)
        # A text or a fraction with a number's value is one to the engine.
        if value is not None and (not isinstance(value, int) or value > most):
            raise InvalidInput(f"{name!r} must be a whole number, {most} at most", param=name)
    for name in ("stop_token_ids", "input_ids"):
        if body.get(name) is not None:
            check_ids(body[name], vocabulary, name)
    if vocabulary is None and body.get("stop_token_ids") and body.get("min_tokens"):
        raise InvalidInput("'stop_token_ids' and 'min_tokens' can't go together for this model", param="min_tokens")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        for ids in [prompt] if isinstance(prompt[0], int) else prompt:
            check_ids(ids, vocabulary, "prompt")


def check_ids(ids: Any, vocabulary: int | None, param: str, index: int | None = None) -> None:
    """Token ids of a vocabulary, whose size may not be known. Raises InvalidInput."""
    if not isinstance(ids, Sequence) or any(type(each) is not int for each in ids):
        raise InvalidInput(f"{param!r} must be a list of token ids", index=index, param=param)
    most = vocabulary or 2**31
    if ids and not 0 <= min(ids) <= max(ids) < most:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise InvalidInput(f"token id {wrong} is none of the model's {most}", index=index, param=param)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
