"""The nouns that every floor shares: models, requests, results. No behaviour beyond themselves."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import field, frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "BatchRequest",
    "Capabilities",
    "Cause",
    "Classification",
    "Decision",
    "DetectedObject",
    "EncodeOutput",
    "Entity",
    "ExtractOutput",
    "GenerateRequest",
    "Item",
    "ModelSpec",
    "Output",
    "Relation",
    "RequestParams",
    "Residency",
    "ResidencyChanged",
    "ScoreOutput",
    "Source",
    "SparseVector",
    "Task",
    "WakeCheck",
]


class Residency(enum.StrEnum):
    """The one state of a model (see the glossary)."""

    UNLOADED = "unloaded"
    QUEUED = "queued"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    PARKING = "parking"
    PARKED = "parked"
    WAKING = "waking"
    UNLOADING = "unloading"
    FAILED = "failed"
    QUARANTINED = "quarantined"


class Cause(enum.StrEnum):
    """Why a model leaves its device or the host tier. Metrics have these values as the reasons of evictions."""

    ROOM_FOR_ANOTHER = "room_for_another"
    """Another model, or a LoRA adapter of one, needs the room."""
    LOAD_OOM = "load_oom"
    """Another model ran out of memory while it was loaded or woken, against the book."""
    RUN_OOM = "run_oom"
    """A resident model ran out of memory at work."""
    MEMORY_PRESSURE = "memory_pressure"
    """Other processes took the device's memory, or closed engines left bytes behind there."""
    IDLE = "idle"
    DISPLACED = "displaced"
    """Pinned models hold the device on which it was parked: it is loaded elsewhere."""
    TIER_FULL = "tier_full"
    """Its place in the host tier went to another copy."""
    HOST_SHORT = "host_short"
    """Less of the host's memory is available than promised."""
    HOST_WAITS = "host_waits"
    """Tasks on the host wait for memory."""
    WAKE_FAILED = "wake_failed"
    ENGINE_DIED = "engine_died"
    OVERRAN = "overran"
    """A call into its engine did not return in time."""
    INTERRUPTED = "interrupted"
    """A transition was torn from outside."""
    LOAD_FAILED = "load_failed"
    """Its engine never became resident."""
    REQUESTED = "requested"
    CONFIG_CHANGED = "config_changed"
    SHUTDOWN = "shutdown"

    @property
    def evicts(self) -> bool:
        """Whether a model that leaves for this cause was evicted: operators and failed loads evict nothing."""
        return self not in _NO_EVICTION


_NO_EVICTION = frozenset({Cause.LOAD_FAILED, Cause.REQUESTED, Cause.CONFIG_CHANGED, Cause.SHUTDOWN})


class Task(enum.StrEnum):
    """What a request wants of a model."""

    ENCODE = "encode"
    SCORE = "score"
    EXTRACT = "extract"
    GENERATE = "generate"


class WakeCheck(enum.StrEnum):
    """When a woken engine has to answer its fixed input as it did when first loaded."""

    AUTO = "auto"
    """At its first wake; from then on at every wake if the check took less than a tenth of the wake."""
    FIRST = "first"
    ALWAYS = "always"
    NEVER = "never"


@frozen
class Source:
    """Where a model's files are: ``package:IMPORT_NAME/SUBPATH``, ``path:DIR`` or ``hf:ORG/NAME@REVISION``.

    ``base`` is the folder that a relative ``path:`` starts from (that of the configuration file).
    """

    kind: Literal["package", "path", "hf"]
    location: str
    revision: str | None = None
    base: Path | None = field(default=None, eq=False)

    def __str__(self) -> str:
        return f"{self.kind}:{self.location}" + (f"@{self.revision}" if self.revision else "")


@frozen
class ModelSpec:
    """A configured unit: what to load, with which adapter, under which rules.

    ``options`` is the adapter's own typed attrs object once it is bound, a plain mapping before. ``host_offload``: to
    an adapter, whether the engine may ever be parked, so false where there is no host tier. Times are seconds, sizes
    bytes. Fields for which ``engine_key`` differs raise the model's epoch; the others take effect at once.
    """

    name: str
    adapter: str
    source: Source | None = None
    device: str | None = None
    options: Any = field(factory=dict)
    runtime_headroom: int | None = None
    host_offload: bool = True
    wake_check: WakeCheck = WakeCheck.AUTO
    batch_tokens: int = 8192
    lora: Mapping[str, str] = field(factory=dict)
    pinned: bool = False
    idle_evict_s: float | None = None
    min_resident_s: float = 0.0
    queue: int = 256
    deadline_s: float = 120.0

    def engine_key(self) -> tuple[Any, ...]:
        """The fields that a running engine was made from."""
        return (self.adapter, self.source, self.device, self.options, self.runtime_headroom, self.batch_tokens)


@frozen
class Capabilities:
    """What a model takes and gives. ``dims`` by output; ``matryoshka`` lists the sizes ``dimensions`` may ask for.

    ``matryoshka`` empty: no other size than the model's own. ``None``: any size up to ``dims``.

    ``compares``: the output by which the core scores documents for a model whose engine can't do it itself: query and
    documents are encoded, and their vectors compared (``multivector``: MaxSim; ``dense``: cosine; ``sparse``: dot
    product). Such a model has ``Task.SCORE`` among its tasks, and its engine sees ``Task.ENCODE`` only.
    """

    tasks: frozenset[Task] = frozenset({Task.ENCODE})
    inputs: tuple[str, ...] = ("text",)
    outputs: tuple[str, ...] = ("dense",)
    dims: Mapping[str, int] = field(factory=dict)
    max_sequence_length: int | None = None
    matryoshka: tuple[int, ...] | None = ()
    compares: str | None = None


@frozen
class Item:
    """One input. One of ``text`` and ``token_ids`` (ids of the model's own vocabulary) is set, or there are ``images``.

    ``images``: encoded files (PNG, JPEG, …) as they came.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    id: str | None = None
    images: tuple[bytes, ...] = ()


@frozen
class RequestParams:
    """How to run a request. ``truncate=None`` leaves it to the model's configuration; ``lora`` names a LoRA adapter.

    ``output_types``, ``is_query`` and ``dimensions`` matter to encoding only; ``is_query=None``: the request does not
    say whether its items are queries or documents. ``options`` is the engine's to check.
    """

    output_types: tuple[str, ...] = ("dense",)
    instruction: str | None = None
    is_query: bool | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    lora: str | None = None
    options: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class BatchRequest:
    """What a request hands to a batch engine's ``prepare``.

    ``query`` is there for ``Task.SCORE``: each item is scored against it. ``labels`` and ``output_schema`` say what
    ``Task.EXTRACT`` looks for.
    """

    task: Task
    items: Sequence[Item]
    params: RequestParams = field(factory=RequestParams)
    query: Item | None = None
    labels: tuple[str, ...] = ()
    output_schema: Mapping[str, Any] | None = None


@frozen(eq=False)
class GenerateRequest:
    """What a request hands to an engine that generates.

    ``body`` is the body of OpenAI's ``/v1/chat/completions`` (``kind`` chat) or ``/v1/completions``, checked, without
    ``model``, ``stream``, ``lora`` and what was ``null``: what the core does not know is the engine's to take or to
    refuse. A grammar is ``response_format``, or ``regex`` or ``ebnf`` as a string beside it.
    """

    kind: Literal["chat", "completion"]
    body: Mapping[str, Any]
    lora: str | None = None


@frozen(eq=False)
class SparseVector:
    """``indices``: int32 (nnz,), ascending; ``values``: float32 (nnz,)."""

    indices: NDArray[np.int32]
    values: NDArray[np.float32]


@frozen(eq=False)
class EncodeOutput:
    """One item's answer. ``dense``: float32 (dims,); ``multivector``: float32 (tokens, dims); ``tokens``: as read."""

    tokens: int
    dense: NDArray[np.float32] | None = None
    sparse: SparseVector | None = None
    multivector: NDArray[np.float32] | None = None


@frozen(eq=False)
class ScoreOutput:
    """How well one item answers the query: the larger the better, on the model's own scale."""

    tokens: int
    score: float


@frozen
class Entity:
    """A span of an item's text, ``text[start:end]`` in code points, or a box ``(x, y, width, height)`` in pixels."""

    text: str
    label: str
    score: float
    start: int | None = None
    end: int | None = None
    bbox: tuple[float, float, float, float] | None = None


@frozen
class Relation:
    """``head`` and ``tail`` are texts of entities."""

    head: str
    tail: str
    relation: str
    score: float


@frozen
class Classification:
    """A label of a whole item, with its probability."""

    label: str
    score: float


@frozen
class DetectedObject:
    """An object in an image; ``bbox`` as an entity's."""

    label: str
    score: float
    bbox: tuple[float, float, float, float]


@frozen(eq=False)
class ExtractOutput:
    """What was found in one item, in the order of the text, or best first where there is no order."""

    tokens: int
    entities: tuple[Entity, ...] = ()
    relations: tuple[Relation, ...] = ()
    classifications: tuple[Classification, ...] = ()
    objects: tuple[DetectedObject, ...] = ()


Output: TypeAlias = EncodeOutput | ScoreOutput | ExtractOutput
"""One item's answer, of the kind that the request's task asks for."""


@frozen
class ResidencyChanged:
    """A model went from one residency to another. ``at`` is a wall-clock time (seconds since 1970).

    ``reason`` is for people; ``cause`` is set where the model leaves its device or the host tier.
    """

    model: str
    before: Residency
    after: Residency
    reason: str
    epoch: int
    at: float
    cause: Cause | None = None


@frozen
class Decision:
    """Why something was evicted, refused or dropped: one entry of the decision ring. Sizes in bytes.

    ``reason`` is for people; ``cause`` is set where a model leaves its device or the host tier.
    """

    at: float
    model: str
    action: str
    reason: str
    needed_bytes: int = 0
    promised_bytes: int = 0
    freed_bytes: int = 0
    victims: tuple[str, ...] = ()
    cause: Cause | None = None
