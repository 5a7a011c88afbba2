"""The plugin module: says what this package offers. Everything heavy is imported by the hooks that need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sie_core import (
    AdapterRegistrar,
    AdmissionReserve,
    Declined,
    DeviceView,
    Engine,
    HostOffload,
    HostResidue,
    ModelSpec,
    TransitionContext,
    hookimpl,
)

if TYPE_CHECKING:
    from sie_adapters_torch._adapter import TorchAdapter

__all__ = [
    "admission_reserve",
    "host_offload_bytes",
    "offload_to_host",
    "register_adapters",
    "restore_from_host",
    "sie_api",
]

sie_api = 1


@cache
def _adapters() -> dict[str, type[TorchAdapter[Any]]]:
    # Imported when they are needed: every run of `sie` imports this module.
    from sie_adapters_torch.bge_m3 import BgeM3Adapter
    from sie_adapters_torch.classifier import ClassifierAdapter
    from sie_adapters_torch.cross_encoder import CrossEncoderAdapter
    from sie_adapters_torch.dense import DenseAdapter
    from sie_adapters_torch.entities import EntitiesAdapter
    from sie_adapters_torch.gliner import GlinerAdapter
    from sie_adapters_torch.image_text import ImageTextAdapter
    from sie_adapters_torch.multivector import MultivectorAdapter
    from sie_adapters_torch.sparse import SparseAdapter

    return {
        "torch-dense": DenseAdapter,
        "torch-sparse": SparseAdapter,
        "torch-cross-encoder": CrossEncoderAdapter,
        "torch-entities": EntitiesAdapter,
        "torch-classifier": ClassifierAdapter,
        "torch-multivector": MultivectorAdapter,
        "torch-image-text": ImageTextAdapter,
        "torch-gliner": GlinerAdapter,
        "torch-bge-m3": BgeM3Adapter,
    }


@hookimpl
def register_adapters(registrar: AdapterRegistrar) -> None:
    for name, adapter in _adapters().items():
        registrar.add(name, adapter)
    registrar.add_catalogue(Path(__file__).with_name("catalogue"))


@hookimpl
def admission_reserve(model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
    adapter = _adapters().get(model.adapter)
    return None if adapter is None else adapter().reserve(model, devices)


# Any engine made of torch tensors, whoever wrote it. Where nobody has imported torch there is none.


@hookimpl
def host_offload_bytes(engine: Engine) -> int | Declined | None:
    if "torch" not in sys.modules:
        return None
    from sie_adapters_torch._offload import announce

    return announce(engine)


@hookimpl
def offload_to_host(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    if "torch" not in sys.modules:
        return None
    from sie_adapters_torch._offload import offload

    return offload(engine, ctx)


@hookimpl
def restore_from_host(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    if "torch" not in sys.modules:
        return None
    from sie_adapters_torch._offload import restore

    return restore(engine, ctx)
