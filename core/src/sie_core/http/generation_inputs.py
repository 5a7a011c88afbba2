"""Requests that generate, checked. Of fields that the core need not know, some are for the engine to judge."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, Literal

from attrs import frozen

from sie_core.errors import BodyTooLarge, InvalidInput, Unsupported
from sie_core.http.checks import check_lora, kind_of, optional, shown
from sie_core.http.fields import CHAT, COMPLETION, NATIVE, PASSED, SAMPLING, a_text, an_object
from sie_core.http.images import Pictures
from sie_core.http.limits import Limits
from sie_core.types import GenerateRequest

__all__ = ["OpenAIRequest", "parse_generate", "parse_openai"]

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_DEPTH: Final = 100
"""Engines write the body as JSON again, and a tool's schema may be deep; no honest one is deeper."""
_ID_BYTES: Final = 4
_KEPT: Final = frozenset({"model", "stream", "lora"})
_OURS: Final = _KEPT | {"messages", "prompt"}
_HINTS: Final = ("routing_key", "prompt_cache_key", "safety_identifier")
"""Of use to a fleet of workers, and harmless to one."""
_GRAMMARS: Final = ("json_schema", "regex", "ebnf")


@frozen(eq=False)
class OpenAIRequest:
    """A chat or completion request, checked."""

    model: str
    stream: bool
    request: GenerateRequest
    pictures: Pictures


# --- OpenAI ----------------------------------------------------------------------------------------


def parse_openai(body: Mapping[Any, Any], kind: Literal["chat", "completion"], limits: Limits) -> OpenAIRequest:
    """Check the body of ``/v1/chat/completions`` or ``/v1/completions``. Raises InvalidInput, BodyTooLarge."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidInput("'model' must be the name of a model", param="model")
    fields = CHAT if kind == "chat" else COMPLETION
    for name, value in body.items():
        check = fields.get(name)
        if value is None:
            continue
        if check is not None:
            check(value, name)
        elif name not in PASSED and name not in _OURS:
            known = (*fields, *sorted(PASSED), *sorted(_OURS))
            raise _near(f"{shown(name)} is not supported on this route", name, known, name)
    pictures = Pictures(limits)
    if kind == "chat":
        _check_messages(body.get("messages"), limits, pictures)
    else:
        _check_prompt(body.get("prompt"), limits)
    stream = bool(body.get("stream"))
    passed = {name: value for name, value in body.items() if value is not None and name not in _KEPT}
    if not stream:
        passed.pop("stream_options", None)
    _check_depth({name: value for name, value in passed.items() if name != "prompt"})
    return OpenAIRequest(model, stream, GenerateRequest(kind, passed, check_lora(body.get("lora"))), pictures)


def _check_messages(messages: Any, limits: Limits, pictures: Pictures) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidInput("'messages' must be a list with a message or more", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidInput(f"a message must be an object, not {kind_of(message)}", index=index, param="messages")
        role = message.get("role")
        if role not in _ROLES:
            raise _near(f"role {shown(role)} is none of {', '.join(_ROLES)}", role, _ROLES, "messages", index)
        content = message.get("content")
        if isinstance(content, str):
            _check_text(content, limits, index, "messages")
        elif isinstance(content, list):
            _check_parts(content, limits, index, pictures)
        elif content is not None:
            raise InvalidInput(
                f"a message's content must be a string or a list of parts, not {kind_of(content)}",
                index=index,
                param="messages",
            )
        elif role != "assistant":  # which may have called a tool instead
            raise InvalidInput(f"a message of role {role!r} must have a content", index=index, param="messages")


def _check_parts(parts: Sequence[Any], limits: Limits, index: int, pictures: Pictures) -> None:
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidInput("a part of a message must be an object with a 'type'", index=index, param="messages")
        text = part.get("text")
        if text is None:
            if part["type"] == "text":
                raise InvalidInput("a text part must have a 'text'", index=index, param="messages")
        elif isinstance(text, str):
            _check_text(text, limits, index, "messages")
        else:
            raise InvalidInput(f"'text' must be a string, not {kind_of(text)}", index=index, param="messages")
        if part["type"] != "text":
            pictures.read_part(part, index, "messages")


def _check_prompt(prompt: Any, limits: Limits) -> None:
    wanted = "a string, a list of strings, or token ids"
    if isinstance(prompt, str):
        _check_one_prompt(prompt, limits, None)
    elif prompt is None:
        raise InvalidInput(f"'prompt' is missing: {wanted}", param="prompt")
    elif not isinstance(prompt, list):
        raise InvalidInput(f"'prompt' must be {wanted}, not {kind_of(prompt)}", param="prompt")
    elif prompt and type(prompt[0]) is int:
        _check_one_prompt(prompt, limits, None)
    else:
        if not prompt:
            raise InvalidInput("'prompt' is empty: there is nothing to go on from", param="prompt")
        if len(prompt) > limits.items:
            message = f"a request may hold {limits.items} prompts at most, and this one holds {len(prompt)}"
            raise InvalidInput(message, param="prompt")
        for index, one in enumerate(prompt):
            if type(one) is not type(prompt[0]):
                raise InvalidInput(f"'prompt' must be {wanted}, and not a mixture", index=index, param="prompt")
            _check_one_prompt(one, limits, index)


def _check_one_prompt(prompt: Any, limits: Limits, index: int | None) -> None:
    if not isinstance(prompt, str | list):
        raise InvalidInput(
            f"a prompt must be a string or token ids, not {kind_of(prompt)}", index=index, param="prompt"
        )
    if not prompt:
        raise InvalidInput("the prompt is empty: there is nothing to go on from", index=index, param="prompt")
    if isinstance(prompt, str):
        _check_text(prompt, limits, index, "prompt")
        return
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= 2**31:
        raise InvalidInput("token ids must be whole numbers of the model's vocabulary", index=index, param="prompt")
    _check_size(len(prompt) * _ID_BYTES, limits, index)


def _check_text(text: str, limits: Limits, index: int | None, param: str) -> None:
    if len(text) * 4 > limits.item_bytes:  # Four bytes a character at most: short texts need no counting.
        _check_size(len(text.encode()), limits, index)


def _check_size(size: int, limits: Limits, index: int | None) -> None:
    if size > limits.item_bytes:
        message = f"the text has {size} bytes, and {limits.item_bytes} is the most"
        raise BodyTooLarge(message, size=size, limit=limits.item_bytes, index=index)


def _check_depth(body: Mapping[str, Any]) -> None:
    """All of it has to be JSON again, whichever way it came, and engines' parsers have their limits."""
    level: list[Any] = [body]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if not all(isinstance(key, str) for key in value):
                    raise InvalidInput("all names in the body must be strings")
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif not isinstance(value, str | int | float | None) or (isinstance(value, float) and not isfinite(value)):
                raise InvalidInput(f"the body holds a value that JSON has no place for: {shown(value)}")
        if not below:
            return
        level = below
    raise InvalidInput("the body is nested too deep")


# --- native ----------------------------------------------------------------------------------------


def parse_generate(body: Mapping[Any, Any], limits: Limits) -> tuple[GenerateRequest, bool]:
    """Check the body of ``POST /v1/generate``; also whether it wants a stream.

    Raises InvalidInput, Unsupported, BodyTooLarge: a field that nobody knows is refused, with what was meant.
    """
    options = _sampling_in(body.get("options"))
    given = {**options, **{name: value for name, value in body.items() if value is not None and name != "options"}}
    prompt, images = given.pop("prompt", None), given.pop("images", None)
    if images not in (None, []):
        message = "images are no input of this path: send them to /v1/chat/completions, as parts of a message"
        raise Unsupported(message, supported=("text",), param="images")
    if not isinstance(prompt, str):
        raise InvalidInput("'prompt' must be a string", param="prompt")
    _check_one_prompt(prompt, limits, None)
    lora = check_lora(given.pop("lora_adapter", given.pop("lora", None)))
    sent: dict[str, Any] = {"prompt": prompt, **_grammar(given.pop("grammar", None))}
    for name in _HINTS:
        a_text(given.pop(name, ""), name)
    for name, value in given.items():
        check = NATIVE.get(name)
        if check is None:
            raise _near(f"{shown(name)} is no field of this path", name, (*NATIVE, "grammar", "lora_adapter"), name)
        if value is not None:
            check(value, name)
            sent[name] = value
    stream = bool(sent.pop("stream", False))
    if "max_new_tokens" in sent:
        sent["max_tokens"] = sent.pop("max_new_tokens")
    top = sent.pop("top_logprobs", 1)
    if sent.pop("logprobs", False):
        sent["logprobs"] = top
    _check_depth(sent)
    return GenerateRequest("completion", sent, lora), stream


def _sampling_in(options: Any) -> dict[Any, Any]:
    """Sampling parameters beside those of the request, which win; an empty list is none. Raises InvalidInput."""
    if options in (None, []):
        return {}
    if not isinstance(options, dict):
        raise InvalidInput(f"'options' must be an object, not {kind_of(options)}", param="options")
    for name, value in options.items():
        if name not in SAMPLING:
            raise _near(f"{shown(name)} is no option", name, tuple(SAMPLING), "options")
        if value is not None:
            SAMPLING[name](value, name)
    return options


def _grammar(grammar: Any) -> dict[str, Any]:
    if grammar is None:
        return {}
    if not isinstance(grammar, dict):
        raise InvalidInput(f"'grammar' must be an object, not {kind_of(grammar)}", param="grammar")
    found = [name for name in _GRAMMARS if grammar.get(name) is not None]
    unknown = [name for name in grammar if name not in (*_GRAMMARS, "label", "strict")]
    if len(found) != 1 or unknown:
        raise Unsupported(
            "'grammar' must have one of json_schema, regex and ebnf", supported=_GRAMMARS, param="grammar"
        )
    (name,) = found
    value = grammar[name]
    label = optional(grammar.get("label"), str, "grammar.label", "a string")
    strict = optional(grammar.get("strict"), bool, "grammar.strict", "true or false")
    if name != "json_schema":
        a_text(value, f"grammar.{name}")
        return {name: value}
    an_object(value, "grammar.json_schema")
    schema: dict[str, Any] = {"name": label or "answer", "schema": value}
    if strict is not None:
        schema["strict"] = strict
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _near(message: str, name: Any, known: Sequence[str], param: Any, index: int | None = None) -> InvalidInput:
    near = difflib.get_close_matches(str(name)[:64], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidInput(message + hint, index=index, param=str(param)[:64])
