"""LoRA adapters of resident engines: loaded when a request names one; the least recently used ones go first.

An adapter's bytes are booked before it is loaded, as a growth of its model. They are parked and woken with the engine;
after a cold load an adapter comes back with the next request that names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from attrs import define, field

from sie_core.errors import (
    DeadlineExceeded,
    EngineDied,
    LoraLoading,
    ModelLoading,
    NeverFits,
    OutOfMemory,
    ResourceExhausted,
    TransitionCancelled,
    Unsupported,
)
from sie_core.residency.failures import LoadFailure, classify
from sie_core.residency.lora_moves import LoraMoves, check_there, is_there, strike_out, takes_loras
from sie_core.residency.record import Lora, Record, Seat
from sie_core.residency.roster import consume, log
from sie_core.types import Residency

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle

__all__ = ["LoraHold", "Loras"]

T = TypeVar("T")


@define(eq=False)
class LoraHold:
    """The right to use an adapter; until it is released the adapter stays loaded."""

    _lora: Lora
    _on_release: Callable[[Lora], None] | None

    def release(self) -> None:
        """Give it back. Idempotent."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release(self._lora)

    def __enter__(self) -> LoraHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@define(eq=False)
class _Bringing:
    """A load of an adapter that is under way, and how many wait for it."""

    since: float
    task: asyncio.Task[None] = field(init=False)
    waiting: set[object] = field(factory=set)
    granted: set[object] = field(factory=set)
    """Those of them who have it in use already: it is loaded, and the next load must not take it from under them."""
    free_to_cancel: bool = field(default=True)
    """While it waits for a turn or for memory. A call into the engine is let end."""


class Loras:
    """Loads and unloads adapters, one at a time for each model."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._moves = LoraMoves(life)
        self._bringing: dict[Lora, _Bringing] = {}
        self._removing: set[Lora] = set()

    # --- what a model may be asked for -------------------------------------------------------------

    def configure(self, record: Record) -> None:
        """Take over the configuration's adapters: one that is gone, or is another one now, goes when nobody uses it."""
        wanted = record.spec.lora
        for name, lora in list(record.loras.items()):
            if lora.configured and name not in wanted:
                lora.configured = False
                self._forget(record, lora)
        for name, source in wanted.items():
            known = record.loras.setdefault(name, Lora(name))
            if known.source != source:
                known.source, known.failure, known.attempts = source, None, 0
            known.configured = True

    def add(self, record: Record, name: str, source: str | None) -> None:
        """Let requests name an adapter. One that is loaded is read again if its files have changed, and a failed load
        is forgotten: somebody may have mended the cause.

        Raises:
            Unsupported: it has no source, or is there already with another one.
        """
        lora = record.loras.get(name)
        if source is not None and lora is not None and self._is_only_a_name(record, lora):
            lora.source = None  # given by hand and never loaded: corrected by hand
        known = lora.source if lora is not None else None
        if source is None and known is None:
            self._find(record, name)  # raises: there is none, or it is on its way out
        if source is not None and known is not None and source != known:
            raise Unsupported(
                f"model {record.name!r} has a LoRA adapter {name!r} from {known}: unload it first, or give this one "
                "another name",
                supported=(known,), param="source",
            )  # fmt: skip
        if lora is None:
            lora = record.loras[name] = Lora(name)
        lora.source, lora.failure, lora.attempts, lora.recheck = source or known, None, 0, True

    def refuse(self, record: Record, name: str) -> None:
        """The model takes none: the name that was added is not kept."""
        lora = record.loras.get(name)
        if lora is not None and self._is_only_a_name(record, lora):
            del record.loras[name]

    def _is_only_a_name(self, record: Record, lora: Lora) -> bool:
        busy = lora.uses or lora in self._bringing or lora in self._removing
        return not (busy or lora.configured or self._loaded(record, lora))

    def _find(self, record: Record, name: str) -> Lora:
        lora = record.loras.get(name)
        if lora is not None and lora.source is None and lora.configured:
            raise LoraLoading(f"LoRA adapter {_full_name(record, lora)} is being unloaded", retry_after_s=1.0)
        if lora is None or lora.source is None:
            raise self._unknown(record, name)
        return lora

    @staticmethod
    def _unknown(record: Record, name: str) -> Unsupported:
        known = [lora.name for lora in record.loras.values() if lora.source is not None]
        return Unsupported(
            f"model {record.name!r} has no LoRA adapter {name!r}; "
            + (f"it has {', '.join(known)}" if known else "none is configured or was loaded"),
            supported=known, param="lora",
        )  # fmt: skip

    # --- using one ---------------------------------------------------------------------------------

    async def hold(self, record: Record, seat: Seat, name: str, wait_s: float) -> LoraHold:
        """See to it that the engine has the adapter, and that it keeps it until the hold is released.

        The caller has a lease on the engine.

        Raises:
            Unsupported: the model has no adapter of that name, or takes none at all.
            LoraLoading: it is not there within ``wait_s`` seconds.
            ModelLoadFailed, ResourceExhausted: it can't be loaded; EngineDied.
        """
        until = self._life.roster.now() + wait_s
        while True:
            lora = self._find(record, name)
            takes_loras(record, seat)
            if record.seat is not seat or seat.dead is not None:
                raise EngineDied(f"the engine of model {record.name!r} is gone")
            if _is_loaded(lora, seat) and not lora.gives_way:
                lora.uses += 1
                record.loras[name] = record.loras.pop(name)  # the last in order: used most recently
                return LoraHold(lora, lambda lora: self._released(record, lora))
            self._refuse(record, lora)
            if await self._wait(record, seat, lora, until):
                return LoraHold(lora, lambda lora: self._released(record, lora))

    def _refuse(self, record: Record, lora: Lora) -> None:
        """What a failed load of it means for the next request: as for models."""
        if lora.failure is None:
            return
        refusal = lora.failure.refusal(_full_name(record, lora), self._life.roster.now())
        if isinstance(refusal, ModelLoading):
            raise LoraLoading(refusal.message, retry_after_s=refusal.retry_after_s)
        if refusal is not None:
            raise refusal
        lora.failure = None

    async def _wait(self, record: Record, seat: Seat, lora: Lora, until: float) -> bool:
        """Wait for its load. Whether the caller has it in use then; else it has to look again."""
        roster = self._life.roster
        way = self._bringing.get(lora)
        if way is None or way.task.done():
            way = self._bringing[lora] = _Bringing(roster.now())
            task = way.task = asyncio.get_running_loop().create_task(self._bring(record, seat, lora, way))
            task.add_done_callback(lambda task: self._ended(record, lora, task))
            self._life.keep(task)
        me = object()
        way.waiting.add(me)
        try:
            done, _ = await asyncio.wait({way.task}, timeout=max(0.0, until - roster.now()))
        except BaseException:
            if me in way.granted:
                self._released(record, lora)
            raise
        finally:
            way.waiting.discard(me)
            if not way.waiting and not way.task.done() and way.free_to_cancel:
                self._bringing.pop(lora, None)  # nobody may join it any more
                way.task.cancel()
        if me in way.granted:
            return True
        if not done:
            spent = roster.now() - way.since
            left = 1.0 if lora.load_s is None else max(1.0, lora.load_s - spent)
            record.expect(roster.now(), left)
            raise LoraLoading(f"LoRA adapter {_full_name(record, lora)} is on its way", retry_after_s=left)
        if way.task.cancelled():
            raise LoraLoading(f"loading of LoRA adapter {_full_name(record, lora)} was called off")
        way.task.result()
        return False

    def _ended(self, record: Record, lora: Lora, task: asyncio.Task[None]) -> None:
        way = self._bringing.get(lora)
        if way is not None and way.task is task:
            del self._bringing[lora]
        consume(task)
        if lora.source is None:
            self._forget(record, lora)  # the configuration lost it meanwhile

    def _released(self, record: Record, lora: Lora) -> None:
        lora.uses -= 1
        if lora.uses:
            return
        self._tell_waiters(record)
        if lora.source is None:
            self._forget(record, lora)

    @staticmethod
    def _tell_waiters(record: Record) -> None:
        waiters, record.lora_waiters = record.lora_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def engine_gone(self, record: Record) -> None:
        """The engine was destroyed, and what it had loaded with it: nothing of it is kept alive by its adapters."""
        for lora in list(record.loras.values()):
            lora.seat = lora.loaded_from = lora.purpose = None
            if lora.source is None:
                self._forget(record, lora)
        self._tell_waiters(record)

    def sweep(self, record: Record) -> None:
        """After a wake: what was forgotten while the engine was parked goes now."""
        for lora in list(record.loras.values()):
            if lora.source is None:
                self._forget(record, lora)

    # --- loading one -------------------------------------------------------------------------------

    async def _bring(self, record: Record, seat: Seat, lora: Lora, way: _Bringing) -> None:
        """The task that loads an adapter. It holds a lease, so that the engine stays where it is."""
        roster = self._life.roster
        with self._life.lease(record, seat):
            try:
                async with seat.lora_turn:
                    while not _is_loaded(lora, seat):  # it may have been let stay after all
                        if _is_doubted(lora, seat):
                            await self._uninterrupted(way, self._recheck(record, seat, lora))
                            continue
                        started = roster.now()
                        await self._make_place(record, seat, lora, way)
                        await self._admit_and_load(record, seat, lora, way)
                        lora.load_s = roster.now() - started
                    way.granted = set(way.waiting)
                    lora.uses += len(way.granted)
            except ResourceExhausted:
                raise  # no fault of the adapter's
            except Exception as error:  # whatever an adapter raises is a load failure, classed by type
                if isinstance(error, EngineDied) or not is_there(record, seat):
                    message = f"model {record.name!r} went while its LoRA adapter {lora.name!r} was loaded"
                    raise LoraLoading(message) from error
                if isinstance(error, TransitionCancelled):
                    message = f"loading of LoRA adapter {_full_name(record, lora)} was called off: {error.message}"
                    raise LoraLoading(message) from error
                lora.attempts += 1
                lora.failure = failure = classify(error, attempts=lora.attempts, now=roster.now())
                self._note_failure(record, lora, failure)
                raise failure.as_error(_full_name(record, lora)) from error

    async def _recheck(self, record: Record, seat: Seat, lora: Lora) -> None:
        """Whether it is still what its files hold, as far as their sizes and times tell."""
        lora.recheck = False
        assert lora.source is not None
        if await self._moves.version(record, seat, lora.source) != lora.version:
            lora.loaded_from = None

    def _note_failure(self, record: Record, lora: Lora, failure: LoadFailure) -> None:
        why = f"LoRA adapter {lora.name}: {failure.error_class}: {failure.message}"
        log.warning("%s: %s", record.name, why)
        self._life.roster.decide(record.name, "LoRA load failed", why)

    async def _make_place(self, record: Record, seat: Seat, lora: Lora, way: _Bringing) -> None:
        """Unload what is in the way: its old self, from other files, and the least recently used one."""
        engine = takes_loras(record, seat)
        leaving: Lora | None = None
        try:
            while True:
                check_there(record, seat)
                _check_wanted(way)
                there = [other for other in record.loras.values() if other.seat is seat]
                if lora.seat is seat:
                    goes, why = (None if lora.uses else lora), "it comes from other files now"
                elif len(there) < engine.max_loras:
                    return
                else:
                    goes, why = self._idle(record, seat), f"room for {lora.name}"
                if goes is not None:
                    await self._uninterrupted(way, self._moves.put_out(record, seat, goes, why))
                    continue
                if lora.seat is not seat and leaving is None:
                    leaving = there[0]
                    leaving.gives_way = True  # or requests for it that follow on each other would keep it for ever
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                record.lora_waiters.append(waiter)
                await waiter
        finally:
            if leaving is not None:
                leaving.gives_way = False

    @staticmethod
    def _idle(record: Record, seat: Seat) -> Lora | None:
        """The least recently used adapter that no request uses."""
        return next((lora for lora in record.loras.values() if lora.seat is seat and not lora.uses), None)

    async def _admit_and_load(self, record: Record, seat: Seat, lora: Lora, way: _Bringing) -> None:
        source = lora.source
        if source is None:
            raise TransitionCancelled("it was unloaded")
        lora.recheck = False
        version = await self._uninterrupted(way, self._moves.version(record, seat, source))
        need = await self._uninterrupted(way, self._moves.reserve(record, seat, lora.name, source))
        cause: OutOfMemory | None = None
        while True:
            check_there(record, seat)
            _check_wanted(way)
            purpose = self._life.next_growth()
            try:
                await self._moves.book(record, need, purpose, cause)
                check_there(record, seat)
                if lora.source != source:
                    raise TransitionCancelled("it was unloaded, or comes from elsewhere now")
                await self._uninterrupted(way, self._moves.load(record, seat, lora, source, need, purpose))
                lora.version = version
                return
            except (OutOfMemory, ResourceExhausted, NeverFits) as error:
                self._moves.unbook(record, seat, purpose)
                idle = self._idle(record, seat)
                if idle is not None:
                    await self._uninterrupted(way, self._moves.put_out(record, seat, idle, error.message))
                elif cause is None and isinstance(error, OutOfMemory):
                    cause = error
                else:
                    raise
            except BaseException:
                self._moves.unbook(record, seat, purpose)
                raise

    async def _uninterrupted(self, way: _Bringing, step: Awaitable[T]) -> T:
        """A call into the engine can't be taken back: waiters may leave, it ends nevertheless."""
        way.free_to_cancel = False
        try:
            return await step
        finally:
            way.free_to_cancel = True

    # --- unloading ---------------------------------------------------------------------------------

    async def remove(self, record: Record, name: str, wait_s: float | None) -> None:
        """Unload an adapter once nobody uses it, and forget it unless it is configured.

        Raises:
            Unsupported: there is none of that name.
            DeadlineExceeded: requests still used it after ``wait_s`` seconds.
        """
        lora = self._find(record, name)
        configured = lora.configured
        until = None if wait_s is None else self._life.roster.now() + wait_s
        source, lora.source = lora.source, None  # nobody may take it up meanwhile
        self._removing.add(lora)
        try:
            while lora.uses or lora in self._bringing:
                left = None if until is None else max(0.0, until - self._life.roster.now())
                if not await self._something_ended(record, lora, left):
                    raise DeadlineExceeded(f"LoRA adapter {_full_name(record, lora)} is still in use")
            unloading = self._removing_idle(record, lora)
            left = None if until is None else max(0.0, until - self._life.roster.now())
            done, _ = await asyncio.wait({unloading}, timeout=left)
            if not done:
                raise DeadlineExceeded(f"LoRA adapter {_full_name(record, lora)} is still being unloaded")
            unloading.result()
        except BaseException:
            self._removing.discard(lora)
            if configured and not lora.configured:
                self._forget(record, lora)  # the configuration lost it meanwhile
            else:
                lora.source = lora.source or source
            raise
        self._removing.discard(lora)
        if self._loaded(record, lora):
            lora.loaded_from = None  # parked: whoever names it again gets it from its files
        if lora.configured:
            lora.source = record.spec.lora.get(name, source)
        elif lora.source is None and not self._loaded(record, lora):
            strike_out(record, lora)

    @staticmethod
    def _loaded(record: Record, lora: Lora) -> bool:
        """Whether the engine has it, parked or not."""
        return lora.seat is not None and lora.seat is record.seat

    async def _something_ended(self, record: Record, lora: Lora, timeout: float | None) -> bool:
        way = self._bringing.get(lora)
        if way is not None:
            done, _ = await asyncio.wait({way.task}, timeout=timeout)
            return bool(done)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record.lora_waiters.append(waiter)
        done_waiters, _ = await asyncio.wait({waiter}, timeout=timeout)
        return bool(done_waiters)

    def _removing_idle(self, record: Record, lora: Lora) -> asyncio.Task[None]:
        """As a task of its own: a call into the engine can't be taken back."""
        task = asyncio.get_running_loop().create_task(self._remove_idle(record, lora))
        task.add_done_callback(consume)
        self._life.keep(task)
        return task

    async def _remove_idle(self, record: Record, lora: Lora) -> None:
        seat = record.seat
        if seat is None or lora.seat is not seat or seat.dead is not None:
            return
        if record.state not in (Residency.RESIDENT, Residency.DRAINING):
            return  # parked or on its way: it goes after the wake
        with self._life.lease(record, seat):
            async with seat.lora_turn:
                if lora.seat is seat and not lora.uses and record.seat is seat:
                    await self._moves.put_out(record, seat, lora, "unload requested")

    def _forget(self, record: Record, lora: Lora) -> None:
        """Nobody may name it any more: out with it as soon as nobody uses it."""
        lora.source = None
        if lora.uses or lora in self._bringing or lora in self._removing:
            return  # whatever that is sees to it when it ends
        if not self._loaded(record, lora):
            strike_out(record, lora)
            return
        self._removing_idle(record, lora)


def _check_wanted(way: _Bringing) -> None:
    """Nothing may wait, with a lease, for a place or for memory that nobody wants any more."""
    if not way.waiting:
        raise TransitionCancelled("everybody who waited has left")


def _is_loaded(lora: Lora, seat: Seat) -> bool:
    return lora.seat is seat and lora.loaded_from == lora.source and not lora.recheck


def _is_doubted(lora: Lora, seat: Seat) -> bool:
    return lora.seat is seat and lora.loaded_from == lora.source


def _full_name(record: Record, lora: Lora) -> str:
    return f"{record.name}/{lora.name}"
