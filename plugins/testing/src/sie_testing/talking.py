"""The tests that every engine that generates has to pass::

from sie_testing import GenerationConformance

class TestMyTalker(GenerationConformance):
    @pytest.fixture
    def adapter(self): return MyAdapter()

    @pytest.fixture
    def model(self): return ModelSpec("m", "my-talker", options=MyOptions(...), source=...)

    @pytest.fixture
    def plugin(self): return my_package.plugin
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pytest
from sie_core import (
    Engine,
    EngineDied,
    GenerateRequest,
    InferenceError,
    InvalidInput,
    StreamEngine,
    TransitionContext,
)

from sie_testing._bounds import in_thread
from sie_testing._lifecycle import park, parkable
from sie_testing._one_loop import OnOneLoop, said, text_of, wake

__all__ = ["GenerationConformance"]

Body = Mapping[str, Any]
_AT_ONCE = 4


class GenerationConformance(OnOneLoop):
    """Inherit it, override ``adapter``, ``model`` and ``plugin``, and whatever else differs."""

    engine_class = StreamEngine

    # --- what an author overrides ---

    @pytest.fixture
    def kinds(self) -> Sequence[Literal["chat", "completion"]]:
        """What the engine answers."""
        return ("chat", "completion")

    @pytest.fixture
    def prompt(self) -> str:
        """A text that gets an answer of some length; with letters that take several bytes in it, if it repeats them."""
        return "tell me of müde Bären 🐻 and of 漢字"

    @pytest.fixture
    def short(self) -> Body:
        """What else to say for an answer of a few tokens that is the same every time."""
        return {"max_tokens": 4, "temperature": 0}

    @pytest.fixture
    def long(self) -> Body:
        """The same for one that is not over within seconds; it may replace the ``messages``."""
        return {"max_tokens": 4096, "temperature": 0}

    @pytest.fixture
    def refused(self) -> Body | None:
        """What the engine refuses; ``None``: nothing that is known."""
        return None

    @pytest.fixture
    def running(self) -> Callable[[Any], int] | None:
        """How many requests run in an engine; ``None``: nobody can tell, and some tests are skipped."""
        return None

    @pytest.fixture
    def abort(self) -> Callable[[Any], object] | None:
        """Ends every request in an engine from outside, as its operator might (blocking); ``None``: there is no way."""
        return None

    # --- what the tests use ---

    @pytest.fixture
    def ask(self, prompt: str, short: Body) -> Callable[..., GenerateRequest]:
        def make(kind: Literal["chat", "completion"] = "chat", stream: bool = False, **more: Any) -> GenerateRequest:
            body: dict[str, Any] = {**said(kind, prompt), **short, **more}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            return GenerateRequest(kind, body)

        return make

    # --- answers ---

    def test_an_answer_is_whole_and_counted(
        self, engine: StreamEngine, kinds: Sequence[Any], ask: Callable[..., GenerateRequest]
    ) -> None:
        for kind in kinds:
            answer = self.play(engine.generate(ask(kind)))
            (choice,) = answer["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            assert text_of(choice)
            usage = answer["usage"]
            assert usage["completion_tokens"] > 0
            assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]

    def test_pieces_join_to_the_whole_answer(
        self, engine: StreamEngine, kinds: Sequence[Any], ask: Callable[..., GenerateRequest]
    ) -> None:
        for kind in kinds:
            whole = self.play(engine.generate(ask(kind)))
            pieces = [json.loads(piece) for piece in self.play(_all_of(engine.stream(ask(kind, stream=True))))]
            *spoken, last = pieces
            assert not last["choices"], "the last piece has the usage, and no choices"
            assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert not any(piece.get("error") for piece in pieces)
            assert _joined(spoken) == text_of(whole["choices"][0])
            ends = [choice["finish_reason"] for piece in spoken for choice in piece["choices"]]
            assert [end for end in ends if end] == [whole["choices"][0]["finish_reason"]]

    def test_every_piece_is_one_line_of_valid_text(
        self, engine: StreamEngine, kinds: Sequence[Any], ask: Callable[..., GenerateRequest]
    ) -> None:
        """A letter that takes several bytes is never split between pieces."""
        for kind in kinds:
            for piece in self.play(_all_of(engine.stream(ask(kind, stream=True)))):
                assert b"\n" not in piece
                assert "\ufffd" not in _joined([json.loads(piece.decode())])

    def test_answers_are_not_mixed_up(self, engine: StreamEngine, ask: Callable[..., GenerateRequest]) -> None:
        lengths = range(1, _AT_ONCE + 1)

        async def all_at_once() -> list[list[str]]:
            whole = asyncio.gather(*(engine.generate(ask(max_tokens=n)) for n in lengths))
            streamed = asyncio.gather(*(_all_of(engine.stream(ask(stream=True, max_tokens=n))) for n in lengths))
            return [
                [text_of(answer["choices"][0]) for answer in await whole],
                [_joined(json.loads(piece) for piece in pieces) for pieces in await streamed],
            ]

        alone = [text_of(self.play(engine.generate(ask(max_tokens=n)))["choices"][0]) for n in lengths]
        assert len(set(alone)) > 1, "the answers must be told apart for this test to mean anything"
        assert self.play(all_at_once()) == [alone, alone]

    def test_what_is_refused_is_refused_before_the_first_piece(
        self, engine: StreamEngine, refused: Body | None, ask: Callable[..., GenerateRequest]
    ) -> None:
        if refused is None:
            pytest.skip("nothing is known that the engine refuses")
        with pytest.raises(InvalidInput):
            self.play(engine.generate(ask(**refused)))
        with pytest.raises(InvalidInput):
            self.play(_first_of(engine.stream(ask(stream=True, **refused))))
        assert self.play(engine.generate(ask()))["choices"]

    # --- requests that end early ---

    def test_several_run_at_once(
        self,
        engine: StreamEngine,
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
    ) -> None:
        wanted = _AT_ONCE if engine.max_running is None else min(_AT_ONCE, engine.max_running)

        async def scene() -> int | None:
            streams = [engine.stream(ask(stream=True, **long)) for _ in range(wanted)]
            async with contextlib.AsyncExitStack() as closing:
                for stream in streams:
                    await closing.enter_async_context(contextlib.aclosing(stream))
                async with asyncio.timeout(self.patience_s):
                    await asyncio.gather(*(anext(stream) for stream in streams))
                return await _count(running, engine)

        assert self.play(scene()) in (wanted, None)

    def test_closing_a_stream_ends_its_request(
        self,
        engine: StreamEngine,
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
    ) -> None:
        async def scene() -> None:
            stream = engine.stream(ask(stream=True, **long))
            await anext(stream)
            async with asyncio.timeout(self.patience_s):
                await stream.aclose()
                await self.until(lambda: _none_runs(running, engine))
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

        self.play(scene())
        assert self.play(engine.generate(ask()))["choices"]

    def test_cancelling_a_call_ends_its_request(
        self,
        engine: StreamEngine,
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
    ) -> None:
        async def scene() -> None:
            calls = [
                asyncio.ensure_future(engine.generate(ask(**long))),
                asyncio.ensure_future(_all_of(engine.stream(ask(stream=True, **long)))),
            ]
            await self.until(lambda: _one_runs(running, engine))
            for call in calls:
                call.cancel()
            async with asyncio.timeout(self.patience_s):
                for call in calls:
                    with pytest.raises(asyncio.CancelledError):
                        await call
                await self.until(lambda: _none_runs(running, engine))

        self.play(scene())
        assert self.play(engine.generate(ask()))["choices"]

    def test_what_is_aborted_in_the_engine_never_looks_like_an_answer(
        self,
        engine: StreamEngine,
        abort: Callable[[Any], object] | None,
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
    ) -> None:
        if abort is None:
            pytest.skip("requests can't be aborted from outside")
        self.play(self._is_cut_short(engine, lambda: abort(engine), running, long, ask))
        assert self.play(engine.generate(ask()))["choices"]

    def test_what_runs_while_it_is_closed_never_looks_like_an_answer(
        self,
        fresh: StreamEngine,
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
        context: Callable[..., TransitionContext],
    ) -> None:
        self.play(self._is_cut_short(fresh, lambda: fresh.close(context()), running, long, ask))
        with pytest.raises(EngineDied):
            self.play(fresh.generate(ask()))

    async def _is_cut_short(
        self,
        engine: StreamEngine,
        cut: Callable[[], object],
        running: Callable[[Any], int] | None,
        long: Body,
        ask: Callable[..., GenerateRequest],
    ) -> None:
        whole = asyncio.ensure_future(engine.generate(ask(**long)))
        stream = engine.stream(ask(stream=True, **long))
        await anext(stream)
        await self.until(lambda: _one_runs(running, engine))
        await in_thread(cut)
        async with asyncio.timeout(self.patience_s):
            with pytest.raises(InferenceError):
                await whole
            with pytest.raises(InferenceError):
                await _all_of(stream)

    # --- park and wake ---

    def test_a_woken_engine_answers_as_before(
        self,
        fresh: StreamEngine,
        plugin: Any,
        ask: Callable[..., GenerateRequest],
        context: Callable[..., TransitionContext],
    ) -> None:
        promised = parkable(plugin, fresh)
        before, held = text_of(self.play(fresh.generate(ask()))["choices"][0]), fresh.memory().devices
        for _ in range(2):
            offload = self.blocking(park, plugin, fresh, context())
            assert offload.host_bytes <= promised
            self.blocking(wake, plugin, fresh, context())
            assert text_of(self.play(fresh.generate(ask()))["choices"][0]) == before
            assert fresh.memory().devices == held


# --- parts -----------------------------------------------------------------------------------------


def _joined(pieces: Iterable[Mapping[str, Any]]) -> str:
    said = []
    for choice in (choice for piece in pieces for choice in piece["choices"]):
        said.append(choice["delta"].get("content") if "delta" in choice else choice["text"])
    return "".join(filter(None, said))


async def _all_of(stream: AsyncGenerator[bytes | list[bytes]]) -> list[bytes]:
    """The pieces of a stream, one by one."""
    pieces: list[bytes] = []
    async with contextlib.aclosing(stream):
        async for given in stream:
            pieces += given if isinstance(given, list) else [given]
    return pieces


async def _first_of(stream: AsyncGenerator[bytes | list[bytes]]) -> object:
    async with contextlib.aclosing(stream):
        return await anext(stream)


async def _count(running: Callable[[Any], int] | None, engine: Engine) -> int | None:
    return None if running is None else await in_thread(running, engine)


async def _one_runs(running: Callable[[Any], int] | None, engine: Engine) -> bool:
    return await _count(running, engine) != 0


async def _none_runs(running: Callable[[Any], int] | None, engine: Engine) -> bool:
    return not await _count(running, engine)
