"""LoRA adapters of a running model, by PEFT.

Each adapter has a *twin* of the model: modules of its own around the very tensors of the base, into which PEFT puts its
layers. The base is never touched, so its vectors and its speed are those of a model without adapters, an adapter that
fails to load leaves nothing behind, and nothing has to be switched between the texts of a batch.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from attrs import define, field, frozen
from sie_core import (
    DeviceBuffer,
    DeviceNeed,
    MissingDependency,
    ModelSourceInvalid,
    ResourceExhausted,
    SieError,
    TransitionCancelled,
    TransitionContext,
    Unsupported,
)

from sie_adapters_torch._backbone import Backbone, Packed
from sie_adapters_torch._lora_files import LoraFiles, bounded_ranks, lora_files, only_lora
from sie_adapters_torch._lora_patterns import check_patterns
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._source import LORA_CONFIG
from sie_adapters_torch._torch import free_all, out_of_memory, place_in_buffer, realised_bytes, torch_device
from sie_adapters_torch._weights import unused

__all__ = ["Base", "Loras"]

_NAME = "default"  # PEFT's name for the one adapter of a twin
_PREFIX = "base_model.model."  # of names in checkpoints
_CUDA_BLOCK = 512  # torch gives out a GPU's memory in multiples of this
# Settings that matter while an adapter is trained, and that PEFT would warn of.
_TRAINING = frozenset(("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"))


@frozen(eq=False)
class Base:
    """The model that adapters are for, and where it is; ``backbone`` says how a twin of it is run."""

    name: str
    module: torch.nn.Module
    account: str
    options: LoadOptions
    backbone: Callable[[torch.nn.Module], Backbone]
    max_loras: int


@define(eq=False)
class _Adapter:
    """An adapter in place: its twin, the tensors that are its own, and the buffer behind them on an emulated device."""

    twin: torch.nn.Module
    tensors: list[torch.Tensor] = field(factory=list)
    buffer: DeviceBuffer | None = None
    backbone: Backbone | None = None

    def close(self) -> None:
        self.backbone = None
        on_gpu = any(tensor.is_cuda for tensor in self.tensors)
        free_all(self.tensors)
        if self.buffer is not None:
            self.buffer.free()
            self.buffer = None
        if on_gpu:
            torch.cuda.empty_cache()


class Loras:
    """The adapters of one engine. Names are read from any thread, everything else runs on the engine's."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._device = torch_device(base.account)
        self._adapters: dict[str, _Adapter] = {}

    # --- what there is -----------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes that the adapters hold."""
        return sum(realised_bytes(adapter.tensors) for adapter in list(self._adapters.values()))

    def backbone(self, name: str) -> Backbone:
        """The model with an adapter. Raises Unsupported."""
        adapter = self._adapters.get(name)
        if adapter is None or adapter.backbone is None:
            loaded = list(self._adapters)
            raise Unsupported(
                f"{self._base.name} has no LoRA adapter {name!r}; "
                + (f"loaded are {', '.join(loaded)}" if loaded else "none is loaded"),
                supported=loaded, param="lora",
            )  # fmt: skip
        return adapter.backbone

    # --- coming and going --------------------------------------------------------------------------

    def reserve(self, source: str) -> DeviceNeed:
        """What an adapter will take, from its files. Raises LoadError, Unsupported."""
        self._check_offered()
        account, options = self._base.account, self._base.options
        files = lora_files(source, allow_pickle=options.allow_pickle)
        nbytes = files.nbytes(options.dtype, self._is_loaded, align=_CUDA_BLOCK if account.startswith("cuda") else 64)
        if account.startswith("emulated"):
            nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return DeviceNeed(min_bytes=nbytes)

    def load(self, name: str, source: str, ctx: TransitionContext) -> None:
        """Load an adapter, in place of one of the same name, which stays if this one can't be loaded.

        Raises:
            LoadError, DeviceOutOfMemory, HostOutOfMemory, TransitionCancelled: nothing has changed.
            ResourceExhausted: there are ``max_loras`` already. Unsupported: that is 0.
        """
        self._check_offered()
        others = len(self._adapters.keys() - {name})
        if others >= self._base.max_loras:
            raise ResourceExhausted(f"{self._base.name} holds {others} LoRA adapters, as many as max_loras allows")
        files = lora_files(source, allow_pickle=self._base.options.allow_pickle)
        _check_wanted(ctx)
        adapter = _Adapter(_twin(self._base.module))
        try:
            self._make(adapter, files, ctx)
        except BaseException:
            adapter.close()
            raise
        old = self._adapters.get(name)
        self._adapters[name] = adapter  # other threads see one of the two all the time
        if old is not None:
            old.close()

    def unload(self, name: str) -> None:
        """Forget an adapter, and free its memory. Idempotent."""
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            adapter.close()

    def close(self) -> None:
        """Forget all of them. Idempotent."""
        for name in list(self._adapters):
            self.unload(name)

    def _check_offered(self) -> None:
        if not self._base.max_loras:
            raise Unsupported(f"{self._base.name} takes no LoRA adapters: max_loras is 0", param="lora")
        if find_spec("peft") is None:
            raise MissingDependency("LoRA adapters need the package peft: pip install 'sie-adapters-torch[lora]'")

    # --- making one --------------------------------------------------------------------------------

    def _make(self, adapter: _Adapter, files: LoraFiles, ctx: TransitionContext) -> None:
        account = self._base.account
        try:
            with out_of_memory(account, loading=True):
                _inject(adapter.twin, files, self._is_loaded)
        finally:
            adapter.tensors = self._own(adapter.twin)
        _check_wanted(ctx)
        if account.startswith("emulated"):
            adapter.buffer = place_in_buffer(adapter.tensors, lambda nbytes: ctx.device_buffer(account, nbytes))
        backbone = self._base.backbone(adapter.twin)
        with out_of_memory(account), _blamed_on(files):
            if not self._try_out(backbone):
                raise ModelSourceInvalid(f"{files.folder}: with the LoRA adapter the model's output is not finite")
        _check_wanted(ctx)
        adapter.backbone = backbone

    def _is_loaded(self, name: str) -> bool:
        """Adapters trained on a model with its pooler have weights for that too, which no embedding reads."""
        return not unused(name) or getattr(self._base.module, "pooler", None) is not None

    def _own(self, twin: torch.nn.Module) -> list[torch.Tensor]:
        base = {id(tensor) for tensor in _tensors_of(self._base.module)}
        return [tensor for tensor in _tensors_of(twin) if id(tensor) not in base]

    @torch.inference_mode()
    def _try_out(self, backbone: Backbone) -> bool:
        """An adapter that can't run is found now, not by the first request. Whether all that came was finite."""
        ids = torch.arange(4, device=self._device)
        return bool(torch.isfinite(backbone.hidden(Packed(ids, (len(ids),)))).all())


def _check_wanted(ctx: TransitionContext) -> None:
    if ctx.cancelled.is_set():
        raise TransitionCancelled("the load of the LoRA adapter was called off")


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _twin(base: torch.nn.Module) -> torch.nn.Module:
    """Modules like the base's around the same tensors. Those without children are shared: they are wrapped at most."""
    shared: list[Any] = _tensors_of(base)
    for module in base.modules():
        if not module._modules:
            shared.append(module)
        shared += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
    return copy.deepcopy(base, {id(each): each for each in shared})


@contextmanager
def _blamed_on(files: LoraFiles) -> Iterator[None]:
    """Whatever goes wrong inside is the adapter's fault, unless memory ran out or a package is missing."""
    try:
        yield
    except (SieError, torch.OutOfMemoryError, MemoryError):
        raise
    except ImportError as error:
        raise MissingDependency(f"{files.folder}: {error}") from error
    except Exception as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            raise
        lines = [line.strip() for line in str(error).splitlines()]
        raise ModelSourceInvalid(
            f"{files.folder}: the LoRA adapter does not fit the model, or is damaged: "
            f"{type(error).__name__}: {' '.join(lines[:2])}"
        ) from error


def _rank_of(weights: dict[str, torch.Tensor]) -> int:
    """The largest rank among them: that of ``lora_A`` (``lora_embedding_A``) is its first dimension."""
    return max((len(tensor) for name, tensor in weights.items() if "_A" in name and tensor.numel()), default=0)


def _inject(twin: torch.nn.Module, files: LoraFiles, is_loaded: Callable[[str], bool]) -> None:
    """Put the adapter's layers into the twin. Raises ModelSourceInvalid, MissingDependency."""
    with _blamed_on(files):
        peft: Any = import_module("peft")
        known = {entry for entry in peft.LoraConfig.__dataclass_fields__ if entry not in _TRAINING}
        settings = {key: value for key, value in files.config.items() if key in known}
        check_patterns(files.folder / LORA_CONFIG, settings, [name for name, _ in twin.named_modules()])
        weights = peft.utils.load_peft_weights(str(files.folder), device="cpu")
        only_lora(files.folder, list(weights))
        settings |= bounded_ranks(files.folder, settings, _rank_of(weights))
        config = peft.LoraConfig(**settings | {"inference_mode": True, "init_lora_weights": False})
        # Layers are made on the model's device in its precision. Making them on the meta device instead would change
        # torch for all threads of the process while it lasts.
        peft.inject_adapter_in_model(config, twin, adapter_name=_NAME)
        twin.eval()
        loaded = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if is_loaded(name)}
        result: Any = peft.set_peft_model_state_dict(twin, loaded, adapter_name=_NAME)
        misfits = [f"the model has no place for {name}" for name in result.unexpected_keys]
        misfits += [f"it lacks {name}" for name in result.missing_keys if ".lora_" in name]
        if misfits:
            raise ModelSourceInvalid(
                f"{files.folder}: the LoRA adapter does not fit the model: {misfits[0]}"
                + (f", and {len(misfits) - 1} more" if len(misfits) > 1 else "")
            )
