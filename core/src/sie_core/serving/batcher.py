"""One batcher per engine: gathers what is waiting into runs, fairly, and hands the answers back.

It never waits for company: an idle engine starts at once with what is there, and while it runs, requests pile up and
are prepared on the side. Requests take turns: each may have some items run before it goes behind the others, so a
request of two thousand texts and one of a single text both get on. An item that fails fails its own request only.

Everything here runs on the event loop, except the functions of ``_hop``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from attrs import define, frozen

from sie_core.errors import DeadlineExceeded, EngineDied, NonFiniteOutput, OutOfMemory
from sie_core.serving._choose import RunCost, Slot, choose
from sie_core.serving._hop import Hop, PreparedChunk, prepare, run, run_chosen, translate
from sie_core.serving._job import TURN, Chunk, Job

if TYPE_CHECKING:
    from sie_core.adapter import BatchEngine
    from sie_core.residency.worker import EngineWorker
    from sie_core.types import BatchRequest

__all__ = ["BatchLimits", "Batcher"]

_WINDOW = 256  # items looked at for one run
_CHUNK_S = 0.01  # work for one hop of preparing: a large request is cut up, so that others get on in between
_CHUNK_MIN, _CHUNK_MAX = 64, 512
_WORTH_A_THREAD_S = 0.002  # preparing beside a run pays when the run takes longer than the hop to another thread
_GROW = 1.05  # a budget cut by an out-of-memory error comes back by this factor a run


@frozen
class BatchLimits:
    """``tokens``: padded tokens a run may hold (the model's ``batch_tokens``); the engine's own limit narrows it."""

    tokens: int = 8192


@define(eq=False)
class _Recovery:
    """What has been tried for a failed run already."""

    asked_for_room: bool = False


class Batcher:
    """Runs requests on one batch engine.

    ``tokeniser`` prepares requests while the engine is busy. ``make_room(lease, nbytes)`` is asked once when a single
    item runs out of memory. ``observe(items, tokens, seconds)`` hears of every run.
    """

    def __init__(
        self,
        engine: BatchEngine,
        worker: EngineWorker,
        limits: BatchLimits | None = None,
        *,
        tokeniser: EngineWorker | None = None,
        make_room: Callable[[Any, int], Awaitable[bool]] | None = None,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.engine = engine
        self.cost = RunCost()
        self._worker = worker
        self._limits = limits or BatchLimits()
        self._tokeniser = tokeniser
        self._make_room = make_room
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[Job, None] = OrderedDict()  # jobs without an answer, in order of their turn
        self._newcomers: OrderedDict[Job, None] = OrderedDict()  # jobs of which nothing is prepared yet
        self._unfinished: OrderedDict[Job, None] = OrderedDict()  # large jobs of which more is to be prepared
        self._pump_task: asyncio.Task[None] | None = None
        self._tokenising = False
        self._timer: asyncio.TimerHandle | None = None  # at or before the earliest deadline of all
        self._chunk = _CHUNK_MIN  # items prepared in one hop, as measured
        self._run_items = 0
        self._cap: float | None = None  # a budget lowered by an out-of-memory error
        self._dead: BaseException | None = None

    # --- the front door --------------------------------------------------------------------------------

    async def submit(
        self,
        request: BatchRequest,
        *,
        deadline: float,
        lease: Any = None,
        on_start: Callable[[], None] | None = None,
    ) -> Job:
        """Run a request; the job returned holds its outputs and times.

        ``deadline`` is on the loop's clock. ``on_start`` is called when its first item goes to the engine.

        Raises:
            DeadlineExceeded, EngineDied, InferenceError, NonFiniteOutput, OutOfMemory, and what ``prepare`` raises.
        """
        if self._dead is not None:
            raise self._dead
        job = Job(request, self._loop.create_future(), deadline, lease)
        if on_start is not None:
            job.on_start = on_start
        if not job.left:
            return job
        self._waiting[job] = None
        self._newcomers[job] = None
        if self._timer is None or deadline < self._timer.when():
            self._set_timer(deadline)
        if self._pump_task is None:
            self._pump_task = self._loop.create_task(self._pump())
        elif not self._tokenising:
            self._tokenise()
        try:
            await job.future
        finally:
            self._forget(job)
        return job

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting)

    @property
    def waiting_items(self) -> int:
        """Items that have not run yet."""
        return sum(job.left for job in self._waiting)

    def fail(self, error: BaseException) -> None:
        """The engine is gone: everything pending fails with ``error``, and so does whatever comes."""
        if self._dead is None:
            self._dead = error
        self._fail_pending(error)

    def _fail_pending(self, error: BaseException) -> None:
        for job in self._waiting:
            _fail(job, error)

    def _forget(self, job: Job) -> None:
        self._waiting.pop(job, None)
        self._newcomers.pop(job, None)
        self._unfinished.pop(job, None)
        job.ready.clear()
        if not self._waiting:
            self._set_timer(None)  # it would keep the engine from being freed

    # One timer for all requests: most have the same time to live, so that it hardly ever has to be set anew.

    def _set_timer(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if when is None else self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        now, self._timer = self._loop.time(), None
        for job in self._waiting:
            if job.deadline <= now:
                where = "was running" if job.started else "was waiting for its turn"
                _fail(job, DeadlineExceeded(f"the request's deadline passed while it {where}"))
        left = [job.deadline for job in self._waiting if not job.dead]
        if left:
            self._set_timer(min(left))

    # --- tokenising beside a run -----------------------------------------------------------------------

    def _tokenise(self) -> None:
        """Prepare the next newcomers on the side, if the engine is busy for long enough to make it worth while."""
        side = self._side_thread()
        if side is None:
            return
        chunks = self._take_chunks()
        if not chunks:
            return
        self._tokenising = True
        future = side.submit(prepare, self.engine, chunks)
        future.add_done_callback(self._tokenised)

    def _side_thread(self) -> EngineWorker | None:
        return self._tokeniser if self.cost.runs and self.cost.quickest >= _WORTH_A_THREAD_S else None

    def _tokenised(self, future: asyncio.Future[list[PreparedChunk]]) -> None:
        self._tokenising = False
        error = EngineDied("tokenising was called off") if future.cancelled() else future.exception()
        if error is not None:
            self._fail_pending(error)
            return
        self._accept(future.result())
        if self._pump_task is None:
            if self._waiting:
                self._pump_task = self._loop.create_task(self._pump())
        else:
            self._tokenise()

    def _take_chunks(self) -> list[Chunk]:
        """What to prepare next: newcomers in order of arrival, and one more piece of one large job that runs short."""
        chunks: list[Chunk] = []
        items = 0
        while items < self._chunk and self._newcomers:
            job, _ = self._newcomers.popitem(last=False)
            if job.dead:
                continue
            chunks.append(job.take_chunk(self._chunk))
            items += len(chunks[-1].request.items)
            if job.unprepared:
                self._unfinished[job] = None
        ahead = max(TURN, 2 * self._run_items)
        short = next((job for job in self._unfinished if len(job.ready) < ahead and not job.dead), None)
        if short is not None and all(chunk.job is not short for chunk in chunks):
            chunks.append(short.take_chunk(self._chunk))
            if short.unprepared:
                self._unfinished.move_to_end(short)
            else:
                del self._unfinished[short]
        return chunks

    def _accept(self, prepared: Sequence[PreparedChunk]) -> None:
        for part in prepared:
            job = part.chunk.job
            job.tokenise_s += part.seconds
            if len(part.items) >= TURN:
                paced = int(_CHUNK_S / max(part.seconds, 1e-6) * len(part.items))
                self._chunk = min(max((3 * self._chunk + paced) // 4, _CHUNK_MIN), _CHUNK_MAX)
            if part.error is not None:
                _fail(job, part.error)
            elif not job.dead:
                job.ready.update(enumerate(part.items, part.chunk.first))

    # --- running ---------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Run after run, until nothing is left that could run. Ends then: an idle batcher holds no task."""
        try:
            while True:
                hop = await self._next_hop()
                if hop is None:
                    return
                if hop.error is None:
                    self._settle(hop)
                else:
                    await self._recover(hop.chosen, hop.error, _Recovery())
        except asyncio.CancelledError:
            self._fail_pending(EngineDied("the server stopped the engine"))
            raise
        except BaseException as error:  # nobody may be left waiting, whatever a plugin's thread came back with
            self._fail_pending(translate(error, "the engine"))
        finally:
            self._pump_task = None

    async def _next_hop(self) -> Hop | None:
        async with self._permit():
            window = self._window()
            # With enough to fill a run, the rest is left to the side thread: the engine should not wait for it.
            enough = len(window) >= self._chunk and self._side_thread() is not None
            chunks = [] if enough else self._take_chunks()
            if not window and not chunks:
                return None
            sizing = self.cost.sizing(self._budget(), pads=self.engine.pads)
            if chunks:
                for chunk in chunks:
                    chunk.job.start()
                future = self._worker.submit(run, self.engine, chunks, window, sizing)
            else:
                chosen = choose(window, sizing)
                for slot in chosen:
                    slot.job.start()
                future = self._worker.submit(run_chosen, self.engine, Hop(chosen=chosen))
            if not self._tokenising:
                self._tokenise()
            hop: Hop = await future
        self._accept(hop.prepared)
        self._take_out(hop.chosen, window)
        return hop

    def _permit(self) -> AbstractAsyncContextManager[Any]:
        """The right to run beside the other engines of the pool; it belongs to the engine, any lease has it."""
        for job in self._waiting:
            if job.lease is not None and not job.dead:
                permit: AbstractAsyncContextManager[Any] = job.lease.permit
                return permit
        return nullcontext()

    def _budget(self) -> int:
        budget = self._limits.tokens
        if self.engine.max_batch_tokens is not None:
            budget = min(budget, self.engine.max_batch_tokens)
        return max(1, budget if self._cap is None else min(budget, int(self._cap)))

    def _window(self) -> list[Slot]:
        """The items that could run, in order of their turn: a turn's worth of each job, then more of each."""
        window: list[Slot] = []
        jobs: list[tuple[Job, list[int]]] = []
        for job in self._waiting:
            if not job.ready or job.dead:
                continue
            if len(job.ready) == 1:
                ((index, item),) = job.ready.items()
                window.append(Slot(job, index, item, item.tokens))
            else:
                indices = list(job.ready)
                window += [Slot(job, i, job.ready[i], job.ready[i].tokens) for i in indices[: job.turn]]
                if len(indices) > job.turn:
                    jobs.append((job, indices[job.turn :]))
            if len(window) >= _WINDOW:
                return window[:_WINDOW]
        while jobs and len(window) < _WINDOW:
            more, jobs = jobs, []
            for job, indices in more:
                window += [Slot(job, i, job.ready[i], job.ready[i].tokens) for i in indices[:TURN]]
                if len(indices) > TURN:
                    jobs.append((job, indices[TURN:]))
        return window[:_WINDOW]

    def _take_out(self, chosen: Sequence[Slot], window: Sequence[Slot]) -> None:
        """Book the chosen items as run, pass turns on, and count who was passed over."""
        served: dict[Job, int] = {}
        for slot in chosen:
            slot.job.ready.pop(slot.index, None)
            served[slot.job] = served.get(slot.job, 0) + 1
        for job, count in served.items():
            job.start()
            job.passed = 0
            job.turn -= count
            if job.turn <= 0:
                job.turn = TURN
                if job in self._waiting:
                    self._waiting.move_to_end(job)
        if len(chosen) < len(window):
            for job in {slot.job for slot in window}.difference(served):
                job.passed += 1

    def _settle(self, hop: Hop) -> None:
        """Hand the answers of a run to its jobs."""
        chosen, seconds = hop.chosen, hop.seconds
        if not chosen:
            return
        longest = tokens = 0
        for slot in chosen:
            tokens += slot.tokens
            longest = max(longest, slot.tokens)
        self._run_items = len(chosen)
        self.cost.observe(longest * len(chosen) if self.engine.pads else tokens, len(chosen), seconds)
        if self._cap is not None:
            self._cap *= _GROW
            if self._cap >= self._limits.tokens:
                self._cap = None
        if self._observe is not None:
            self._observe(len(chosen), tokens, seconds)
        for position in hop.not_finite:
            chosen[position].job.bad.append(chosen[position].index)
        previous: Job | None = None
        for slot, output in zip(chosen, hop.outputs, strict=True):
            job = slot.job
            job.outputs[slot.index] = output
            job.left -= 1
            if job is not previous:
                job.inference_s += seconds
                previous = job
            if not job.left and not job.dead:
                if job.bad:
                    _fail(job, NonFiniteOutput(sorted(job.bad)))
                else:
                    job.future.set_result(None)

    # --- when a run fails ------------------------------------------------------------------------------

    async def _recover(self, slots: Sequence[Slot], error: BaseException, tried: _Recovery) -> None:
        """Find out which items are to blame, and let the others have their answers."""
        slots = [slot for slot in slots if not slot.job.dead]
        if not slots or self._dead is not None:
            return
        if isinstance(error, OutOfMemory):
            await self._recover_memory(slots, error, tried)
            return
        parts: dict[Job, list[Slot]] = {}
        for slot in slots:
            parts.setdefault(slot.job, []).append(slot)
        if len(parts) == 1:
            _fail(slots[0].job, error)
            return
        for part in parts.values():
            await self._try(part, tried, alone=True)

    async def _recover_memory(self, slots: Sequence[Slot], error: OutOfMemory, tried: _Recovery) -> None:
        longest = max(slot.tokens for slot in slots)
        if len(slots) > 1:
            self._cap = max(1.0, len(slots) * longest / 2)
            middle = len(slots) // 2
            await self._try(slots[:middle], tried)
            await self._try(slots[middle:], tried)
        elif self._make_room is not None and not tried.asked_for_room:
            tried.asked_for_room = True
            wanted = (error.needed or 0) - (error.free or 0)
            # Outside the permit: those who have to leave may need it to finish what they are doing.
            if await self._make_room(slots[0].job.lease, max(wanted, 1)):
                await self._try(slots, tried)
            else:
                _fail(slots[0].job, error)
        else:
            _fail(slots[0].job, error)

    async def _try(self, slots: Sequence[Slot], tried: _Recovery, *, alone: bool = False) -> None:
        chosen = [slot for slot in slots if not slot.job.dead]
        if not chosen or self._dead is not None:
            return
        lease = chosen[0].job.lease
        async with lease.permit if lease is not None else nullcontext():
            hop: Hop = await self._worker.submit(run_chosen, self.engine, Hop(chosen=chosen))
        if hop.error is None:
            self._settle(hop)
        elif alone and not isinstance(hop.error, OutOfMemory):
            _fail(chosen[0].job, hop.error)
        else:
            await self._recover(chosen, hop.error, tried)


def _fail(job: Job, error: BaseException) -> None:
    if not job.future.done():
        job.future.set_exception(translate(error, "the engine"))
