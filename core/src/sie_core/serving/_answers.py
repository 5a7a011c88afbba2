"""Requests that are answered as a whole: from a place in the queue to one output an item."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from attrs import define, evolve, field

from sie_core.adapter import BatchEngine, StreamEngine
from sie_core.errors import InferenceError, InvalidInput, NonFiniteOutput, Unsupported
from sie_core.residency.worker import Worker
from sie_core.serving._compare import compare, work
from sie_core.serving._turns import answer as answer_at_once
from sie_core.serving.batcher import Batcher, BatchLimits
from sie_core.types import BatchRequest, EncodeOutput, ScoreOutput, Task

if TYPE_CHECKING:
    from sie_core.residency import Lease, Registry
    from sie_core.residency.worker import EngineWorker
    from sie_core.serving._allowance import Allowance
    from sie_core.serving._front import Front
    from sie_core.serving._lane import Lane, Place

__all__ = ["Answer", "Answers"]

T = TypeVar("T")

_WORTH_A_THREAD: Final = 2_000_000
"""Multiplications that take about as long as the way to another thread and back."""


@define(eq=False)
class Answer(Generic[T]):
    """A request's answer: one output an item, in order; ``tokens`` is what the request is charged for.

    ``dims``: the model's own, by output.

    Times in seconds. ``tokenise_s`` is spent on this request alone, ``inference_s`` is that of the runs its items took
    part in, ``queue_s`` all the rest: waiting for the model, for a turn, and for the run's neighbours to be prepared.
    """

    model: str
    outputs: Sequence[T]
    tokens: int
    queue_s: float
    tokenise_s: float
    inference_s: float
    dims: Mapping[str, int] = field(factory=dict)


class Answers:
    """Answers requests on the models of a registry.

    ``side_thread=False`` does everything that is not the engine's own on the event loop or on the engines' threads.
    """

    def __init__(self, registry: Registry, front: Front, *, side_thread: bool) -> None:
        self._registry = registry
        self._front = front
        self._tokeniser: EngineWorker | None = Worker("tokeniser") if side_thread else None
        self._decoder: EngineWorker | None = Worker("decoder") if side_thread else None
        self._comparer: EngineWorker | None = Worker("comparer") if side_thread else None

    def close(self) -> None:
        """End the threads. Idempotent."""
        for worker in (self._tokeniser, self._decoder, self._comparer):
            if worker is not None:
                worker.close()

    async def answer(
        self, lane: Lane, place: Place, request: BatchRequest, deadline: float, allowance: Allowance | None = None
    ) -> Answer[Any]:
        """Get hold of the model, and of the LoRA adapter where one is named; run; let go."""
        with self._registry.try_acquire(lane.name) or await self._front.acquire(
            lane, partial(lane.check, request=request), deadline
        ) as lease:
            lane.spec, engine = lease.model, lease.engine
            lane.check(engine.capabilities, request)
            run: Callable[..., Awaitable[Answer[Any]]] = self._run
            if allowance is not None:
                run = partial(self._run, allowance=allowance)
                if request.task is Task.ENCODE:
                    allowance.at_once(request, engine.capabilities)
            if request.task is Task.SCORE and engine.capabilities.compares is not None:
                run = self._compare
            if request.params.lora is None:
                answer = await run(lane, place, lease, request, deadline)
            else:
                wait_s = max(0.0, deadline - asyncio.get_running_loop().time())
                with await self._registry.hold_lora(lease, request.params.lora, wait_s=wait_s):
                    answer = await run(lane, place, lease, request, deadline)
            answer.dims = engine.capabilities.dims
            return answer

    async def _run(
        self,
        lane: Lane,
        place: Place,
        lease: Lease,
        request: BatchRequest,
        deadline: float,
        allowance: Allowance | None = None,
    ) -> Answer[Any]:
        engine = lease.engine
        if isinstance(engine, BatchEngine):
            batcher = lane.batcher
            if batcher is None or batcher.engine is not engine:
                batcher = self._batcher(lane, lease, engine)
            job = await batcher.submit(
                request, deadline=deadline, lease=lease, on_start=place.free, allowance=allowance
            )
            outputs: Sequence[Any] = job.outputs  # all are there now
            tokens = 0
            for output in outputs:
                tokens += output.tokens
            return Answer(lane.name, outputs, tokens, 0.0, job.tokenise_s, job.inference_s)
        if isinstance(engine, StreamEngine):
            began = time.perf_counter()
            outputs = await answer_at_once(lane, place, lease, engine, request, deadline)
            tokens = sum(output.tokens for output in outputs)
            seconds = time.perf_counter() - began
            lane.ran(seconds)
            return Answer(lane.name, outputs, tokens, 0.0, 0.0, seconds)
        raise Unsupported(f"the engine of model {lane.name!r} takes no requests", param="model")

    def _batcher(self, lane: Lane, lease: Lease, engine: BatchEngine) -> Batcher:
        """A batcher for an engine that is new here."""
        batcher = Batcher(
            engine,
            lease.worker,
            BatchLimits(lane.spec.batch_tokens),
            tokeniser=self._tokeniser,
            decoder=self._decoder,
            make_room=self._registry.make_room,
            observe=lane.meter.ran,
        )
        lane.batcher = batcher
        lease.lost.add_done_callback(lambda lost: _when_lost(batcher, lost))
        return batcher

    # --- scores from vectors ---------------------------------------------------------------------------

    async def _compare(
        self, lane: Lane, place: Place, lease: Lease, request: BatchRequest, deadline: float
    ) -> Answer[Any]:
        """Encode the query and the items side by side, each as what it is, and compare their vectors."""
        kind = lease.engine.capabilities.compares
        assert kind is not None
        assert request.query is not None
        plain = evolve(request.params, output_types=(kind,), is_query=False)
        items = BatchRequest(Task.ENCODE, request.items, plain)
        query = BatchRequest(Task.ENCODE, (request.query,), evolve(plain, is_query=True))
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._of_query(self._run(lane, place, lease, query, deadline)))
                running = group.create_task(self._run(lane, place, lease, items, deadline))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0]  # noqa: B904 - it has its cause already
        asked, encoded = asking.result(), running.result()
        began = time.perf_counter()
        scores = await self._compared(kind, asked.outputs[0], encoded.outputs)
        bad = [index for index, one in enumerate(scores) if not math.isfinite(one.score)]
        if bad:
            raise NonFiniteOutput(bad)
        seconds = max(asked.inference_s, encoded.inference_s) + time.perf_counter() - began
        tokenise_s = asked.tokenise_s + encoded.tokenise_s
        return Answer(lane.name, scores, asked.tokens + encoded.tokens, 0.0, tokenise_s, seconds)

    async def _of_query(self, running: Any) -> Answer[EncodeOutput]:
        """An error of the query is not one of item 0."""
        try:
            answer: Answer[EncodeOutput] = await running
        except InvalidInput as error:
            if error.index is not None or error.param is None:  # else it is about a field of the request
                error.index, error.param = None, "query"
            raise
        except NonFiniteOutput:
            raise InferenceError("the model's output is not finite for the query") from None
        return answer

    async def _compared(
        self, kind: str, query: EncodeOutput, documents: Sequence[EncodeOutput]
    ) -> Sequence[ScoreOutput]:
        if self._comparer is None or work(kind, query, documents) < _WORTH_A_THREAD:
            return compare(kind, query, documents)
        scores: Sequence[ScoreOutput] = await self._comparer.submit(compare, kind, query, documents)
        return scores


def _when_lost(batcher: Batcher, lost: asyncio.Future[object]) -> None:
    error = None if lost.cancelled() else lost.exception()
    if error is not None:
        batcher.fail(error)
