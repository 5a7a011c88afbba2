"""The facade over residency and batching: what HTTP, the CLI and tests call. No web framework, no wire format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import field, frozen

from sie_core.errors import InvalidInput, Unsupported
from sie_core.serving._allowance import Allowance
from sie_core.serving._answers import Answer, Answers
from sie_core.serving._describe import Describer
from sie_core.serving._front import Front
from sie_core.serving.explain import Explanation, Facts, explain
from sie_core.serving.generate import Emit, GenerateResult, Generator
from sie_core.telemetry import Telemetry
from sie_core.types import (
    BatchRequest,
    Decision,
    EncodeOutput,
    ExtractOutput,
    GenerateRequest,
    Item,
    RequestParams,
    ResidencyChanged,
    ScoreOutput,
    Task,
)

if TYPE_CHECKING:
    from sie_core.memory.ledger import AccountState
    from sie_core.plugins import SlowHook
    from sie_core.residency import HostTierStatus, ModelStatus, Registry

__all__ = ["EncodeResult", "ExtractResult", "ScoreResult", "ServerStatus", "Service"]

_PLAIN = RequestParams()


EncodeResult: TypeAlias = Answer[EncodeOutput]
ScoreResult: TypeAlias = Answer[ScoreOutput]
ExtractResult: TypeAlias = Answer[ExtractOutput]


@frozen
class ServerStatus:
    """The whole server at one moment. ``uptime_s`` in seconds, sizes in bytes."""

    accounts: Sequence[AccountState]
    host_tier: HostTierStatus
    models: Sequence[ModelStatus]
    slow_hooks: Sequence[SlowHook]
    uptime_s: float
    version: str
    left_behind: Mapping[str, Mapping[str, int]] = field(factory=dict)
    """By device and model, what closed engines did not give back."""


class Service:
    """Serves requests on the models of a registry. Every method runs on the event loop.

    ``side_thread=False`` prepares requests on the engines' threads only, which tests on a virtual clock want.
    """

    def __init__(
        self, registry: Registry, *, telemetry: Telemetry | None = None, version: str = "", side_thread: bool = True
    ) -> None:
        from sie_core import __version__

        self._registry = registry
        self._telemetry = telemetry or Telemetry.disabled()
        self._telemetry.watch(registry)
        self._front = Front(registry, self._telemetry)
        self._generator = Generator(registry, self._front, self._telemetry)
        self._answers = Answers(registry, self._front, side_thread=side_thread)
        self._describer = Describer(registry)
        self._version = version or __version__
        self._began = time.monotonic()

    # --- requests --------------------------------------------------------------------------------------

    def allowance(self, limit: int, number_bytes: float) -> Allowance:
        """For one answer of ``limit`` bytes at most, in which a number takes so many."""
        return Allowance(self._registry.answers, limit=limit, number_bytes=number_bytes)

    async def encode(
        self,
        model: str,
        items: Sequence[Item],
        params: RequestParams = _PLAIN,
        *,
        deadline_s: float | None = None,
        allowance: Allowance | None = None,
    ) -> EncodeResult:
        """Encode items with a model, which is loaded first if need be.

        ``deadline_s`` shortens the model's own deadline. ``allowance``: what the answer may take; the caller's to
        release.

        Raises:
            ModelNotFound, InvalidInput (Unsupported, InputTooLong): the caller can mend it.
            QueueFull, ModelLoading, ResourceExhausted, ShuttingDown: later, with the seconds after which.
            DeadlineExceeded, ModelLoadFailed, InferenceError (NonFiniteOutput, EngineDied), OutOfMemory.
        """
        return await self._answer(model, BatchRequest(Task.ENCODE, items, params), deadline_s, allowance)

    async def score(
        self,
        model: str,
        query: Item,
        items: Sequence[Item],
        params: RequestParams = _PLAIN,
        *,
        deadline_s: float | None = None,
    ) -> ScoreResult:
        """Score items against a query, in their own order. Raises as ``encode`` does.

        A model whose capabilities say ``compares`` encodes both sides, and its vectors are compared here.
        """
        return await self._answer(model, BatchRequest(Task.SCORE, items, params, query=query), deadline_s)

    async def extract(
        self,
        model: str,
        items: Sequence[Item],
        params: RequestParams = _PLAIN,
        *,
        labels: tuple[str, ...] = (),
        output_schema: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        allowance: Allowance | None = None,
    ) -> ExtractResult:
        """Find in each item what ``labels`` or the schema name; models that need neither go without.

        Raises as ``encode`` does.
        """
        request = BatchRequest(Task.EXTRACT, items, params, labels=labels, output_schema=output_schema)
        return await self._answer(model, request, deadline_s, allowance)

    async def _answer(
        self, model: str, request: BatchRequest, deadline_s: float | None, allowance: Allowance | None = None
    ) -> Answer[Any]:
        self._front.refuse_at_shutdown()
        items = request.items
        if not items:
            raise InvalidInput(f"there is nothing to {request.task}: the request has no items", param="items")
        with self._front.visit(model) as visit:
            lane, began = visit.lane, visit.began
            result = await self._answers.answer(lane, visit.place, request, visit.deadline(deadline_s), allowance)
        result.queue_s = max(0.0, time.perf_counter() - began - result.tokenise_s - result.inference_s)
        lane.meter.answered(len(items), result.tokens, result.queue_s)
        if self._telemetry.tracing:
            self._trace(result, request.task)
        return result

    async def generate(
        self, model: str, request: GenerateRequest, *, deadline_s: float | None = None
    ) -> GenerateResult:
        """Generate, and answer as a whole. ``deadline_s`` shortens the model's own deadline, which bounds all of it.

        Raises as ``encode`` does.
        """
        return await self._generator.whole(model, request, deadline_s)

    async def stream(
        self,
        model: str,
        request: GenerateRequest,
        emit: Emit,
        *,
        deadline_s: float | None = None,
        whole: bool = False,
    ) -> GenerateResult:
        """Generate piece by piece: ``emit`` gets each, a JSON object of OpenAI's stream, and is waited for.

        The engine is read no faster than that. The deadline bounds the time to the first piece, or to the last with
        ``whole``. Cancelling aborts the request in the engine.

        Raises as ``encode`` does, at any time: an answer is complete only when this returns.
        """
        return await self._generator.stream(model, request, emit, deadline_s, whole=whole)

    def _trace(self, result: Answer[Any], task: Task) -> None:
        self._telemetry.trace(
            result.model,
            len(result.outputs),
            result.tokens,
            queue_s=result.queue_s,
            tokenise_s=result.tokenise_s,
            inference_s=result.inference_s,
            task=task.value,
        )

    def expect(self, model: str) -> None:
        """A request for this model is on its way. Raises ModelNotFound, ShuttingDown."""
        self._front.expect(model)

    # --- models ----------------------------------------------------------------------------------------

    def resolve(self, name: str) -> str:
        """The configured name that a client means; some write ``__`` for ``/``. Raises ModelNotFound."""
        return self._front.resolve(name)

    async def described(self) -> list[ModelStatus]:
        """The same as ``models``, once the adapters were asked what those can do of which it is not known.

        An adapter that can't tell, or not within seconds, is asked again in a minute at the earliest.
        """
        await self._describer.ask([status for status in self.models() if status.capabilities is None])
        return self.models()

    def models(self) -> list[ModelStatus]:
        """Every configured model, in the order of the configuration; without those that are leaving."""
        return [status for status in self._registry.statuses() if not status.leaving]

    def model(self, name: str) -> ModelStatus:
        """One model. Raises ModelNotFound, with what may have been meant."""
        return self._registry.status(self.resolve(name))

    async def describe(self, name: str) -> ModelStatus:
        """The same, with its capabilities, where its adapter can tell them without loading it. Raises ModelNotFound."""
        return await self._registry.describe(self.resolve(name))

    async def load(self, name: str, *, wait_s: float | None = None) -> ModelStatus:
        """Make a model resident and say how it then stands. Raises as ``encode`` does while it waits."""
        self._front.refuse_at_shutdown()
        name = self.resolve(name)
        await self._registry.load(name, wait_s=wait_s)
        return self._registry.status(name)

    async def unload(self, name: str, *, force: bool = False, wait_s: float | None = None) -> ModelStatus:
        """Unload a model after its requests, or at once with ``force``, which fails them. Raises DeadlineExceeded."""
        name = self.resolve(name)
        await self._registry.unload(name, force=force, wait_s=wait_s)
        return self._registry.status(name)

    @property
    def has_host_tier(self) -> bool:
        """Whether evicted models can be parked at all."""
        return self._registry.host_tier().budget > 0

    async def park(self, name: str, *, wait_s: float | None = None) -> ModelStatus:
        """Move a model's engine to host memory once its requests are done, and say how it then stands.

        Raises:
            Unsupported: there is no host tier, no engine, or the engine can't be parked; with the reason.
            ModelLoading: it is on its way to being resident.
            ResourceExhausted: there was no room, or its engine failed to park; it was unloaded.
            DeadlineExceeded: its requests did not end in time.
        """
        name = self._in_tier("park", name)
        await self._registry.park(name, wait_s=wait_s)
        return self._registry.status(name)

    async def wake(self, name: str, *, wait_s: float | None = None) -> ModelStatus:
        """Move a parked engine back to its device; a model that is not parked is loaded. Raises as ``load`` does.

        Raises Unsupported where there is no host tier.
        """
        name = self._in_tier("wake", name)
        await self._registry.wake(name, wait_s=wait_s)
        return self._registry.status(name)

    async def load_lora(
        self, model: str, lora: str, source: str | None = None, *, wait_s: float | None = None
    ) -> ModelStatus:
        """Load a LoRA adapter, and its model if need be, and say how the model then stands.

        ``source`` as in the configuration; ``None`` for one that is configured or was loaded before.

        Raises:
            Unsupported: the model takes none, has none of that name, or has it from another source.
            LoraLoading, ModelLoading, ResourceExhausted, ModelLoadFailed.
        """
        self._front.refuse_at_shutdown()
        name = self.resolve(model)
        await self._registry.load_lora(name, lora, source, wait_s=wait_s)
        return self._registry.status(name)

    async def unload_lora(self, model: str, lora: str, *, wait_s: float | None = None) -> ModelStatus:
        """Unload a LoRA adapter once no request uses it. Raises Unsupported, DeadlineExceeded."""
        name = self.resolve(model)
        await self._registry.unload_lora(name, lora, wait_s=wait_s)
        return self._registry.status(name)

    def _in_tier(self, what: str, name: str) -> str:
        name = self.resolve(name)
        self._front.refuse_at_shutdown()
        if not self.has_host_tier:
            raise Unsupported(
                f"this server can't {what} models: its host tier is off (memory.host_cache_bytes)",
                supported=("load", "unload"),
            )
        return name

    def explain(self, name: str) -> Explanation:
        """Why a model is where it is: why it was evicted, what came of it, what would have kept it."""
        name = self.resolve(name)
        registry = self._registry
        return explain(
            Facts(
                status=registry.status(name),
                decisions=registry.decisions(),
                host_tier=registry.host_tier(),
                accounts={account.account: account for account in registry.accounts()},
                why_not_parked=registry.why_not_parked(name),
            )
        )

    def pin(self, name: str) -> ModelStatus:
        """Never evict this model."""
        return self._pin(name, True)

    def unpin(self, name: str) -> ModelStatus:
        """This model may be evicted again."""
        return self._pin(name, False)

    def _pin(self, name: str, pinned: bool) -> ModelStatus:
        name = self.resolve(name)
        self._registry.pin(name, pinned)
        return self._registry.status(name)

    # --- the server ------------------------------------------------------------------------------------

    def status(self) -> ServerStatus:
        """Accounts and models, as they stand now."""
        return ServerStatus(
            accounts=self._registry.accounts(),
            host_tier=self._registry.host_tier(),
            models=self._registry.statuses(),
            slow_hooks=self._registry.slow_hooks(),
            uptime_s=time.monotonic() - self._began,
            version=self._version,
            left_behind=self._registry.left_behind(),
        )

    def decisions(self) -> list[Decision]:
        """Why models were evicted, refused or dropped; oldest first."""
        return self._registry.decisions()

    def subscribe(self, callback: Callable[[ResidencyChanged], None]) -> Callable[[], None]:
        """Be told of every change of residency; returns the way out. The callback must return at once."""
        return self._registry.subscribe(callback)

    def ready(self) -> tuple[bool, list[str]]:
        """Whether work is accepted, and what is wrong (a loader that is stuck keeps the server from being ready)."""
        problems = list(self._registry.health())
        if self._front.stopping:
            problems.insert(0, "the server is shutting down")
        return not problems, problems

    @property
    def stopping(self) -> bool:
        """Whether the server is on its way to the end."""
        return self._front.stopping

    def begin_shutdown(self) -> None:
        """Refuse what comes from now on; what runs goes on. Idempotent."""
        self._front.stopping = True

    async def drain(self, deadline_s: float) -> int:
        """Wait for the requests in flight, ``deadline_s`` seconds at most; returns how many are left."""
        return await self._front.drain(deadline_s)

    def close(self) -> None:
        """End the service's own threads. Idempotent."""
        self.begin_shutdown()
        self._answers.close()
