"""What every engine of this package shares: coming up on its device, the wake check, and closing.

A family gives its tensors, its capabilities and its size (:class:`Parts`), answers a fixed input (:meth:`sample`) and
runs batches. Everything that it holds on the device is in ``Parts.modules``: that is what is placed, counted and freed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from sie_core import (
    BatchEngine,
    Capabilities,
    DeviceBuffer,
    DeviceOutOfMemory,
    EncodeOutput,
    EngineEvents,
    ExtractOutput,
    MemoryReport,
    ModelSourceInvalid,
    ModelSpec,
    Output,
    ScoreOutput,
    SieError,
    TransitionCancelled,
    TransitionContext,
)

from sie_adapters_torch._lanes import Lanes
from sie_adapters_torch._offload import OffloadsTensors, forget
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._reserve import Size, pool_name
from sie_adapters_torch._torch import free_all, out_of_memory, place_in_buffer, realised_bytes, torch_device

__all__ = ["Parts", "Placed", "Step", "TorchEngine", "bring_up"]

Step = Callable[[float, str], None]
"""Says how far a load is, from 0 to 1, and what comes next. Raises TransitionCancelled when it was called off."""


@frozen(eq=False)
class Parts:
    """What an engine is made of, on the CPU still. ``folder``: where its files are, for messages."""

    model: ModelSpec
    options: LoadOptions
    capabilities: Capabilities
    folder: Path
    modules: torch.nn.ModuleList
    size: Size


@define(eq=False)
class Placed:
    """Tensors and where they are: the account, the modules, and the buffer behind them on an emulated device."""

    account: str
    modules: torch.nn.ModuleList
    buffer: DeviceBuffer | None = field(default=None)


class TorchEngine(OffloadsTensors, BatchEngine):
    """One model on one device. Hooks of a family: ``begin``, ``end``, ``sample``, ``numbers``, ``disagreement``."""

    fixed_tensors = True
    pads = False  # run groups its items by length itself, or packs them

    def __init__(self, parts: Parts, account: str) -> None:
        self.devices = (account,)
        self.capabilities = parts.capabilities
        self.headroom_pool = pool_name(account)
        self.max_batch_tokens: int | None = parts.model.batch_tokens
        self._model = parts.model
        self._options = parts.options
        self._folder = parts.folder
        self._size = parts.size
        self._placed = Placed(account, parts.modules)
        self._device = torch_device(account)
        self._lanes: Lanes | None = None
        self._running = False

    # --- what a family fills in --------------------------------------------------------------------

    def begin(self) -> None:
        """Choose how to run the model. The tensors are in place."""

    def end(self) -> None:
        """Let go of what ``begin`` made, before the tensors go. Idempotent; may come without ``begin``."""

    def sample(self) -> Output:
        """The answer to a fixed input: it shows that the model runs, and after a wake that it runs as before."""
        raise NotImplementedError

    def numbers(self, output: Output) -> NDArray[np.float32]:
        """What of an answer the wake check compares, (n,): everything by default."""
        figures = _figures(output, self.capabilities.dims.get("sparse", 0))
        return np.concatenate([np.zeros(0, np.float32), *(np.ravel(each) for each in figures)])

    def disagreement(self, output: Output) -> str | None:
        """How the sample differs from what the files promise, if it does: vectors' dimensions by default."""
        if not isinstance(output, EncodeOutput):
            return None
        for name in ("dense", "multivector"):
            vectors, promised = getattr(output, name), self.capabilities.dims.get(name)
            if vectors is not None and promised is not None and vectors.shape[-1] != promised:
                return f"its files promise {promised} dimensions, not {vectors.shape[-1]}"
            if vectors is not None and not np.isfinite(vectors).all():
                return "its vectors are not finite"
        return None

    # --- lifecycle ---------------------------------------------------------------------------------

    def place(self, ctx: TransitionContext, events: EngineEvents) -> None:
        """Bring the tensors to the device. Raises DeviceOutOfMemory."""
        placed, granted = self._placed, ctx.grant.devices.get(self._placed.account)
        if placed.account.startswith("emulated"):
            placed.buffer = place_in_buffer(placed.modules, lambda nbytes: ctx.device_buffer(placed.account, nbytes))
        else:
            placed.modules.to(self._device)
        if granted is None:
            return
        held = realised_bytes(placed.modules)
        over = held - granted.static_bytes
        if over > 0 and not events.request_growth(placed.account, over):
            raise DeviceOutOfMemory(
                f"{self._model.name} holds {held} bytes, {over} more than it was granted",
                account=placed.account, needed=held, free=granted.static_bytes,
            )  # fmt: skip
        if granted.headroom_bytes and placed.account.startswith("cuda"):
            longest = self.capabilities.max_sequence_length or 1
            tokens = (granted.headroom_bytes - self._size.fixed_bytes) // self._size.token_bytes
            self.max_batch_tokens = max(longest, min(self._model.batch_tokens, tokens))

    def start(self) -> None:
        """Make it ready to run, once its tensors are in place."""
        if self._device.type == "cpu":
            self._lanes = Lanes(self._model.name, self._options.threads)
        self.begin()
        self._running = True

    def check(self) -> None:
        """Run one input, so that a model that can't is found now. Raises ModelSourceInvalid, DeviceOutOfMemory."""
        try:
            output = self.sample()
        except SieError:
            raise
        except Exception as error:
            does = " or ".join(sorted(str(task) for task in self.capabilities.tasks))
            raise ModelSourceInvalid(
                f"{self._folder}: the model can't {does} {self.capabilities.inputs[0]}: {type(error).__name__}: {error}"
            ) from error
        if wrong := self.disagreement(output):
            raise ModelSourceInvalid(f"{self._folder}: {wrong}")

    def check_running(self) -> None:
        """For ``run``: an engine that is closed or parked has no tensors. Raises RuntimeError."""
        if not self._running:
            raise RuntimeError(f"{self._model.name} is closed")
        if self.parked:
            raise RuntimeError(f"{self._model.name} is parked in host memory")

    def memory(self) -> MemoryReport:
        return MemoryReport({self._placed.account: realised_bytes(self._placed.modules)})

    def probe(self, ctx: TransitionContext) -> bytes | None:
        """The numbers of the sample, float32."""
        return self.numbers(self.sample()).astype(np.float32).tobytes()

    def probe_matches(self, before: bytes, after: bytes) -> bool:
        if self._device.type == "cpu":
            return before == after
        # Kernels of a GPU may sum in another order from one run to the next.
        tolerance = 1e-5 if self._options.dtype == "float32" else 1e-2
        return len(before) == len(after) and np.allclose(
            np.frombuffer(before, np.float32), np.frombuffer(after, np.float32), rtol=tolerance, atol=tolerance
        )

    def alive(self) -> bool:
        return self._running and super().alive()

    def close(self, ctx: TransitionContext) -> None:
        self._running = False
        self.end()
        forget(self)
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        free_all(self._placed.modules)
        if self._placed.buffer is not None:
            self._placed.buffer.free()
            self._placed.buffer = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _figures(output: Output, words: int) -> list[Any]:
    if isinstance(output, ScoreOutput):
        return [np.float32(output.score)]
    if isinstance(output, ExtractOutput):
        kinds: tuple[Any, ...] = (output.entities, output.relations, output.classifications, output.objects)
        return [np.array([each.score for kind in kinds for each in kind], np.float32)]
    figures: list[Any] = [output.dense, output.multivector]
    if output.sparse is not None:
        # All words': which of their weights are not 0 may change with rounding.
        weights = np.zeros(words, np.float32)
        weights[output.sparse.indices] = output.sparse.values
        figures.append(weights)
    return [each for each in figures if each is not None]


E = TypeVar("E", bound=TorchEngine)


def bring_up(model: ModelSpec, ctx: TransitionContext, events: EngineEvents, make: Callable[[str, Step], E]) -> E:
    """Make an engine and bring it up on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``.

    ``make(account, step)`` reads the weights into RAM and gives the engine; it says how far it is with ``step``, from
    0.1 to 0.7.
    """

    def step(fraction: float, note: str) -> None:
        if ctx.cancelled.is_set():
            raise TransitionCancelled("the load was called off")
        ctx.progress(fraction, note)

    account = next(iter(ctx.grant.devices), model.device or "cpu")
    step(0.05, "reading weights")
    with out_of_memory(account, loading=True):
        engine = make(account, step)
    try:
        step(0.8, f"moving weights to {account}")
        with out_of_memory(account):
            engine.place(ctx, events)
        engine.start()
        engine.check()
    except BaseException:
        engine.close(ctx)
        raise
    ctx.progress(1.0, "ready")
    return engine
