"""An adapter that keeps every promise, small enough to break one at a time.

The option ``break_`` says which promise is broken; each break stands where the promise is kept otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import frozen
from sie_core import (
    Adapter,
    AdmissionReserve,
    BatchEngine,
    BatchRequest,
    Capabilities,
    DeviceNeed,
    DeviceView,
    EncodeOutput,
    Engine,
    EngineEvents,
    HostOffload,
    HostResidue,
    InvalidInput,
    MemoryReport,
    ModelSpec,
    Prepared,
    ResidencyChanged,
    TransitionContext,
    Unsupported,
    VictimCandidate,
    hookimpl,
    is_emulated,
)

sie_api = 1
MIB = 1 << 20
SIZE = MIB
DIMS = 16
KEPT: list[Any] = []
"""What is never given back."""

ADAPTER_BREAKS = {
    "memory() too low": "memory_says_what_the_device_holds",
    "memory() zero": "memory_says_what_the_device_holds",
    "device buffer not freed at park": "a_park_frees_the_device_buffers",
    "device buffer not freed at close": "close_frees_the_device_buffers",
    "50 MB of RAM leaked at close": "loads_and_closes_leave_no_memory_behind",
    "200 MB at load": "a_load_takes_no_more_host_memory_than_was_reserved",
    "6 MB beyond the reserve": "the_device_memory_taken_was_reserved",
    "host_buffer bypassed": "the_host_copy_is_in_the_buffers_of_the_core",
    "twice what was announced": "the_host_copy_takes_no_more_than_was_announced",
    "backup not dropped": "a_dropped_backup_is_let_go_of",
    "constant probe": "the_probe_sees_damaged_weights",
    "host_offload_bytes of a wrong type": "host_offload_bytes_answers_bytes_declined_or_none",
}
"""The test that fails for each, by what is broken."""
PLUGIN_BREAKS = {
    "choose_victims with unknown names": "choose_victims_names_candidates_in_a_list",
    "choose_victims with a str": "choose_victims_names_candidates_in_a_list",
    "a blocking pure hook": "pure_hooks_return_at_once",
    "routes that shadow ours": "routes_do_not_shadow_those_of_the_core",
}
MORE_BREAKS = {
    "5 MB of RAM leaked at wake": "parks_and_wakes_leave_no_memory_behind",
    "200 MB while it loads": "a_load_takes_no_more_host_memory_than_was_reserved",
    "too much for a moment": "the_device_memory_taken_was_reserved",
    "backup not told": "a_dropped_backup_is_let_go_of",
    "copy in memory of its own": "the_host_copy_is_in_the_buffers_of_the_core",
}
"""Siblings: the same kinds elsewhere."""
HANGS = ("load", "prepare", "run", "probe", "park", "close")


@frozen
class Options:
    break_: str = ""
    backup: bool = False


def stop(options: Options, where: str) -> None:
    """Hang here, if that is the break."""
    if options.break_ == f"hangs in {where}":
        threading.Event().wait()


class HonestEngine(BatchEngine):
    capabilities = Capabilities(dims={"dense": DIMS})

    def __init__(self, options: Options, account: str, ctx: TransitionContext) -> None:
        self.options = options
        self.devices = (account,)
        self.copy: memoryview | None = None
        self.parked = self.closed = False
        self._more: list[Any] = []
        self._take(ctx)
        self._weights()[:] = np.random.default_rng(7).standard_normal(SIZE // 4, dtype=np.float32)
        if self.does("6 MB beyond the reserve"):
            self._more.append(ctx.device_buffer(account, 6 * MIB))
        if self.does("too much for a moment"):
            ctx.device_buffer(account, 6 * MIB).free()
        if self.does("200 MB at load"):
            self._more.append(np.ones(200 * MIB, dtype=np.uint8))
        if self.does("200 MB while it loads"):
            np.ones(200 * MIB, dtype=np.uint8).sum()

    def does(self, what: str) -> bool:
        return self.options.break_ == what

    def _take(self, ctx: TransitionContext) -> None:
        self.buffer = ctx.device_buffer(self.devices[0], SIZE)

    def _weights(self) -> np.ndarray:
        return np.frombuffer(self.buffer.view, dtype=np.float32)

    def memory(self) -> MemoryReport:
        if self.does("memory() zero"):
            return MemoryReport({self.devices[0]: 0})
        share = 0.5 if self.does("memory() too low") else 1
        beyond = 6 * MIB if self.does("6 MB beyond the reserve") and not self.closed else 0
        held = 0 if self.closed or self.parked else SIZE
        return MemoryReport({self.devices[0]: int(held * share) + beyond})

    def probe(self, ctx: TransitionContext) -> bytes:
        stop(self.options, "probe")
        return b"always" if self.does("constant probe") else self._weights()[: 64 * DIMS].tobytes()

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        stop(self.options, "prepare")
        if set(request.params.output_types) - {"dense"}:
            raise Unsupported("only dense")
        for index, item in enumerate(request.items):
            if not item.text:
                raise InvalidInput("an item needs a text", index=index)
        return [Prepared(len(item.text or ""), item.text) for item in request.items]

    def run(self, batch: Sequence[Prepared]) -> Sequence[EncodeOutput]:
        stop(self.options, "run")
        rows = self._weights()[: 64 * DIMS].reshape(64, DIMS)
        return [
            EncodeOutput(one.tokens, dense=np.mean([rows[ord(each) % 64] for each in one.payload], axis=0))
            for one in batch
        ]

    def drop_backup(self) -> int:
        if self.parked or self.copy is None:
            return 0
        if self.does("backup not dropped"):
            self._more.append(self.copy)
        self.copy = None
        return SIZE

    def park(self, ctx: TransitionContext) -> HostOffload:
        stop(self.options, "park")
        if self.parked:
            return HostOffload(SIZE)
        if self.does("twice what was announced"):
            self._more.append(ctx.host_buffer(SIZE))
        if self.copy is None:
            bypassed = self.does("host_buffer bypassed")
            self.copy = memoryview(bytearray(SIZE)) if bypassed else ctx.host_buffer(SIZE)
            self.copy[:] = self.buffer.view
        if self.does("copy in memory of its own"):
            self._more.append(np.ones(12 * MIB, dtype=np.uint8))
        if self.does("device buffer not freed at park"):
            self._more.append(self.buffer)
        else:
            self.buffer.free()
        self.parked = True
        return HostOffload(SIZE)

    def wake(self, ctx: TransitionContext) -> HostResidue:
        if self.parked:
            assert self.copy is not None
            self._take(ctx)
            self.buffer.view[:] = self.copy
            self.parked = False
            if self.does("copy in memory of its own"):
                self._more.clear()
            if self.does("5 MB of RAM leaked at wake"):
                KEPT.append(np.ones(5 * MIB, dtype=np.uint8))
            if self.does("backup not told"):
                self._more = [self.copy]
            if not self.options.backup:
                self.copy = None
        return HostResidue(SIZE, droppable=True) if self.copy is not None else HostResidue()

    def close(self, ctx: TransitionContext) -> None:
        stop(self.options, "close")
        if self.closed:
            return
        self.closed = True
        self.copy = None
        if self.does("device buffer not freed at close"):
            KEPT.append(self.buffer)
        elif not self.parked:
            self.buffer.free()
        if self.does("50 MB of RAM leaked at close"):
            KEPT.append(np.ones(50 * MIB, dtype=np.uint8))
        self._more.clear()


class HonestAdapter(Adapter):
    options = Options

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        stop(model.options, "load")
        return HonestEngine(model.options, next(iter(ctx.grant.devices)), ctx)


class Plugin:
    """The hooks; those that a break is about are there with that break only."""

    sie_api = 1

    def __init__(self, break_: str = "") -> None:
        self._break = break_
        if break_.startswith("choose_victims"):
            self.choose_victims = self._choose
        if break_ in ("a blocking pure hook", ""):
            self.on_residency_changed = self._changed
        if break_ == "":
            self.choose_victims = self._longest_idle
        if break_ in ("routes that shadow ours", ""):
            self.register_routes = self._routes

    @hookimpl
    def admission_reserve(self, model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
        return AdmissionReserve((DeviceNeed(SIZE),)) if model.adapter == "honest" else None

    @hookimpl
    def host_offload_bytes(self, engine: Engine) -> Any:
        if not isinstance(engine, HonestEngine) or not is_emulated(engine.devices[0]):
            return None
        return "1 MiB" if engine.does("host_offload_bytes of a wrong type") else SIZE

    @hookimpl
    def offload_to_host(self, engine: Engine, ctx: TransitionContext) -> HostOffload | None:
        return engine.park(ctx) if isinstance(engine, HonestEngine) else None

    @hookimpl
    def restore_from_host(self, engine: Engine, ctx: TransitionContext) -> HostResidue | None:
        return engine.wake(ctx) if isinstance(engine, HonestEngine) else None

    def _choose(self, candidates: Sequence[VictimCandidate]) -> Any:
        if self._break.endswith("a str"):
            return candidates[0].model if candidates else ""
        return [*(each.model for each in candidates), "somebody else"]

    def _longest_idle(self, candidates: Sequence[VictimCandidate]) -> list[str]:
        return [each.model for each in sorted(candidates, key=lambda each: -each.idle_s)]

    def _changed(self, event: ResidencyChanged) -> None:
        if self._break:
            threading.Event().wait(3.0)

    def _routes(self) -> list[Any]:
        from starlette.responses import PlainTextResponse
        from starlette.routing import Route

        async def hello(request: Any) -> PlainTextResponse:
            return PlainTextResponse("hello")

        return [Route("/v1/embeddings" if self._break else "/x/hello", hello, methods=["POST"])]
