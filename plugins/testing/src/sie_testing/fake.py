"""A fake adapter: engines with declared sizes and times, answers that tell whose they are, and faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import sie_core
from attrs import field, frozen
from sie_core import (
    Adapter,
    AdmissionReserve,
    BatchEngine,
    BatchRequest,
    Capabilities,
    Declined,
    DeviceNeed,
    DeviceOutOfMemory,
    EncodeOutput,
    Engine,
    EngineDied,
    EngineEvents,
    ExtractOutput,
    HostOffload,
    HostResidue,
    InferenceError,
    InputTooLong,
    InvalidInput,
    Item,
    LoadError,
    MemoryReport,
    ModelSpec,
    NeverFits,
    Output,
    Prepared,
    RequestParams,
    ScoreOutput,
    SieError,
    StreamEngine,
    Task,
    TransitionCancelled,
    TransitionContext,
    Unsupported,
)

from sie_testing._generation import FakeGeneration
from sie_testing._loras import FakeLoras
from sie_testing._memory import FakeMemory
from sie_testing._tasks import Wanted, answer, expected_score, text_of, wanted_of
from sie_testing.faults import FaultPoints
from sie_testing.virtual import pause

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "FakeAdapter",
    "FakeEngine",
    "FakeLifecycle",
    "FakeOptions",
    "FakeStreamAdapter",
    "FakeStreamEngine",
    "expected_score",
    "expected_vector",
    "reserve_for",
]

_PLAIN = RequestParams()


@frozen
class FakeOptions:
    """Options of the adapters ``fake`` and ``fake-stream``. Sizes in bytes, times in seconds, fractions from 0 up."""

    weights_bytes: int = 1024 * 1024
    """What a device must have for it; the smallest it runs with."""
    want_bytes: int = 0
    """What it takes where it is granted, when that is more than ``weights_bytes``."""
    context_bytes: int = 0
    """Held on a device as long as the engine exists, parked or not (outside pools)."""
    headroom_bytes: int = 0
    host_bytes: int = 0
    host_load_bytes: int = 0
    offload_bytes: int | None = None
    """Size of the host copy; ``None``: that of the weights."""
    ranks: int = 1
    """How many devices it spans."""
    pool: str | None = None
    self_sizing: bool = False
    allocate: bool = False
    """Really allocate on an emulated device and copy at park and wake."""

    load_s: float = 0.0
    run_s: float = 0.0
    token_s: float = 0.0
    offload_s: float = 0.0
    restore_s: float = 0.0
    close_s: float = 0.0
    close_frees: bool = True
    """False: its bytes stay for as long as somebody has the engine."""

    max_loras: int = 0
    """LoRA adapters that it takes at a time."""
    lora_bytes: int = 1024
    lora_s: float = 0.0
    oom_at_lora: int = 0

    dims: int = 8
    max_length: int = 512
    truncate: bool = False
    max_batch_tokens: int | None = None
    outputs: tuple[str, ...] = ("dense",)
    matryoshka: tuple[int, ...] | None = ()
    inputs: tuple[str, ...] = ("text",)
    tasks: tuple[str, ...] | None = None
    """``encode``, ``score``, ``extract``, ``generate``; ``None``: ``encode``, and what else the adapter is for."""
    compares: str | None = None
    """It can't score: the core compares its vectors of this kind."""
    labels: tuple[str, ...] = ()
    """What it finds when a request names no labels."""
    max_running: int | None = None
    """Requests that a stream engine takes at a time."""
    vector: Literal["hash", "constant"] = "hash"
    salt: str = ""
    """Told apart from another model's: two models with different salts answer differently."""

    realised: float | None = 1.0
    """Lies about memory: held = realised * (weights + context). ``None``: nobody can tell how much."""
    figures: Mapping[str, float] = field(factory=dict)
    """What it says of itself beside."""
    malformed: Literal["memory", "devices"] | None = None
    """What it gives that is not what the protocol says: a dict for its memory report, or words for bytes."""
    fail_load: str | None = None
    """Name of an exception of ``sie_core`` (or a built-in one) that loading raises, ``fail_load_times`` times."""
    fail_load_times: int | None = None
    oom_at_load: int = 0
    oom_over_tokens: int | None = None
    non_finite: tuple[str, ...] = ()
    """Texts that answer NaN."""
    die_after: int | None = None
    """Batches after which it dies."""
    hang: str | None = None
    """Fault point where calls never return until ``FaultPoints.of(model).reset()``."""
    decline: str | None = None
    """Why it can't park."""
    freed: float = 1.0
    """Fraction of the weights that a park really frees."""
    backup: bool = False
    """Keeps its host copy after a wake; it can be dropped."""
    corrupt_restore: bool = False
    """Comes back from a park with other weights."""
    probes: bool = True
    """Whether it has a probe for the wake check."""


def _options(model: ModelSpec) -> FakeOptions:
    options = model.options
    return options if isinstance(options, FakeOptions) else FakeOptions(**options)


def expected_vector(text: str, dims: int = 8, *, salt: str = "", params: RequestParams = _PLAIN) -> NDArray[np.float32]:
    """What a fake engine with these ``dims`` and ``salt`` answers for ``text``: float32 (dims,), of length 1."""
    from sie_testing import _vectors

    vector: NDArray[np.float32] = _shortened(_vectors.dense(_prompted(text, params), dims, salt), params.dimensions)
    return vector


def _prompted(text: str, params: RequestParams) -> str:
    lora = "" if params.lora is None else f"{params.lora}\0"
    return f"{lora}{'query' if params.is_query else ''}\0{params.instruction or ''}\0{text}"


def _shortened(vector: Any, dimensions: int | None) -> Any:
    if dimensions is None or dimensions == len(vector):
        return vector
    cut = vector[:dimensions]
    return cut / (float((cut * cut).sum()) ** 0.5 or 1.0)


def reserve_for(model: ModelSpec) -> AdmissionReserve | None:
    """The answer to ``admission_reserve`` for a model with :class:`FakeOptions`; ``None`` for any other."""
    if not (isinstance(model.options, FakeOptions) or model.adapter in ("fake", "fake-stream")):
        return None
    options = _options(model)
    FaultPoints.of(model.name).reach("reserve")
    headroom = options.headroom_bytes if model.runtime_headroom is None else model.runtime_headroom
    need = DeviceNeed(
        min_bytes=options.weights_bytes,
        want_bytes=max(options.want_bytes, options.weights_bytes),
        context_bytes=options.context_bytes,
        headroom_bytes=headroom,
    )
    return AdmissionReserve(
        ranks=(need,) * options.ranks,
        host_bytes=options.host_bytes,
        host_load_bytes=options.host_load_bytes,
        self_sizing=options.self_sizing,
        headroom_pool=options.pool,
    )


def _error_named(name: str) -> BaseException:
    """An instance of the exception class of this name, with made-up data."""
    import builtins

    cls = getattr(sie_core, name, None) or getattr(builtins, name, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise ValueError(f"fail_load: there is no exception {name!r} in sie_core or among the built-in ones")
    if cls is NeverFits:
        return NeverFits("the fake model never fits", account="cpu", needed=2, capacity=1)
    if cls is sie_core.MissingAdapter:
        return cls("fake")
    message = f"the fake model fails to load with {name}, as configured"
    return (
        cls(message)
        if issubclass(cls, LoadError | sie_core.OutOfMemory) or not issubclass(cls, SieError)
        else (LoadError(message))
    )


class FakeAdapter(Adapter):
    """Makes :class:`FakeEngine`\\ s. Faults are scripted by the options, or by ``FaultPoints.of(model_name)``."""

    options: ClassVar[type] = FakeOptions
    _engine: ClassVar[type[FakeLifecycle]]

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        options, faults = _options(model), FaultPoints.of(model.name)
        if options.hang is not None and not faults.hits("load"):
            faults.hold(options.hang)
        attempt = faults.reach("load", ctx.cancelled)
        ctx.progress(0.0, "reading made-up weights")
        if pause(options.load_s, ctx.cancelled) or ctx.cancelled.is_set():
            raise TransitionCancelled(f"loading of {model.name!r} was called off")
        if options.fail_load is not None and attempt <= (options.fail_load_times or attempt):
            raise _error_named(options.fail_load)
        accounts = list(ctx.grant.devices) or [model.device or "cpu"]
        if attempt <= options.oom_at_load:
            raise DeviceOutOfMemory("the fake device is full", account=accounts[0], needed=options.weights_bytes)
        engine = self._engine(model, options, FakeMemory.take(options, ctx, accounts, model.name), events)
        ctx.progress(1.0, "ready")
        return engine

    def describe(self, model: ModelSpec) -> Capabilities | None:
        return _capabilities(_options(model), self._engine.can)


def _capabilities(options: FakeOptions, can: Sequence[Task]) -> Capabilities:
    return Capabilities(
        tasks=frozenset(can if options.tasks is None else map(Task, options.tasks)),
        inputs=options.inputs,
        outputs=options.outputs,
        dims={name: 30_522 if name == "sparse" else options.dims for name in options.outputs},
        max_sequence_length=options.max_length,
        matryoshka=options.matryoshka,
        compares=options.compares,
    )


class FakeLifecycle(Engine):
    """What the fake engines share: memory, park and wake, death."""

    can: ClassVar[Sequence[Task]] = (Task.ENCODE,)

    def __init__(self, model: ModelSpec, options: FakeOptions, memory: FakeMemory, events: EngineEvents) -> None:
        self.model = model
        self.options = options
        self.faults = FaultPoints.of(model.name)
        self.devices = memory.accounts
        self.capabilities = _capabilities(options, self.can)
        self.headroom_pool = options.pool
        self.dead = False
        self.closed = False
        self._held = memory
        self._events = events
        self._runs = 0
        self._turn = threading.Lock()

        from sie_testing import _vectors  # numpy is loaded with the first engine

        self._vectors = _vectors
        self._constant = _vectors.constant(options.dims)

    # --- lifecycle ---

    @property
    def parked(self) -> bool:
        """Whether its weights are on the host only."""
        return self._held.parked

    def memory(self) -> MemoryReport:
        """Made-up or really allocated bytes; without the host copy, which the core owns and charges."""
        self.faults.reach("memory")
        if self.options.malformed is not None and not self.closed:
            malformed: MemoryReport = self._malformed_report()
            return malformed
        host = 0 if self.closed else self.options.host_bytes
        return MemoryReport(self._held.report(), host=host, figures=self.options.figures)

    def alive(self) -> bool:
        self.faults.reach("alive")
        return not self.dead

    def _malformed_report(self) -> Any:
        """What an engine of plain Python may well answer."""
        if self.options.malformed == "memory":
            return {"devices": self._held.report()}
        words: dict[str, Any] = dict.fromkeys(self.devices, "plenty")
        return MemoryReport(words)

    def probe(self, ctx: TransitionContext) -> bytes | None:
        if not self.options.probes:
            return None
        with self._alone("probe"):
            self.faults.reach("probe", ctx.cancelled)
            self._held.look()
            return self._vectors.dense("probe", 16, self._salt()).tobytes()

    def damage(self) -> None:
        """Change its weights, so that it answers differently from now on."""
        self._held.corrupt()

    def drop_backup(self) -> int:
        self.faults.reach("drop")
        return self._held.drop_backup()

    def really_holds(self, account: str) -> int:
        """Bytes of an emulated device that it has now, whatever it says (with ``allocate``)."""
        return self._held.really_holds(account)

    def close(self, ctx: TransitionContext) -> None:
        with self._alone("close"):
            if self.closed:
                return
            self.faults.reach("close", ctx.cancelled)
            pause(self.options.close_s)
            if self.options.close_frees:
                self._held.free()
            self.closed = True

    def die(self, reason: str = "killed by the test", details: str = "") -> None:
        """Die now, as a child process does: the core is told, and every later call fails."""
        self.dead = True
        self._held.free()
        self._events.died(reason, details)

    def grow(self, account: str, nbytes: int) -> bool:
        """Ask the core for more bytes than were promised."""
        return self._events.request_growth(account, nbytes)

    # --- the answers to the park and wake hooks ---

    def host_offload_bytes(self) -> int | Declined:
        """Bytes of the host copy, or why there can't be one."""
        if self.options.decline is not None:
            return Declined(self.options.decline)
        return self._held.copy_bytes

    def offload(self, ctx: TransitionContext) -> HostOffload:
        """Park. A no-op when parked."""
        with self._alone("offload"):
            self._check_alive()
            self.faults.reach("offload", ctx.cancelled)
            pause(self.options.offload_s)
            self._held.park(ctx)
            return HostOffload(host_bytes=self._held.copy_bytes, retained=self._held.retained())

    def restore(self, ctx: TransitionContext) -> HostResidue:
        """Wake. A no-op when awake."""
        with self._alone("restore"):
            self._check_alive()
            self.faults.reach("restore", ctx.cancelled)
            pause(self.options.restore_s)
            self._held.wake(ctx)
            return HostResidue(host_bytes=self._held.backup_bytes, droppable=self._held.backup_bytes > 0)

    # --- inside ---

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """The protocol promises one call at a time; a core that breaks it must not get away with it here."""
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"{what} of {self.model.name!r} was called while another call runs")
        try:
            yield
        finally:
            self._turn.release()

    def _check_alive(self) -> None:
        if self.dead or self.closed:
            raise EngineDied(f"the engine of {self.model.name!r} is {'dead' if self.dead else 'closed'}")

    def _salt(self) -> str:
        return self.options.salt + self._held.damage()

    def _prepare(self, request: BatchRequest) -> list[Prepared]:
        params = request.params
        self._check_params(request)
        if params == _PLAIN:
            params = _PLAIN
        return [
            self._prepare_item(index, item, params, wanted_of(request, item, self.options))
            for index, item in enumerate(request.items)
        ]

    def _check_params(self, request: BatchRequest) -> None:
        params, options = request.params, self.options
        if request.task not in self.capabilities.tasks or (request.task is Task.SCORE and options.compares):
            raise Unsupported(f"the fake engine can't {request.task}", supported=("encode",), param="task")
        if request.task is not Task.ENCODE:
            return
        if params.output_types != ("dense",) or options.outputs != ("dense",):
            missing = [name for name in params.output_types if name not in options.outputs]
            if missing:
                raise Unsupported(f"no {missing[0]} output", supported=options.outputs, param="output_types")
        if params.dimensions is not None and params.dimensions != options.dims:
            allowed = options.matryoshka
            fits = 0 < params.dimensions <= options.dims if allowed is None else params.dimensions in allowed
            if not fits:
                sizes = tuple(map(str, allowed or (options.dims,)))
                raise Unsupported(f"no {params.dimensions} dimensions", supported=sizes, param="dimensions")

    def _prepare_item(self, index: int, item: Item, params: RequestParams, wanted: Wanted | None) -> Prepared:
        text, limit = item.text if not item.images else text_of(item), self.options.max_length
        if text is None:
            text = text_of(item)
            if text is None:
                raise InvalidInput("the item has neither text nor token ids", index=index, param="text")
        words = text.split()
        if not words:
            raise InvalidInput("the text is empty", index=index, param="text")
        tokens = len(words)
        if tokens > limit:
            if not (self.options.truncate if params.truncate is None else params.truncate):
                raise InputTooLong(tokens=tokens, limit=limit, index=index)
            text, tokens = " ".join(words[:limit]), limit
        return Prepared(tokens, (text, params, wanted))

    def _answers(self, batch: Sequence[Prepared]) -> list[Any]:
        if self.options.vector == "constant":
            vector = self._constant
            return [
                EncodeOutput(one.tokens, vector) if one.payload[2] is None else self._answer(one.tokens, *one.payload)
                for one in batch
            ]
        return [self._answer(one.tokens, *one.payload) for one in batch]

    def _answer(self, tokens: int, text: str, params: RequestParams, asked: Wanted | None = None) -> Output:
        if asked is not None:
            return answer(tokens, text, params, asked, self._salt(), self.options.non_finite)
        options, salt = self.options, self._salt()
        prompted, wanted = _prompted(text, params), params.output_types
        dense = None
        if "dense" in wanted:
            dense = _shortened(self._vectors.dense(prompted, options.dims, salt), params.dimensions)
            if text in options.non_finite:
                dense = dense * float("nan")
        words = text.split()
        multivector = None
        if "multivector" in wanted:
            multivector = self._vectors.multivector(words, options.dims, salt)
            if text in options.non_finite:
                multivector = multivector * float("nan")
        sparse = self._vectors.sparse(words, salt) if "sparse" in wanted else None
        return EncodeOutput(tokens, dense=dense, sparse=sparse, multivector=multivector)

    def _count_run(self, tokens: int) -> None:
        """Faults of one batch."""
        options = self.options
        self._check_alive()
        if self._held.parked:
            raise InferenceError(f"the engine of {self.model.name!r} is parked: it can't run")
        self._runs += 1
        if options.die_after is not None and self._runs > options.die_after:
            self.die(f"died after {options.die_after} batches, as configured")
            raise EngineDied(f"the engine of {self.model.name!r} died")
        if options.oom_over_tokens is not None and tokens > options.oom_over_tokens:
            account = self.devices[0]
            raise DeviceOutOfMemory(f"{tokens} tokens are too many for the fake device", account=account)


class FakeEngine(FakeLifecycle, FakeLoras, BatchEngine):
    """A fake that runs one batch at a time. Tokens are words."""

    def __init__(self, model: ModelSpec, options: FakeOptions, memory: FakeMemory, events: EngineEvents) -> None:
        super().__init__(model, options, memory, events)
        self.max_batch_tokens = options.max_batch_tokens

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        self.faults.reach("prepare")
        return self._prepare(request)

    def run(self, batch: Sequence[Prepared]) -> Sequence[Any]:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(f"run of {self.model.name!r} was called while another call runs")
        try:
            self.faults.reach("run")
            tokens = sum([one.tokens for one in batch])
            self._count_run(tokens)
            for one in batch:
                if one.payload[1].lora is not None:
                    self._check_lora(one.payload[1].lora)
            seconds = self.options.run_s + self.options.token_s * tokens
            if seconds:
                pause(seconds)
            return self._answers(batch)
        finally:
            self._turn.release()


class FakeStreamEngine(FakeLifecycle, FakeLoras, FakeGeneration, StreamEngine):
    """A fake that runs many requests at once."""

    can = (Task.ENCODE, Task.GENERATE)

    def __init__(self, model: ModelSpec, options: FakeOptions, memory: FakeMemory, events: EngineEvents) -> None:
        super().__init__(model, options, memory, events)
        self.max_running = options.max_running

    async def encode(self, request: BatchRequest) -> Sequence[EncodeOutput]:
        return await self._at_once(request)

    async def score(self, request: BatchRequest) -> Sequence[ScoreOutput]:
        return await self._at_once(request)

    async def extract(self, request: BatchRequest) -> Sequence[ExtractOutput]:
        return await self._at_once(request)

    async def _at_once(self, request: BatchRequest) -> list[Any]:
        import asyncio

        prepared = self._prepare(request)
        tokens = sum(one.tokens for one in prepared)
        self.faults.reach("run")
        self._count_run(tokens)
        if request.params.lora is not None:
            self._check_lora(request.params.lora)
        self.running += 1
        try:
            await asyncio.sleep(self.options.run_s + self.options.token_s * tokens)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return self._answers(prepared)


class FakeStreamAdapter(FakeAdapter):
    """Makes :class:`FakeStreamEngine`\\ s."""

    _engine = FakeStreamEngine


FakeAdapter._engine = FakeEngine
