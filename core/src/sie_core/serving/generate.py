"""Generation: requests that an engine answers piece by piece, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field

from sie_core.adapter import StreamEngine
from sie_core.errors import DeadlineExceeded, InferenceError, Unsupported
from sie_core.serving._job import FAULTS, translate
from sie_core.serving._silence import Silence
from sie_core.serving._sound import whose
from sie_core.serving._splice import Signature, Splice
from sie_core.serving._turns import Lasting
from sie_core.types import GenerateRequest

if TYPE_CHECKING:
    from sie_core.residency import Registry
    from sie_core.serving._front import Front, Visit
    from sie_core.telemetry import Telemetry

__all__ = ["Emit", "GenerateResult", "Generator"]

Emit = Callable[[bytes], Awaitable[None]]
"""Takes the pieces that are there, one or several: a line each."""


@define(eq=False)
class GenerateResult:
    """How a request that generates was answered. Times in seconds.

    ``answer`` is OpenAI's object; empty for a stream, which has gone out by then. ``usage`` is as the engine counts.
    ``queue_s``: from the arrival until the engine had it; ``first_s``: until the first piece, for a stream.
    """

    model: str
    id: str
    usage: Mapping[str, Any] = field(factory=dict)
    answer: Mapping[str, Any] = field(factory=dict)
    queue_s: float = 0.0
    inference_s: float = 0.0
    first_s: float | None = None


@define(eq=False)
class _Course:
    """How far a request has come."""

    deadline: float
    owner: str = "the engine"
    """Whose engine it is, for errors."""
    limit: asyncio.Timeout | None = None
    runs: bool = False
    queue_s: float = 0.0
    first_s: float | None = None
    silence: Silence | None = None

    def begin(self, first_s: float, *, silence_s: float | None) -> None:
        """The first piece is there. From here on an answer may take its time, but for ``silence_s`` between two pieces.

        ``None``: it keeps its deadline.
        """
        self.first_s = first_s
        if silence_s is not None and self.limit is not None and not self.limit.expired():
            self.limit.reschedule(None)
            self.silence = Silence(self.limit, silence_s)

    async def next(self, pieces: AsyncGenerator[bytes | list[bytes]]) -> bytes | list[bytes] | None:
        """What comes next, or none."""
        if self.silence is None:
            return await _next(pieces, self.owner)
        self.silence.ask()
        piece = await _next(pieces, self.owner)
        self.silence.heard()
        return piece

    def end(self) -> None:
        """The answer is over, one way or another."""
        if self.silence is not None:
            self.silence.over()

    def too_late(self, silence_s: float) -> DeadlineExceeded:
        """What the request ends with once its limit has run out."""
        if self.silence is not None and self.silence.broke:
            return DeadlineExceeded(f"the engine has said nothing for {silence_s:g} s in the middle of its answer")
        where = "was running" if self.runs else "was waiting for its turn"
        return DeadlineExceeded(f"the request's deadline passed while it {where}")


class Generator:
    """Answers requests that generate, on the models of a registry."""

    def __init__(self, registry: Registry, front: Front, telemetry: Telemetry) -> None:
        self._registry = registry
        self._front = front
        self._telemetry = telemetry

    async def whole(self, model: str, request: GenerateRequest, deadline_s: float | None) -> GenerateResult:
        """The answer in one piece."""
        with self._front.visit(model) as visit:
            course = _Course(visit.deadline(deadline_s))
            signature = Signature(request.kind, visit.lane.name)
            async with self._inside(visit, request, course) as engine:
                try:
                    answer = await engine.generate(request)
                except FAULTS as error:
                    raise translate(error, f"generate of {course.owner}")  # noqa: B904 - it has its cause already
            if not isinstance(answer, Mapping):
                raise InferenceError(f"generate of {course.owner} returned {type(answer).__name__}: return a mapping")
            usage = answer.get("usage") or {}
            return self._done(visit, course, signature, usage, signature.sign(answer))

    async def stream(
        self, model: str, request: GenerateRequest, emit: Emit, deadline_s: float | None, *, whole: bool
    ) -> GenerateResult:
        """The answer piece by piece, as they come; ``emit`` is waited for."""
        with self._front.visit(model) as visit:
            course = _Course(visit.deadline(deadline_s))
            signature = Signature(request.kind, visit.lane.name)
            asked = request.body.get("stream_options") or {}
            splice = Splice(signature, keep_usage=bool(asked.get("include_usage")))
            # The engine is always asked: what was generated is counted, and an answer without it has no end.
            body = {**request.body, "stream_options": {**asked, "include_usage": True}}
            request = evolve(request, body=body)
            async with self._inside(visit, request, course) as engine:
                async with aclosing(_pieces(engine, request, course.owner)) as pieces:
                    while (piece := await course.next(pieces)) is not None:
                        if course.first_s is None:
                            silence_s = None if whole else visit.lane.spec.deadline_s
                            course.begin(perf_counter() - visit.began, silence_s=silence_s)
                        ready = splice.take_all(piece) if isinstance(piece, list) else splice.take(piece)
                        if ready is not None:
                            await emit(ready)
                if splice.usage is None:
                    raise InferenceError("the engine's answer ended before it was complete")
            return self._done(visit, course, signature, splice.usage, {})

    @asynccontextmanager
    async def _inside(self, visit: Visit, request: GenerateRequest, course: _Course) -> AsyncIterator[StreamEngine]:
        """The engine, with the request counted among those that it runs. Leaves the queue on the way in."""
        lane = visit.lane
        try:
            async with AsyncExitStack() as stack:
                lease = stack.enter_context(
                    self._registry.try_acquire(lane.name)
                    or await self._front.acquire(lane, partial(lane.check_generate, request=request), course.deadline)
                )
                lane.spec, engine, course.owner = lease.model, lease.engine, whose(lease.worker)
                lane.check_generate(engine.capabilities, request=request)
                if not isinstance(engine, StreamEngine):
                    raise Unsupported(f"the engine of model {lane.name!r} does not generate", param="model")
                stack.enter_context(Lasting(lease))
                course.limit = await stack.enter_async_context(asyncio.timeout_at(course.deadline))
                if request.lora is not None:
                    left = max(0.0, course.deadline - asyncio.get_running_loop().time())
                    stack.enter_context(await self._registry.hold_lora(lease, request.lora, wait_s=left))
                await stack.enter_async_context(lane.turns_of(engine))
                visit.place.free()
                course.queue_s, course.runs = perf_counter() - visit.began, True
                yield engine
        except TimeoutError:
            if course.limit is None or not course.limit.expired():
                raise
            raise course.too_late(lane.spec.deadline_s) from None
        finally:
            course.end()

    def _done(
        self,
        visit: Visit,
        course: _Course,
        signature: Signature,
        usage: Mapping[str, Any],
        answer: Mapping[str, Any],
    ) -> GenerateResult:
        lane = visit.lane
        seconds = perf_counter() - visit.began
        result = GenerateResult(
            lane.name, signature.id, usage, answer, course.queue_s, seconds - course.queue_s, course.first_s
        )
        asked, made = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        lane.ran(result.inference_s)
        lane.meter.generated(asked, made, course.queue_s, course.first_s)
        if self._telemetry.tracing:
            self._telemetry.trace(
                lane.name,
                1,
                asked + made,
                queue_s=result.queue_s,
                tokenise_s=0.0,
                inference_s=result.inference_s,
                task="generate",
            )
        return result


def _pieces(engine: StreamEngine, request: GenerateRequest, owner: str) -> AsyncGenerator[bytes | list[bytes]]:
    try:
        return engine.stream(request)
    except FAULTS as error:
        raise translate(error, f"stream of {owner}")  # noqa: B904 - it has its cause already


async def _next(pieces: AsyncGenerator[bytes | list[bytes]], owner: str) -> bytes | list[bytes] | None:
    """What comes next, or none. What the engine raises is told apart here from what becomes of a piece later."""
    try:
        return await anext(pieces)
    except StopAsyncIteration:
        return None
    except FAULTS as error:
        raise translate(error, f"stream of {owner}")  # noqa: B904 - as above


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0
