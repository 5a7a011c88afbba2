"""What an adapter author implements: adapters, engines, and the objects that the core hands them.

The inference path calls these classes directly; plugin hooks (see :mod:`sie_core.hookspecs`) only register them and
move bytes at transitions.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from attrs import define, field, frozen

from sie_core.types import (
    BatchRequest,
    Capabilities,
    EncodeOutput,
    ExtractOutput,
    GenerateRequest,
    ModelSpec,
    Output,
    ScoreOutput,
)

__all__ = [
    "Adapter",
    "AdmissionReserve",
    "BatchEngine",
    "Declined",
    "DefaultModel",
    "Device",
    "DeviceBuffer",
    "DeviceGrant",
    "DeviceNeed",
    "DeviceView",
    "Engine",
    "EngineEvents",
    "Grant",
    "HostOffload",
    "HostResidue",
    "LoraEngine",
    "MemoryReport",
    "Prepared",
    "StreamEngine",
    "TransitionContext",
    "is_emulated",
]


# --- devices ---------------------------------------------------------------------------------------


@runtime_checkable
class DeviceBuffer(Protocol):
    """Bytes on an emulated device, held until ``free`` is called or nobody looks into them any more.

    ``view`` is writable and page-aligned, and released by ``free``, which is idempotent.
    """

    view: memoryview

    def free(self) -> None: ...


class Device(Protocol):
    """A device that a probe found. ``name`` is its account (``cuda:0``, ``cpu``, ``emulated:0``)."""

    name: str
    kind: Literal["cuda", "cpu", "emulated"]
    description: str

    def total(self) -> int:
        """Bytes the device has."""

    def used(self) -> int | None:
        """Bytes in use on the device by anybody, as the driver counts them; ``None`` where nobody can tell."""

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Take bytes of an emulated device. Raises DeviceOutOfMemory; other kinds raise TypeError."""


def is_emulated(account: str) -> bool:
    """Whether an account is that of an emulated device, whose memory comes from ``ctx.device_buffer``."""
    return account.partition(":")[0] == "emulated"


@frozen
class DeviceView:
    """What an adapter sees of a device when it is asked what it needs. Sizes in bytes.

    ``free`` is what the driver calls free, ``available`` what the ledger would still give out, ``unrealised`` what the
    residents have been promised and have not taken.
    """

    name: str
    kind: str
    total: int
    free: int
    available: int
    unrealised: int = 0


@frozen
class DeviceNeed:
    """Bytes an engine needs on one device. ``admission = min + context + headroom``, up to ``want`` for ``min``."""

    min_bytes: int
    want_bytes: int = 0
    context_bytes: int = 0
    headroom_bytes: int = 0
    device: str | None = None
    """The device this need is for; ``None``: whichever the core picks."""


@frozen
class AdmissionReserve:
    """The answer to ``admission_reserve``.

    ``ranks`` has one need for each device the engine spans. ``host_bytes`` stay on the host as long as the engine
    runs, ``host_load_bytes`` only while it loads. ``self_sizing``: the engine sizes itself from free memory, so its
    first launch is exclusive on its devices. ``headroom_pool``: in-process engines of one pool share a context and
    run at most K at a time, so the ledger books the K largest headrooms of the pool instead of all.
    """

    ranks: tuple[DeviceNeed, ...]
    host_bytes: int = 0
    host_load_bytes: int = 0
    self_sizing: bool = False
    headroom_pool: str | None = None


@frozen
class DeviceGrant:
    """What the ledger granted on one device: bytes for good, bytes for run time, and how the device stands.

    ``free_bytes``: what the driver calls free as the transition begins, whoever had to go being gone;
    ``others_unrealised_bytes`` of it are promised to residents that have not taken them yet.
    """

    static_bytes: int
    headroom_bytes: int = 0
    free_bytes: int = 0
    others_unrealised_bytes: int = 0


@frozen
class Grant:
    """What a transition may take. Keys of ``devices`` are account names, in rank order."""

    devices: Mapping[str, DeviceGrant] = field(factory=dict)
    host_bytes: int = 0


def _no_buffer(*_: Any) -> Any:
    raise TypeError("this transition offers no such buffer")


@define(eq=False)
class TransitionContext:
    """What a blocking call gets from the core.

    ``deadline``: seconds on the clock of :func:`time.monotonic`; past it the engine is quarantined.
    ``cancelled``: set when the transition is no longer wanted; check it between steps and raise TransitionCancelled.
    ``progress(fraction, note)``: fraction 0 to 1, callable from any thread.
    ``host_buffer(nbytes)``: a writable slice of the host copy, which the core owns and has charged. Raises
    HostOutOfMemory beyond what was announced. Let go of it when the copy is given up.
    ``device_buffer(account, nbytes)``: memory of an emulated device, which the engine owns: free it at park and close.
    Raises DeviceOutOfMemory.
    """

    grant: Grant = field(factory=Grant)
    deadline: float = float("inf")
    cancelled: threading.Event = field(factory=threading.Event)
    progress: Callable[[float, str], None] = lambda fraction, note: None
    host_buffer: Callable[[int], memoryview] = _no_buffer
    device_buffer: Callable[[str, int], DeviceBuffer] = _no_buffer


# --- answers of the hooks --------------------------------------------------------------------------


@frozen
class Declined:
    """Mine, and it can't park, for this reason. Ends the chain."""

    reason: str


@frozen
class HostOffload:
    """The end of a park: host bytes now held, and by account what could not be given up (a CUDA context)."""

    host_bytes: int
    retained: Mapping[str, int] = field(factory=dict)


@frozen
class HostResidue:
    """The end of a wake: host bytes that the engine still holds, and whether they can be dropped at no cost."""

    host_bytes: int = 0
    droppable: bool = False


@frozen
class MemoryReport:
    """Bytes that an engine really holds: by account (``None``: nobody can tell), and on the host.

    ``host``: right after a load, all that it is going to hold there while it runs: a reserve that was larger is cut to
    it. 0: it can't tell, and the reserve stays.

    ``figures``: what else operators may want to know of the engine, by name: shown with the model's status and among
    the metrics. A name says its unit: ``host_pool_bytes``.
    """

    devices: Mapping[str, int | None]
    host: int = 0
    figures: Mapping[str, int | float] = field(factory=dict)


# --- adapters and engines --------------------------------------------------------------------------


@frozen
class DefaultModel:
    """A model that an adapter offers when nothing is configured. ``hint`` says how to get it when it is not there."""

    spec: ModelSpec
    available: bool
    hint: str = ""


class EngineEvents(Protocol):
    """What an engine may tell the core, from any thread."""

    def died(self, reason: str, details: str = "") -> None:
        """The engine is gone; its claims are released and the next request loads cold.

        ``details``: what only those see who run the server, such as the end of its log.
        """

    def request_growth(self, account: str, nbytes: int) -> bool:
        """Ask for more bytes than were promised. ``False``: they are not to be had."""


class Adapter:
    """Knows an engine family and makes engines. Register the class with ``registrar.add(name, cls)``.

    ``options`` is an attrs class: its fields, types and defaults are the adapter's configuration, checked by the core.
    """

    options: ClassVar[type]
    declares: ClassVar[Capabilities | None] = None
    """What every model of this adapter can do, without sizes: shown while ``describe`` can't tell more."""

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        """Make an engine. Blocking, on the engine's own thread.

        Raises:
            LoadError: the model can't be loaded (the subclass says whether for good).
            DeviceOutOfMemory, HostOutOfMemory: the core frees memory and tries again.
            TransitionCancelled: ``ctx.cancelled`` was set.
        """
        raise NotImplementedError

    def describe(self, model: ModelSpec) -> Capabilities | None:
        """What the model can do, read cheaply from its files without loading it; ``None`` if that is not known.

        Raises LoadError for what a load would fail with in any case, such as a folder that does not exist: `sie check`
        shows it. Files that are still to be fetched are no error.
        """
        return None

    def default_models(self) -> Sequence[DefaultModel]:
        """Models to serve when nothing is configured."""
        return ()


class Engine:
    """A running instance of a model. Lifecycle methods are blocking, on the engine's own thread, one at a time."""

    devices: Sequence[str] = ()
    capabilities: Capabilities = Capabilities()
    headroom_pool: str | None = None

    def memory(self) -> MemoryReport:
        """Bytes really held now."""
        raise NotImplementedError

    def probe(self, ctx: TransitionContext) -> bytes | None:
        """The answer to a fixed input, in which any change of the weights shows, for the wake check.

        ``None``: no check is possible, and the status says that wakes are unchecked. Asked once after the load, and
        after the wakes that the model's ``wake_check`` says.
        """
        return None

    def probe_matches(self, before: bytes, after: bytes) -> bool:
        """Whether two probe answers count as the same."""
        return before == after

    def alive(self) -> bool:
        """Whether it can work: asked after every wake, so it must cost little. ``False``: the model loads again.

        An engine with a process of its own asks that how it is; one in this process computes something tiny on each
        device and waits for it. The default takes an engine at its word.
        """
        return True

    def drop_backup(self) -> int:
        """Drop the host copy that survived a wake. Returns the bytes freed; 0: there is none, or it can't go."""
        return 0

    def close(self, ctx: TransitionContext) -> None:
        """Give everything back, a parked copy too. Idempotent."""


@frozen(eq=False)
class Prepared:
    """One item, ready to run: what it costs in tokens, and what the engine needs to run it."""

    tokens: int
    payload: Any


class BatchEngine(Engine):
    """An engine that runs one batch at a time."""

    max_batch_tokens: int | None = None
    """Tokens (padding included) that one ``run`` may hold, from the headroom granted; ``None``: no limit of its own."""

    pads: bool = True
    """Whether ``run`` pads its items to the longest, so that items of similar length should go together.
    ``False`` for an engine that packs them, or that groups them itself."""

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        """Turn a request into one ``Prepared`` an item (tokenising, image decoding). Thread-safe; off the event loop.

        Raises:
            InvalidInput: with the ``index`` of the bad item. No other request is affected.
        """
        raise NotImplementedError

    def run(self, batch: Sequence[Prepared]) -> Sequence[Output]:
        """Run a batch; one output an item, in order. One call at a time, on the engine's thread.

        A batch may hold items of several requests, and of every task that the engine has: each item's output is of the
        kind that its request's task asks for (EncodeOutput, ScoreOutput, ExtractOutput).

        Raises:
            DeviceOutOfMemory: the batcher splits the batch and tries again.
        """
        raise NotImplementedError


class StreamEngine(Engine):
    """An engine that runs many requests at once. Cancelling a call aborts its request in the engine.

    A call that is cancelled, or a stream that is closed, may take a moment to abort, and must not take longer: the
    model can't be unloaded or parked meanwhile.
    """

    max_running: int | None = None
    """Requests that it takes at a time; the others wait in the model's queue. ``None``: it takes all that come."""

    async def encode(self, request: BatchRequest) -> Sequence[EncodeOutput]:
        """Encode the items of one request."""
        raise NotImplementedError

    async def score(self, request: BatchRequest) -> Sequence[ScoreOutput]:
        """Score the items of one request against its query."""
        raise NotImplementedError

    async def extract(self, request: BatchRequest) -> Sequence[ExtractOutput]:
        """Find in the items of one request what its labels or its schema say."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> Mapping[str, Any]:
        """Generate for one request: OpenAI's ``chat.completion`` or ``text_completion`` object, with its ``usage``.

        ``model``, ``id``, ``object`` and ``created`` are the core's to fill in: whatever is there is replaced.

        Raises:
            InvalidInput: the engine refuses the request.
            InferenceError: it could not be finished; an answer that was aborted is never handed out as a normal one.
            EngineDied
        """
        raise NotImplementedError

    def stream(self, request: GenerateRequest) -> AsyncGenerator[bytes | list[bytes]]:
        """The same piece by piece: each a JSON object of OpenAI's stream (``chat.completion.chunk`` or
        ``text_completion``) on one line, without the ``data:`` around it and without the ``[DONE]`` at the end.

        The core always asks for ``stream_options.include_usage``: a piece with the usage and no ``choices`` comes
        last, and a stream without one counts as broken off. Pieces that begin with the same bytes, ``id``, ``object``,
        ``created`` and ``model`` and then ``choices``, are passed on unread; others cost more.

        Pieces that came together may be given together, in a list: they are then passed on with one write, which is
        most of what a piece costs.

        The engine is read no faster than its pieces are taken; closing the generator aborts the request in the engine.
        Raises as ``generate``: before the first piece if it can, since a client then gets an error with a status.
        """
        raise NotImplementedError


@runtime_checkable
class LoraEngine(Protocol):
    """Optional: an engine that takes LoRA adapters at run time. Blocking, on the engine's thread, between runs.

    A request names its adapter in ``params.lora``, which the core has loaded by then and keeps until the request ends.
    The adapters of an engine are parked and woken with it.
    """

    max_loras: int
    """Adapters that may be loaded at a time; beyond that the least recently used one goes. 0: none at all."""

    def lora_reserve(self, name: str, source: str) -> DeviceNeed:
        """Bytes that the adapter will take on each of the engine's devices. Raises LoadError."""

    def lora_load(self, name: str, source: str, ctx: TransitionContext) -> None:
        """Load it under ``name``. Whatever it raises, nothing of the adapter is left behind.

        Raises:
            LoadError: it can't be loaded, or does not fit the model.
            DeviceOutOfMemory, HostOutOfMemory.
        """

    def lora_unload(self, name: str, ctx: TransitionContext) -> None:
        """Forget it. Idempotent."""
