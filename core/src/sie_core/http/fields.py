"""The fields of requests that generate, and what each may hold. What is not here is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

from sie_core.errors import InvalidInput
from sie_core.http.checks import kind_of, shown

__all__ = ["CHAT", "COMPLETION", "NATIVE", "PASSED", "SAMPLING", "Check", "a_text", "an_object"]

_MAX_CHOICES: Final = 128

Check = Callable[[Any, str], None]


def _number(low: float, high: float = inf) -> Check:
    def check(value: Any, name: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high and value < inf):
            limits = f"from {low:g} to {high:g}" if high < inf else f"{low:g} or more"
            raise InvalidInput(f"{name!r} must be a number, {limits}, not {shown(value)}", param=name)

    return check


def _whole(low: int, high: int | None = None) -> Check:
    def check(value: Any, name: str) -> None:
        if type(value) is not int or value < low or (high is not None and value > high):
            limits = f"from {low} to {high}" if high is not None else f"{low} or more"
            raise InvalidInput(f"{name!r} must be a whole number, {limits}, not {shown(value)}", param=name)

    return check


def _a(kind: type, wanted: str) -> Check:
    def check(value: Any, name: str) -> None:
        if not isinstance(value, kind):
            raise InvalidInput(f"{name!r} must be {wanted}, not {kind_of(value)}", param=name)

    return check


def _stop(value: Any, name: str) -> None:
    if isinstance(value, str):
        return
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidInput(f"{name!r} must be a string or a list of strings", param=name)


def _bias(value: Any, name: str) -> None:
    _a(dict, "an object from token ids to numbers")(value, name)
    for key, bias in value.items():
        if not str(key).lstrip("-").isdecimal():
            raise InvalidInput(f"{name!r} must have token ids for keys, not {shown(key)}", param=name)
        _number(-100, 100)(bias, name)


def _tools(value: Any, name: str) -> None:
    _a(list, "a list of objects")(value, name)
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise InvalidInput(f"a tool must be an object, not {kind_of(tool)}", index=index, param=name)


def _tool_choice(value: Any, name: str) -> None:
    if not isinstance(value, str | dict):
        raise InvalidInput(f"{name!r} must be a string or an object, not {kind_of(value)}", param=name)


def _format(value: Any, name: str) -> None:
    _a(dict, "an object such as {type: json_object}")(value, name)
    if not isinstance(value.get("type"), str):
        raise InvalidInput(f"{name!r} must have a 'type', such as json_schema", param=name)


def _stream_options(value: Any, name: str) -> None:
    _a(dict, "an object")(value, name)
    if not isinstance(value.get("include_usage"), bool | None):
        raise InvalidInput("'include_usage' must be true or false", param="stream_options.include_usage")


_flag: Final = _a(bool, "true or false")
a_text: Final = _a(str, "a string")
an_object: Final = _a(dict, "an object")
SAMPLING: Final[Mapping[str, Check]] = {
    "temperature": _number(0),
    "top_p": _number(0, 1),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "seed": _whole(-(2**63), 2**63 - 1),
    "stop": _stop,
    "logit_bias": _bias,
}
_COMMON: Final[Mapping[str, Check]] = {
    **SAMPLING,
    "n": _whole(1, _MAX_CHOICES),
    "max_tokens": _whole(0),
    "stream": _flag,
    "stream_options": _stream_options,
    "response_format": _format,
    "user": a_text,
}
CHAT: Final[Mapping[str, Check]] = {
    **_COMMON,
    "max_completion_tokens": _whole(1),
    "logprobs": _flag,
    "top_logprobs": _whole(0),
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _flag,
}
COMPLETION: Final[Mapping[str, Check]] = {
    **_COMMON,
    "best_of": _whole(1, _MAX_CHOICES),
    "logprobs": _whole(0),
    "echo": _flag,
    "suffix": a_text,
}
NATIVE: Final[Mapping[str, Check]] = {
    **SAMPLING,
    "max_new_tokens": _whole(1),
    "stream": _flag,
    "logprobs": _flag,
    "top_logprobs": _whole(0),
}
PASSED: Final = frozenset(
    # OpenAI's, which change nothing or what the engine is to judge
    "metadata store service_tier modalities prediction reasoning_effort verbosity functions function_call "
    "prompt_cache_key prompt_cache_retention safety_identifier "
    # engines' own: sampling, the end of a text, grammars, the chat template
    "min_tokens ignore_eos stop_token_ids stop_regex no_stop_trim skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output regex ebnf json_schema input_ids cache_salt chat_template_kwargs "
    "continue_final_message add_generation_prompt separate_reasoning stream_reasoning thinking".split()
)
"""What is passed on for the engine to judge.

A list of what may be, because engines take much more that is not for clients: code (``custom_logit_processor``),
addresses that they then call (``bootstrap_host``), other clients' state (``session_params``, ``rid``), a place in front
of others (``priority``, ``data_parallel_rank``), files (``lora_path``), answers that take gigabytes
(``return_hidden_states``).
"""
