"""What a fake engine generates: the words of its prompt, the last one first, one piece a word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen
from sie_core import GenerateRequest, InvalidInput

from sie_testing.faults import FaultPoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sie_testing.fake import FakeOptions

__all__ = ["FakeGeneration"]

_MINE = {"id": "the-engine's", "created": 1, "model": "the engine's own name"}


@frozen
class _Answer:
    """One choice: what it says, and why it ends there."""

    index: int
    words: Sequence[str]
    finish_reason: str
    prompt_tokens: int


class FakeGeneration:
    """What makes a fake engine generate. It takes ``token_s`` a word, and knows ``n``, ``stop``, ``max_tokens``,
    ``logprobs``, and ``tools`` where ``tool_choice`` is ``required``; ``"refuse": true`` it refuses.

    ``running``, ``aborted``, ``emitted``: requests that run, requests cut short while they ran, pieces handed out.
    Fault points: ``run`` when a request begins, ``piece`` before each piece, ``abort`` when one is cut short.
    """

    options: FakeOptions
    faults: FaultPoints
    running = 0
    most_running = 0
    aborted = 0
    emitted = 0

    async def generate(self, request: GenerateRequest) -> Mapping[str, Any]:
        """The whole answer."""
        answers = self._answers_to(request)
        with self._at_work(request):
            for _ in range(max(len(answer.words) for answer in answers)):
                await asyncio.sleep(self.options.token_s)
                self._piece_is_due()
        choices = [_whole(request, answer) for answer in answers]
        return {**_MINE, "object": "whatever", "choices": choices, "usage": _usage(answers)}

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[bytes]:
        """A piece a word, then one that ends each choice, then the usage if it was asked for."""
        answers = self._answers_to(request)
        with self._at_work(request):
            for place in range(max(len(answer.words) for answer in answers)):
                await asyncio.sleep(self.options.token_s)
                for answer in answers:
                    if place < len(answer.words):
                        self._piece_is_due()
                        yield _piece([_delta(request, answer, place)])
            for answer in answers:
                yield _piece([_choice(request, answer.index, "", answer.finish_reason)])
            if (request.body.get("stream_options") or {}).get("include_usage"):
                yield _piece([], usage=_usage(answers))

    def _piece_is_due(self) -> None:
        self.faults.reach("piece")
        self._check_alive()
        self.emitted += 1

    @contextmanager
    def _at_work(self, request: GenerateRequest) -> Iterator[None]:
        self.faults.reach("run")
        self._count_run(1)
        if request.lora is not None:
            self._check_lora(request.lora)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            self.faults.reach("abort")
            raise
        finally:
            self.running -= 1

    def _answers_to(self, request: GenerateRequest) -> list[_Answer]:
        body = request.body
        if body.get("refuse"):
            raise InvalidInput("the fake engine refuses this, as asked", param="refuse")
        prompts = _prompts(request)
        answers: list[_Answer] = []
        for prompt in prompts:
            read = prompt.split()
            said = [*([f"[{request.lora}]"] if request.lora else []), *reversed(read)]
            words, reason = _cut(said, body)
            for _ in range(body.get("n", 1)):
                answers.append(_Answer(len(answers), words, reason, len(read)))
        return answers

    def _count_run(self, tokens: int) -> None:
        raise NotImplementedError

    def _check_alive(self) -> None:
        raise NotImplementedError

    def _check_lora(self, name: str) -> None:
        raise NotImplementedError


def _prompts(request: GenerateRequest) -> list[str]:
    if request.kind == "chat":
        content = request.body["messages"][-1].get("content")
        if isinstance(content, list):
            content = " ".join(part.get("text") or "" for part in content)
        return [content or ""]
    prompt = request.body["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        prompt = [prompt]
    return [one if isinstance(one, str) else " ".join(map(str, one)) for one in prompt]


def _cut(words: Sequence[str], body: Mapping[str, Any]) -> tuple[Sequence[str], str]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    end = next((place for place, word in enumerate(words) if any(text in word for text in stops)), len(words))
    limit = body.get("max_completion_tokens", body.get("max_tokens", end))
    return words[: min(end, limit)], "length" if limit < end else "stop"


def _usage(answers: Sequence[_Answer]) -> dict[str, int]:
    prompts, made = answers[0].prompt_tokens, sum(len(answer.words) for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


def _text(answer: _Answer, place: int) -> str:
    return answer.words[place] if place == 0 else f" {answer.words[place]}"


def _calls_tool(request: GenerateRequest) -> bool:
    return request.body.get("tool_choice") == "required" and bool(request.body.get("tools"))


def _tool_call(request: GenerateRequest, text: str) -> dict[str, Any]:
    function = request.body["tools"][0].get("function")
    name = function.get("name") if isinstance(function, dict) else None  # real engines do without, too
    return {
        "id": "call_1",
        "type": "function",
        "function": {"name": name if isinstance(name, str) else "tool", "arguments": json.dumps({"text": text})},
    }


def _whole(request: GenerateRequest, answer: _Answer) -> dict[str, Any]:
    text = " ".join(answer.words)
    choice: dict[str, Any] = {"index": answer.index, "finish_reason": answer.finish_reason}
    choice["logprobs"] = _logprobs(request, [_text(answer, place) for place in range(len(answer.words))])
    if request.kind == "completion":
        return {**choice, "text": text}
    if _calls_tool(request):
        message = {"role": "assistant", "content": None, "tool_calls": [_tool_call(request, text)]}
        return {**choice, "message": message, "finish_reason": "tool_calls"}
    return {**choice, "message": {"role": "assistant", "content": text}}


def _delta(request: GenerateRequest, answer: _Answer, place: int) -> dict[str, Any]:
    text = _text(answer, place)
    choice = _choice(request, answer.index, text, None)
    choice["logprobs"] = _logprobs(request, [text])
    if place == 0 and request.kind == "chat":
        choice["delta"]["role"] = "assistant"
        if _calls_tool(request):
            choice["delta"]["tool_calls"] = [{"index": 0, **_tool_call(request, text)}]
    return choice


def _choice(request: GenerateRequest, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    said: dict[str, Any] = {"text": text}
    if request.kind == "chat":
        said = {"delta": {"content": text} if text else {}}
    return {"index": index, **said, "finish_reason": finish_reason}


def _logprobs(request: GenerateRequest, words: Sequence[str]) -> dict[str, Any] | None:
    asked = request.body.get("logprobs")
    if asked is None or asked is False:
        return None
    if request.kind == "chat":
        return {"content": [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]}
    return {"tokens": [*words], "token_logprobs": [-0.5] * len(words), "top_logprobs": [{word: -0.5} for word in words]}


def _piece(choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None = None) -> bytes:
    piece = {**_MINE, "object": "whatever", "choices": choices, "usage": usage}
    return json.dumps(piece, ensure_ascii=False, separators=(",", ":")).encode()
