"""The plugin module: says what this package offers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

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
    from sie_adapters_sglang.adapters import SglangAdapter

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
def _adapters() -> dict[str, type[SglangAdapter]]:
    # Imported when they are needed: every run of `sie` imports this module.
    from sie_adapters_sglang.adapters import EmbeddingAdapter, GenerationAdapter, HiCacheAdapter

    return {
        "sglang-generation": GenerationAdapter,
        "sglang-embedding": EmbeddingAdapter,
        "sglang-hicache": HiCacheAdapter,
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


@hookimpl
def host_offload_bytes(engine: Engine) -> int | Declined | None:
    from sie_adapters_sglang._offload import announce

    return announce(engine)


@hookimpl
def offload_to_host(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    from sie_adapters_sglang._offload import offload

    return offload(engine, ctx)


@hookimpl
def restore_from_host(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    from sie_adapters_sglang._offload import restore

    return restore(engine, ctx)
