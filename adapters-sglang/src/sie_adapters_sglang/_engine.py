"""A running engine as the core sees it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import psutil
from sie_core import (
    Capabilities,
    DeviceNeed,
    EngineEvents,
    EngineStartError,
    GenerateRequest,
    MemoryReport,
    StreamEngine,
    TransitionContext,
    Unsupported,
)

from sie_adapters_sglang._argv import SERVED_NAME
from sie_adapters_sglang._client import EngineClient
from sie_adapters_sglang._control import Usage
from sie_adapters_sglang._costs import Costs
from sie_adapters_sglang._emulated import EmulatedMemory
from sie_adapters_sglang._gate import Gate
from sie_adapters_sglang._gpu import held_on
from sie_adapters_sglang._hicache import held_bytes, told_bytes
from sie_adapters_sglang._launch import KILL_S, Running
from sie_adapters_sglang._lora import Loras
from sie_adapters_sglang._park import Parking
from sie_adapters_sglang._plan import Plan
from sie_adapters_sglang._requests import check_body

__all__ = ["GenerationEngine", "SglangEngine"]

log = logging.getLogger(__name__)

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_PROBE = "The quick brown fox jumps over the lazy dog"


class SglangEngine(StreamEngine):
    """What generation and embedding engines share: life, memory, parking."""

    def __init__(
        self, plan: Plan, running: Running, accounts: Sequence[str], capabilities: Capabilities, events: EngineEvents
    ) -> None:
        self.devices = tuple(accounts)
        self.capabilities = capabilities
        self.plan = plan
        self._running = running
        self._events = events
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._gate = Gate()
        self.parking = Parking(running.control, self._gate, lambda: running.process.alive)
        self._client = EngineClient(running.url, running.keys, self._gate, self._why_gone)
        told = running.control.memory_usage()
        weights = plan.checkpoint.weight_bytes(plan.options.tp_size)
        self.usage: Usage | None = Usage.of(told, weights) if told is not None else None
        self.emulated = EmulatedMemory(self.devices, self.usage.total if self.usage is not None else 0)
        said = "\n".join(running.process.log_lines()) if running.pool is not None else ""
        self._pool_told = told_bytes(said)
        self._pool_held = held_bytes(running.pool, said) if running.pool is not None else 0
        running.listener.append(self._ended)
        if not running.process.alive:
            self.close(TransitionContext())
            error = EngineStartError("the engine ended as soon as it was ready; the end of its log is in the server's")
            raise error.explained(f"the end of its log:\n{running.process.log_tail()}")
        if told is not None:
            self.plan.measured(
                self.devices, told, max(filter(None, map(self._process_bytes, self.devices)), default=None)
            )

    # --- life --------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The engine's first process, which leads its session."""
        return self._running.process.pid

    @property
    def url(self) -> str:
        """Where it listens, on loopback."""
        return self._running.url

    @property
    def saver(self) -> bool:
        """Whether it runs with the memory saver: without it a release frees nothing."""
        return self._running.saver

    @property
    def context_bytes(self) -> int:
        """What its process holds on a device beside weights and caches, and keeps while it is parked."""
        return self.plan.costs_on(self.devices).context if self.devices[0].startswith("cuda") else 0

    def close(self, ctx: TransitionContext) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._gate.die("the engine was closed")
        self._client.close()
        self.emulated.give_back()
        process = self._running.process
        left = ctx.deadline - time.monotonic() - KILL_S
        if not process.stop(min(self.plan.options.stop_timeout_s, max(0.5, left))):
            process.kill()
        self._running.forget()

    def ended_within(self, seconds: float) -> bool:
        """Wait so long for its end."""
        return self._running.process.ended.wait(seconds)

    def _ended(self) -> None:
        if self._closing.is_set():
            return
        reason = self._why_gone(0.0) or "the engine is gone"
        self._gate.die(reason)
        self.emulated.give_back()
        self._events.died(reason, f"the end of its log:\n{self._running.process.log_tail(12)}")

    def _why_gone(self, wait_s: float) -> str | None:
        process = self._running.process
        if self._closing.is_set():
            return "the engine was closed"
        if not process.ended.wait(wait_s):
            return None
        code = process.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"the engine ended with {how}"

    # --- memory ------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        if self._closing.is_set() or not self._running.process.alive:
            return MemoryReport(dict.fromkeys(self.devices, 0))
        held = {account: self._held_on(account) for account in self.devices}
        return MemoryReport(held, host=self._pool_held, figures=self._figures())

    def _figures(self) -> dict[str, int | float]:
        """How it was launched, and what it says of itself: bytes and tokens of each rank."""
        sizing, usage, pool = self._running.sizing, self.usage, self._running.pool
        figures: dict[str, int | float | None] = {"ranks": len(self.devices)}
        if sizing is not None:
            figures |= {"mem_fraction_static": sizing.fraction, "max_total_tokens": sizing.max_total_tokens}
        if usage is not None:
            figures |= {
                "weights_bytes": usage.weights,
                "kv_cache_bytes": usage.kv_cache,
                "graphs_bytes": usage.graphs,
                "kv_cache_tokens": usage.tokens,
            }
        if pool is not None:
            figures |= {f"host_pool_{name}": value for name, value in pool.figures.items()}
            figures |= {
                "host_pool_rank_bytes": pool.rank_bytes,
                "host_pool_bytes": pool.nbytes,
                "host_pool_huge_pages": int(pool.huge),
                "host_pool_told_bytes": self._pool_told,
            }
        return {name: value for name, value in figures.items() if value is not None}

    def taken(self, costs: Costs) -> dict[str, int]:
        """By account: bytes of its context, weights and KV cache, right after its launch. ``costs``: as it was sized.

        Nothing on a CPU, where what it says of its memory is the machine's.
        """
        usage = self.usage
        if usage is None:
            return {}
        held = usage.weights + usage.kv_cache
        found = {}
        for account in self.devices:
            if account.startswith("cpu"):
                continue
            whole = self._process_bytes(account)
            # Where nobody can tell, its context counts for nothing: the less it takes, the more is free for the cache.
            rest = usage.graphs if whole is None else max(0, whole - held)
            # What it holds beside them may be activations already, as long as there is not too much of it.
            found[account] = held + max(min(costs.context, rest - usage.graphs), rest - costs.beside, 0)
        return found

    def _held_on(self, account: str) -> int | None:
        """Never by asking a parked engine."""
        if account.partition(":")[0] in ("cuda", "cpu"):
            return self._process_bytes(account)
        return self.emulated.held_on(account)

    def _process_bytes(self, account: str) -> int | None:
        """What the driver, or the system, says that its processes hold there."""
        kind, _, number = account.partition(":")
        if kind == "cuda":
            return held_on(int(number or 0), self._pids())
        return self._resident() if kind == "cpu" else None

    def _pids(self) -> list[int]:
        try:
            leader = psutil.Process(self.pid)
            return [leader.pid, *(child.pid for child in leader.children(recursive=True))]
        except psutil.Error:
            return []

    def _resident(self) -> int | None:
        total = 0
        for pid in self._pids():
            try:
                told = psutil.Process(pid).memory_full_info()
            except psutil.Error:
                continue
            total += getattr(told, "pss", 0) or told.rss
        return total or None

    def probe(self, ctx: TransitionContext) -> bytes | None:
        body, path = self._probe_request()
        answer = self._running.control.ask(path, body)
        return None if answer is None else self._probe_answer(answer)

    def alive(self) -> bool:
        """Whether its server says that it is well, or answers: with much to do, it says otherwise and answers."""
        control, (body, path) = self._running.control, self._probe_request()
        return control.healthy() or control.ask(path, body) is not None

    def _probe_request(self) -> tuple[dict[str, Any], str]:
        raise NotImplementedError

    def _probe_answer(self, answer: Any) -> bytes:
        raise NotImplementedError


class GenerationEngine(SglangEngine):
    """Chat and completions; LoRA adapters where ``max_loras`` allows any."""

    def __init__(
        self, plan: Plan, running: Running, accounts: Sequence[str], capabilities: Capabilities, events: EngineEvents
    ) -> None:
        super().__init__(plan, running, accounts, capabilities, events)
        self.max_loras = plan.options.max_loras
        self._loras = Loras(running.control, self.parking, plan.options.max_lora_rank)

    def lora_reserve(self, name: str, source: str) -> DeviceNeed:
        return self._loras.reserve(source)

    def lora_load(self, name: str, source: str, ctx: TransitionContext) -> None:
        self._loras.load(name, source)

    def lora_unload(self, name: str, ctx: TransitionContext) -> None:
        self._loras.unload(name)

    async def generate(self, request: GenerateRequest) -> Mapping[str, Any]:
        self._check(request)
        answer: Mapping[str, Any] = await self._client.ask(_PATHS[request.kind], self._body(request))
        return answer

    def stream(self, request: GenerateRequest) -> AsyncGenerator[bytes | list[bytes]]:
        self._check(request)
        return self._client.stream(_PATHS[request.kind], self._body(request))

    def _check(self, request: GenerateRequest) -> None:
        if request.lora is not None and not self.max_loras:
            raise Unsupported("the model takes no LoRA adapters: its max_loras is 0", supported=())
        check_body(request.body, self.plan.checkpoint.vocabulary)

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        body = {**request.body, "model": SERVED_NAME}
        if request.lora is not None:
            body["lora_path"] = request.lora
        return body

    def _probe_request(self) -> tuple[dict[str, Any], str]:
        sampling = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        return {"text": _PROBE, "sampling_params": sampling}, "/generate"

    def _probe_answer(self, answer: Any) -> bytes:
        return repr(answer["output_ids"]).encode()
