"""What every adapter of this package shares: finding the files, describing a model and what it will take.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from sie_core import (
    Adapter,
    AdmissionReserve,
    Capabilities,
    DeviceView,
    Engine,
    EngineEvents,
    LoadError,
    ModelSpec,
    TensorEntry,
    TransitionContext,
    UnsafeSource,
)

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._openmp import calm_openmp
from sie_adapters_torch._options import LoadOptions, options_of
from sie_adapters_torch._reserve import Size, reserve, weight_bytes
from sie_adapters_torch._source import NotCached, Want, find_folder, hub_entries

__all__ = ["HasModel", "TorchAdapter"]


class HasModel(Protocol):
    """What a family reads from a model's folder."""

    @property
    def model(self) -> ModelFiles: ...


F = TypeVar("F", bound=HasModel)


class TorchAdapter(Adapter, Generic[F]):
    """A family: what it reads (``read``), what it can do, what it takes, and how an engine is made (``build``)."""

    options: ClassVar[type]

    # --- what a family fills in --------------------------------------------------------------------

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> F:
        """What the folder says about the model, without torch. Raises ModelSourceInvalid, UnsafeSource."""
        raise NotImplementedError

    def capabilities(self, files: F) -> Capabilities:
        """What the model takes and gives."""
        raise NotImplementedError

    def size(self, files: F, options: Any) -> Size:
        """What it takes beside the weights of the checkpoint."""
        raise NotImplementedError

    def loaded(self, files: F, entry: TensorEntry) -> bool | None:
        """Whether a tensor of the checkpoint is loaded. ``None``: as for an encoder, which leaves heads out."""
        return None

    def build(self, model: ModelSpec, files: F, ctx: TransitionContext, events: EngineEvents) -> Engine:
        """Make the engine. Torch may be imported from here on."""
        raise NotImplementedError

    # --- the adapter -------------------------------------------------------------------------------

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        calm_openmp()
        return self.build(model, self.files(model), ctx, events)

    def describe(self, model: ModelSpec) -> Capabilities | None:
        """Raises LoadError: what a load would fail with, as far as that shows on this machine."""
        try:
            files = self.files(model, "cached")
        except NotCached:
            return None
        except LoadError:
            if model.source is None or model.source.kind != "hf":
                raise
            return None  # what is cached is not all: the rest is fetched when it is loaded
        return self.capabilities(files)

    def reserve(self, model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve:
        """What a load will take, from the headers of the weights. Raises LoadError."""
        options: LoadOptions = options_of(model, self.options)
        files = self.files(model, "files")
        entries = None
        if model.source is not None and not files.model.weights and not files.model.pickled:
            entries = hub_entries(model.source)
            if entries is None and not options.allow_pickle:
                raise UnsafeSource(f"{model.source} has no safetensors weights; set allow_pickle: true to read pickles")
            if entries is None:  # only the size of a pickle tells what is in it
                files = self.files(model)
        size = self.size(files, options)
        weights = weight_bytes(files.model, options.dtype, entries, lambda entry: self.loaded(files, entry))
        return reserve(model, devices, weights + size.head_bytes, size, files.model.max_length or 0)

    def files(self, model: ModelSpec, want: Want = "all") -> F:
        """Find the model's folder and read it. Raises LoadError."""
        options: LoadOptions = options_of(model, self.options)
        folder = find_folder(
            model, want, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code
        )
        on_hub = model.source is not None and model.source.kind == "hf"
        return self.read(folder, options, weights_needed=want == "all" or not on_hub)
