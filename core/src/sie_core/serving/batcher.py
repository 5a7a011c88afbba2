"""One batcher per engine: gathers what is waiting into runs, fairly, and hands the answers back.

It never waits for company: an idle engine starts at once with what is there, and while it runs, requests pile up and
are prepared on the side. Requests take turns: each may have some items run before it goes behind the others, so a
request of two thousand texts and one of a single text both get on. An item that fails fails its own request only.

Everything here runs on the event loop, except the functions of ``_hop``.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from attrs import frozen

from sie_core.errors import DeadlineExceeded, EngineDied, NonFiniteOutput, OutOfMemory
from sie_core.serving._choose import RunCost, Slot, choose
from sie_core.serving._hop import Hop, PreparedChunk, prepare, run, run_chosen
from sie_core.serving._intake import Intake
from sie_core.serving._job import TURN, Job, translate
from sie_core.serving._pieces import Pieces, is_slow
from sie_core.serving._recovery import MakeRoom, Recovery
from sie_core.serving._sound import whose

if TYPE_CHECKING:
    from sie_core.adapter import BatchEngine
    from sie_core.residency.worker import EngineWorker
    from sie_core.serving._allowance import Allowance
    from sie_core.types import BatchRequest

__all__ = ["BatchLimits", "Batcher"]

_WINDOW = 256  # items looked at for one run
_WORTH_A_THREAD_S = 0.002  # preparing beside a run pays when the run takes longer than the hop to another thread
_GROW = 1.05  # a budget cut by an out-of-memory error comes back by this factor a run


@frozen
class BatchLimits:
    """``tokens``: padded tokens a run may hold (the model's ``batch_tokens``); the engine's own limit narrows it."""

    tokens: int = 8192


class Batcher:
    """Runs requests on one batch engine.

    ``tokeniser`` prepares requests while the engine is busy, ``decoder`` those that take long to prepare.
    ``make_room(lease, nbytes)`` is asked once when a single item runs out of memory. ``observe(items, tokens,
    seconds)`` hears of every run.
    """

    def __init__(
        self,
        engine: BatchEngine,
        worker: EngineWorker,
        limits: BatchLimits | None = None,
        *,
        tokeniser: EngineWorker | None = None,
        decoder: EngineWorker | None = None,
        make_room: MakeRoom | None = None,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.engine = engine
        self.cost = RunCost()
        self._worker = worker
        self._owner = whose(worker)
        self._limits = limits or BatchLimits()
        self._tokeniser = tokeniser
        self._make_room = make_room
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._waiting: OrderedDict[Job, None] = OrderedDict()  # jobs without an answer, in order of their turn
        self._intake = Intake()
        self._pieces = Pieces(engine, decoder or worker, self._owner)
        self._pump_task: asyncio.Task[None] | None = None
        self._tokenising = False
        self._timer: asyncio.TimerHandle | None = None  # at or before the earliest deadline of all
        self._run_items = 0
        self._cap: float | None = None  # a budget lowered by an out-of-memory error
        self._dead: BaseException | None = None
        self._running: asyncio.Future[Hop] | None = None  # the run that was handed to the engine's thread

    # --- the front door --------------------------------------------------------------------------------

    async def submit(
        self,
        request: BatchRequest,
        *,
        deadline: float,
        lease: Any = None,
        on_start: Callable[[], None] | None = None,
        allowance: Allowance | None = None,
    ) -> Job:
        """Run a request; the job returned holds its outputs and times.

        ``deadline`` is on the loop's clock. ``on_start`` is called when its first item goes to the engine.
        ``allowance`` hears what the answer will take, and may fail the request.

        Raises:
            DeadlineExceeded, EngineDied, InferenceError, NonFiniteOutput, OutOfMemory, and what ``prepare`` raises.
        """
        if self._dead is not None:
            raise self._dead.with_traceback(None)  # or it would gather the frames of every request that it refuses
        job = Job(request, self._loop.create_future(), deadline, lease)
        if on_start is not None:
            job.on_start = on_start
        if allowance is not None:
            job.on_output = allowance.of_output
            job.on_prepared = allowance.of_prepared(request, self.engine.capabilities)
        if not job.left:
            return job
        self._waiting[job] = None
        if self._timer is None or deadline < self._timer.when():
            self._set_timer(deadline)
        if is_slow(request):
            self._pieces.add(job)
            self._go_on()
        else:
            self._take_in(job)
        try:
            await job.future
        except asyncio.CancelledError:
            if job.dead and not job.future.cancelled():
                job.future.exception()  # it failed in the turn in which its client left: nobody else will look
            raise
        finally:
            self._forget(job)
        return job

    def _take_in(self, job: Job) -> None:
        self._intake.add(job)
        if self._pump_task is None:
            self._pump_task = self._loop.create_task(self._pump())
        elif not self._tokenising:
            self._tokenise()

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
        running = self._running
        if running is not None and self._worker.current is not running:
            running.cancel()  # queued behind a call that may never return: it must not keep its permit

    def _fail_pending(self, error: BaseException) -> None:
        for job in self._waiting:
            job.fail(error)

    def _forget(self, job: Job) -> None:
        self._waiting.pop(job, None)
        self._intake.drop(job)
        self._pieces.drop(job)
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
                job.fail(DeadlineExceeded(f"the request's deadline passed while it {where}"))
        left = [job.deadline for job in self._waiting if not job.dead]
        if left:
            self._set_timer(min(left))

    # --- tokenising beside a run -----------------------------------------------------------------------

    def _tokenise(self) -> None:
        """Prepare the next newcomers on the side, if the engine is busy for long enough to make it worth while."""
        side = self._side_thread()
        if side is None:
            return
        chunks = self._intake.take(self._run_items)
        if not chunks:
            return
        self._tokenising = True
        future = side.submit(prepare, self.engine, chunks, self._owner)
        future.add_done_callback(self._tokenised)

    def _side_thread(self) -> EngineWorker | None:
        return self._tokeniser if self.cost.runs and self.cost.quickest >= _WORTH_A_THREAD_S else None

    def _tokenised(self, future: asyncio.Future[list[PreparedChunk]]) -> None:
        self._tokenising = False
        error = EngineDied("tokenising was called off") if future.cancelled() else future.exception()
        if error is not None:
            self._fail_pending(error)
            return
        self._intake.accept(future.result())
        if self._pump_task is None:
            if self._waiting:
                self._pump_task = self._loop.create_task(self._pump())
        else:
            self._tokenise()

    # --- what takes long to prepare --------------------------------------------------------------------

    def _go_on(self) -> None:
        self._pieces.go_on(max(TURN, 2 * self._run_items), self._piece_done)

    def _piece_done(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail_pending(error)
            return
        if self._pump_task is None and self._waiting:
            self._pump_task = self._loop.create_task(self._pump())
        self._go_on()

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
                    self._learn(hop)
                    await Recovery(self._run_again, self._make_room).recover(hop.chosen, hop.error)
        except asyncio.CancelledError:
            self._fail_pending(EngineDied("the server stopped the engine"))
            raise
        except BaseException as error:  # nobody may be left waiting, whatever a plugin's thread came back with
            self._fail_pending(error)
        finally:
            self._pump_task = None

    async def _next_hop(self) -> Hop | None:
        async with self._permit():
            window = self._window()
            # With enough to fill a run, the rest is left to the side thread: the engine should not wait for it.
            enough = len(window) >= self._intake.chunk and self._side_thread() is not None
            chunks = [] if enough else self._intake.take(self._run_items)
            if not window and not chunks:
                self._go_on()  # requests may have left for whose items others were not prepared
                return None
            sizing = self.cost.sizing(self._budget(), pads=self.engine.pads)
            if chunks:
                for chunk in chunks:
                    chunk.job.start()
                future = self._worker.submit(run, self.engine, chunks, window, sizing, self._owner)
            else:
                chosen = choose(window, sizing)
                for slot in chosen:
                    slot.job.start()
                future = self._worker.submit(run_chosen, self.engine, Hop(chosen=chosen), self._owner)
            if not self._tokenising:
                self._tokenise()
            hop: Hop = await self._ran(future)
        self._intake.accept(hop.prepared)
        self._take_out(hop.chosen, window)
        self._go_on()
        return hop

    async def _run_again(self, slots: Sequence[Slot]) -> Hop:
        if self._dead is not None:
            return Hop(chosen=[*slots], error=self._dead)
        async with self._permit():
            hop: Hop = await self._ran(self._worker.submit(run_chosen, self.engine, Hop(chosen=[*slots]), self._owner))
        if hop.error is None:
            self._settle(hop)
        else:
            self._learn(hop)
        return hop

    async def _ran(self, future: asyncio.Future[Hop]) -> Hop:
        self._running = future
        try:
            return await future
        except Exception as error:  # such as that the call ended its thread
            raise translate(error, f"run of {self._owner}")  # noqa: B904 - it has its cause already
        finally:
            self._running = None

    def _learn(self, hop: Hop) -> None:
        """A run that was too large for the device: the next ones stay below half of it, for a while."""
        if isinstance(hop.error, OutOfMemory) and len(hop.chosen) > 1:
            self._cap = max(1.0, self._size(hop.chosen) / 2)

    def _size(self, slots: Sequence[Slot]) -> int:
        """What a run of these costs, in tokens."""
        if self.engine.pads:
            return len(slots) * max([slot.tokens for slot in slots])
        return sum([slot.tokens for slot in slots])

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
        self._run_items = len(chosen)
        self.cost.observe(self._size(chosen), len(chosen), seconds)
        if self._cap is not None:
            self._cap *= _GROW
            if self._cap >= self._limits.tokens:
                self._cap = None
        if self._observe is not None:
            self._observe(len(chosen), sum([slot.tokens for slot in chosen]), seconds)
        for position in hop.not_finite:
            chosen[position].job.bad.append(chosen[position].index)
        previous: Job | None = None
        for slot, output in zip(chosen, hop.outputs, strict=True):
            job = slot.job
            job.take(slot.index, output)
            job.left -= 1
            if job is not previous:
                job.inference_s += seconds
                previous = job
            if not job.left and not job.dead:
                if job.bad:
                    job.fail(NonFiniteOutput(sorted(job.bad)))
                else:
                    job.future.set_result(None)
