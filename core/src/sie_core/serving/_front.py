"""Who may come in, who is in, and the way from a model's name to a lease on its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sie_core.errors import DeadlineExceeded, ModelNotFound, ShuttingDown, SieError
from sie_core.serving._lane import Lane, Place
from sie_core.types import Capabilities, Residency, ResidencyChanged

if TYPE_CHECKING:
    from sie_core.residency import Lease, Registry
    from sie_core.telemetry import Telemetry

__all__ = ["Front", "Visit"]

_ENGINE_GOES = frozenset({Residency.UNLOADING, Residency.UNLOADED, Residency.FAILED})


class Visit:
    """A request from its arrival to its end: its place in the queue, and how it is counted when it ends badly."""

    __slots__ = ("_front", "began", "lane", "place")

    def __init__(self, front: Front, lane: Lane) -> None:
        self._front = front
        self.lane = lane

    def __enter__(self) -> Visit:
        """Raises QueueFull."""
        self.began = time.perf_counter()
        self.place: Place = self.lane.enter()
        self._front.in_flight += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.place.free()
        self._front.leave()
        if error is not None:
            self.lane.meter.failed(_outcome(error))

    def deadline(self, asked_s: float | None) -> float:
        """When the request has to be done, on the loop's clock: a request may shorten its model's time, no more."""
        own = self.lane.spec.deadline_s
        return asyncio.get_running_loop().time() + (own if asked_s is None else min(own, asked_s))


def _outcome(error: BaseException) -> str:
    if isinstance(error, SieError):
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "error"


class Front:
    """The service's door: the lanes of all models, the requests inside, and the closing at the end of the day."""

    def __init__(self, registry: Registry, telemetry: Telemetry) -> None:
        self._registry = registry
        self._telemetry = telemetry
        self._lanes: dict[str, Lane] = {}
        self._drained: asyncio.Event | None = None
        self.in_flight = 0
        self.stopping = False
        registry.subscribe(self._residency_changed)

    def visit(self, model: str) -> Visit:
        """A request for a model, to be entered. Raises ShuttingDown, ModelNotFound."""
        if self.stopping:
            self.refuse_at_shutdown()
        return Visit(self, self._lanes.get(model) or self._lane(model))

    def expect(self, model: str) -> None:
        """A request for a model is about to be read. Raises ShuttingDown, ModelNotFound."""
        self.refuse_at_shutdown()
        if model not in self._lanes:
            self._lane(model)

    def refuse_at_shutdown(self) -> None:
        """Raises ShuttingDown once that has begun."""
        if self.stopping:
            raise ShuttingDown("the server is shutting down", retry_after_s=5.0)

    def resolve(self, name: str) -> str:
        """The configured name that a client means; some write ``__`` for ``/``. Raises ModelNotFound."""
        try:
            self._registry.status(name)
        except ModelNotFound:
            other = name.replace("__", "/")
            if other == name:
                raise
            try:
                self._registry.status(other)
            except ModelNotFound:
                pass
            else:
                return other
            raise
        return name

    async def acquire(self, lane: Lane, check: Callable[[Capabilities], None], deadline: float) -> Lease:
        """Wait for the model to become resident, no longer than the request may take in all.

        ``check`` is asked first, where it is known what the model can do: a request in vain shall load nothing.
        """
        try:
            async with asyncio.timeout_at(deadline):
                status = await self._registry.describe(lane.name)
                lane.spec = status.spec
                if status.capabilities is not None:
                    check(status.capabilities)
                if status.load_s is not None:
                    lane.load_s = status.load_s
                return await self._registry.acquire(lane.name)
        except TimeoutError:
            now = self._registry.status(lane.name).residency
            raise DeadlineExceeded(
                f"the request's deadline passed while it waited for model {lane.name!r}, which is {now}"
            ) from None

    def _lane(self, model: str) -> Lane:
        """The lane of a model seen for the first time. Raises ModelNotFound."""
        name = self.resolve(model)
        lane = self._lanes.get(name)
        if lane is None:
            spec = self._registry.status(name).spec
            lane = self._lanes[name] = Lane(name, spec, self._telemetry.model(name))
        return lane

    def _residency_changed(self, event: ResidencyChanged) -> None:
        """Let go of an engine that goes: a lane is what would keep its tensors alive. A parked engine stays."""
        if event.after in _ENGINE_GOES and (lane := self._lanes.get(event.model)) is not None:
            lane.forget_engine()

    # --- the end ---------------------------------------------------------------------------------------

    def leave(self) -> None:
        """A request is over."""
        self.in_flight -= 1
        if not self.in_flight and self._drained is not None:
            self._drained.set()

    async def drain(self, deadline_s: float) -> int:
        """Let nobody in, and wait for those inside, ``deadline_s`` seconds at most; returns how many are left."""
        self.stopping = True
        if self.in_flight:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), deadline_s)
            except TimeoutError:
                return self.in_flight
        return 0
