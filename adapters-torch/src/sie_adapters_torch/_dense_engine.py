"""The running dense encoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from sie_core import (
    BatchEngine,
    BatchRequest,
    DeviceBuffer,
    DeviceNeed,
    DeviceOutOfMemory,
    EncodeOutput,
    EncodeParams,
    EngineEvents,
    InvalidInput,
    MemoryReport,
    ModelSourceInvalid,
    ModelSpec,
    Prepared,
    SieError,
    Task,
    TransitionCancelled,
    TransitionContext,
    TransitionError,
    Unsupported,
)

from sie_adapters_torch._backbone import Backbone, Packed, PaddedBackbone
from sie_adapters_torch._files import DenseFiles
from sie_adapters_torch._lanes import Lanes
from sie_adapters_torch._lora import Base, Loras
from sie_adapters_torch._offload import OffloadsTensors, forget
from sie_adapters_torch._options import DenseOptions, options_of
from sie_adapters_torch._packed_bert import PackedBert
from sie_adapters_torch._pooling import Head, load_head, pool
from sie_adapters_torch._reserve import activation_bytes_per_token, pool_name
from sie_adapters_torch._tokenise import Tokeniser, Tokens
from sie_adapters_torch._torch import free_all, out_of_memory, place_in_buffer, realised_bytes, torch_device
from sie_adapters_torch._weights import load_backbone
from sie_adapters_torch.dense import capabilities_of

__all__ = ["DenseEngine", "load_dense"]

# Measured with MiniLM on two cores; all three are flat around these values.
_CPU_CHUNK = 512  # tokens: larger chunks gain nothing more, smaller ones starve the matrix products
_CPU_OVERHEAD = 32  # tokens' worth of time that one more padded batch costs
_GPU_OVERHEAD = 4096


def _step(ctx: TransitionContext, fraction: float, note: str) -> None:
    if ctx.cancelled.is_set():
        raise TransitionCancelled("the load was called off")
    ctx.progress(fraction, note)


def load_dense(model: ModelSpec, files: DenseFiles, ctx: TransitionContext, events: EngineEvents) -> DenseEngine:
    """Make an engine on the device that ``ctx`` grants. Blocking. Raises as ``Adapter.load``."""
    options = options_of(model, DenseOptions)
    account = next(iter(ctx.grant.devices), model.device or "cpu")
    _step(ctx, 0.05, "reading weights")
    with out_of_memory(account, loading=True):
        backbone, config = load_backbone(files.model, options)
        head = load_head(files.head, files.model.hidden_size)
    _step(ctx, 0.7, "reading the tokenizer")
    tokeniser = Tokeniser.load(files.model, options, config)
    _step(ctx, 0.8, f"moving weights to {account}")
    engine = DenseEngine(model, files, options, tokeniser, Placed(account, torch.nn.ModuleList([backbone, head])))
    try:
        with out_of_memory(account):
            engine.place(ctx, events)
        engine.start()
        engine.check()
    except BaseException:
        engine.close(ctx)
        raise
    ctx.progress(1.0, "ready")
    return engine


@define(eq=False)
class Placed:
    """Tensors and where they are: the account, the modules, and the buffer behind them on an emulated device."""

    account: str
    modules: torch.nn.ModuleList
    buffer: DeviceBuffer | None = field(default=None)


@frozen(eq=False)
class _Text:
    tokens: Tokens
    dims: int | None
    lora: str | None = None


class DenseEngine(OffloadsTensors, BatchEngine):
    """One model on one device."""

    fixed_tensors = True
    pads = False  # run groups its items by length itself, or packs them

    def __init__(
        self, model: ModelSpec, files: DenseFiles, options: DenseOptions, tokeniser: Tokeniser, placed: Placed
    ) -> None:
        self.devices = (placed.account,)
        self.capabilities = capabilities_of(files)
        self.headroom_pool = pool_name(placed.account)
        self.max_batch_tokens: int | None = model.batch_tokens
        self._model = model
        self._files = files
        self._options = options
        self._tokeniser = tokeniser
        self._placed = placed
        self._device = torch_device(placed.account)
        self._backbone: Backbone | None = None
        self._lanes: Lanes | None = None
        self.max_loras = options.max_loras
        self._way_to_run = partial(_way_to_run, self._device, tokeniser.pad_id)
        self._loras = Loras(Base(model.name, placed.modules[0], placed.account, options, self._way_to_run))

    # --- lifecycle ---

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
        per_token = activation_bytes_per_token(self._files.model, self._options.dtype)
        if granted.headroom_bytes and placed.account.startswith("cuda"):
            longest = self._files.model.max_length or 1
            self.max_batch_tokens = max(longest, min(self._model.batch_tokens, granted.headroom_bytes // per_token))

    def start(self) -> None:
        """Choose how to run the model, once its tensors are in place."""
        if self._device.type == "cpu":
            self._lanes = Lanes(self._model.name, self._options.threads)
        self._backbone = self._way_to_run(self._placed.modules[0])

    def check(self) -> None:
        """Encode one input, so that a model that can't is found now. Raises ModelSourceInvalid, DeviceOutOfMemory."""
        try:
            vector = self._probe()
        except SieError:
            raise
        except Exception as error:
            raise ModelSourceInvalid(
                f"{self._files.model.folder}: the model does not encode text: {type(error).__name__}: {error}"
            ) from error
        if vector.shape != (self._files.dims,):
            raise ModelSourceInvalid(
                f"{self._files.model.folder}: its files promise {self._files.dims} dimensions, not {vector.shape[0]}"
            )

    def memory(self) -> MemoryReport:
        return MemoryReport({self._placed.account: realised_bytes(self._placed.modules) + self._loras.nbytes()})

    def probe(self, ctx: TransitionContext) -> bytes | None:
        """The vector of a fixed sequence of ids, float32."""
        return self._probe().tobytes()

    def _probe(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        length = min(self._tokeniser.limit or 16, 16)
        ids = (np.arange(1, length + 1, dtype=np.int64) * 7919) % self._tokeniser.vocabulary
        vector = self.run([Prepared(length, _Text(Tokens(ids), None))])[0].dense
        assert vector is not None
        return vector

    def probe_matches(self, before: bytes, after: bytes) -> bool:
        if self._device.type == "cpu":
            return before == after
        # Kernels of a GPU may sum in another order from one run to the next.
        tolerance = 1e-5 if self._options.dtype == "float32" else 1e-2
        return np.allclose(
            np.frombuffer(before, np.float32), np.frombuffer(after, np.float32), rtol=tolerance, atol=tolerance
        )

    def close(self, ctx: TransitionContext) -> None:
        self._backbone = None
        forget(self)
        self._loras.close()
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        free_all(self._placed.modules)
        if self._placed.buffer is not None:
            self._placed.buffer.free()
            self._placed.buffer = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # --- LoRA ---

    def lora_reserve(self, name: str, source: str) -> DeviceNeed:
        return self._loras.reserve(source)

    def lora_load(self, name: str, source: str, ctx: TransitionContext) -> None:
        self._check_awake()
        self._loras.load(name, source, ctx)
        self.mark_stale()

    def lora_unload(self, name: str, ctx: TransitionContext) -> None:
        self._check_awake()
        self._loras.unload(name)
        self.mark_stale()

    def _check_awake(self) -> None:
        if self.parked:
            raise TransitionError(
                f"{self._model.name} is parked in host memory: wake it before its LoRA adapters change"
            )

    # --- inference ---

    def prepare(self, request: BatchRequest) -> Sequence[Prepared]:
        params = request.params
        if request.task is not Task.ENCODE:
            raise Unsupported(f"{self._model.name} can encode only", supported=("encode",))
        if unknown := [name for name in params.output_types if name != "dense"]:
            raise Unsupported(
                f"{self._model.name} gives dense vectors, not {', '.join(unknown)}",
                supported=("dense",), param="output_types",
            )  # fmt: skip
        if images := [index for index, item in enumerate(request.items) if item.images]:
            raise InvalidInput(f"{self._model.name} takes text only", index=images[0], param="images")
        if params.lora is not None:
            self._loras.backbone(params.lora)
        dims = self._dims(params.dimensions)
        truncate = self._options.truncate if params.truncate is None else params.truncate
        texts = self._tokeniser(request.items, prompt=self._prompt(params), truncate=truncate)
        return [Prepared(len(tokens.ids), _Text(tokens, dims, params.lora)) for tokens in texts]

    def _prompt(self, params: EncodeParams) -> str:
        """An instruction is the name of one of the model's prompts, or the prompt itself."""
        prompts = self._files.prompts
        if params.instruction is not None:
            return prompts.named.get(params.instruction, params.instruction)
        return prompts.query if params.is_query else prompts.document

    def _dims(self, wanted: int | None) -> int | None:
        full, sizes = self._files.dims, self._files.matryoshka
        if wanted is None or wanted == full:
            return None
        if 0 < wanted < full and (sizes is None or wanted in sizes):
            return wanted
        offered = [str(full)] if not sizes else [*map(str, sizes), str(full)]
        known = f"any size up to {full}" if sizes is None else " or ".join(offered)
        raise Unsupported(
            f"{self._model.name} gives {known} dimensions, not {wanted}", supported=offered, param="dimensions"
        )

    def run(self, batch: Sequence[Prepared]) -> Sequence[EncodeOutput]:
        if self._backbone is None:
            raise RuntimeError(f"{self._model.name} is closed")
        if self.parked:
            raise RuntimeError(f"{self._model.name} is parked in host memory")
        texts: list[_Text] = [item.payload for item in batch]
        by_lora: dict[str | None, list[int]] = {}
        for index, text in enumerate(texts):
            by_lora.setdefault(text.lora, []).append(index)
        # All of them are found before the first is run.
        groups = [(self._backbone if name is None else self._loras.backbone(name), by_lora[name]) for name in by_lora]
        outputs: list[EncodeOutput | None] = [None] * len(texts)
        with out_of_memory(self._placed.account):
            for backbone, members in groups:
                self._run(backbone, texts, members, outputs)
        return [output for output in outputs if output is not None]

    def _run(
        self, backbone: Backbone, texts: Sequence[_Text], members: Sequence[int], outputs: list[EncodeOutput | None]
    ) -> None:
        """Encode those of ``texts`` that are ``members``, into their places in ``outputs``."""
        order = sorted(members, key=lambda index: -len(texts[index].tokens.ids))
        lengths = [len(texts[index].tokens.ids) for index in order]

        def part(chosen: Sequence[int]) -> None:
            vectors = self._vectors(backbone, [texts[index].tokens for index in chosen])
            for index, vector in zip(chosen, vectors, strict=True):
                outputs[index] = EncodeOutput(
                    tokens=len(texts[index].tokens.ids), dense=_resized(vector, texts[index].dims)
                )

        lanes, limit = self._lanes, self.max_batch_tokens or self._model.batch_tokens
        groups = backbone.groups(lengths, limit, lanes.threads if lanes is not None else 1)
        parts = [partial(part, order[group.start : group.stop]) for group in groups]
        if lanes is not None:
            lanes.run(parts, side_by_side=backbone.side_by_side)
        else:
            for each in parts:
                each()

    @torch.inference_mode()
    def _vectors(self, backbone: Backbone, texts: Sequence[Tokens]) -> np.ndarray[Any, np.dtype[np.float32]]:
        lengths = [len(text.ids) for text in texts]
        ids = torch.from_numpy(np.concatenate([text.ids for text in texts])).to(self._device)
        hidden = backbone.hidden(Packed(ids, tuple(lengths)))
        skips = [0 if self._files.include_prompt else text.prompt for text in texts]
        pooled = pool(hidden, lengths, self._files.pooling, skips)
        head: Head = self._placed.modules[1]  # type: ignore[assignment]
        result: np.ndarray[Any, np.dtype[np.float32]] = head(pooled).cpu().numpy()
        return result


def _way_to_run(device: torch.device, pad_id: int, module: torch.nn.Module) -> Backbone:
    on_cpu = device.type == "cpu"
    if on_cpu and PackedBert.supports(module):
        return PackedBert(module, chunk=_CPU_CHUNK)
    return PaddedBackbone(module, pad_id=pad_id, overhead=_CPU_OVERHEAD if on_cpu else _GPU_OVERHEAD)


def _resized(vector: np.ndarray[Any, np.dtype[np.float32]], dims: int | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The first ``dims`` numbers, scaled to length 1 as Matryoshka models are trained to be used."""
    if dims is None:
        return vector
    cut = vector[:dims]
    return (cut / max(float(np.linalg.norm(cut)), 1e-12)).astype(np.float32)
