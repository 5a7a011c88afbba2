"""The plugin module: says what this package offers. Everything heavy is imported by the hooks that need it."""

from __future__ import annotations

from collections.abc import Sequence

from sie_core import AdapterRegistrar, AdmissionReserve, DeviceView, ModelSpec, hookimpl

from sie_adapters_torch.dense import DenseAdapter

__all__ = ["admission_reserve", "register_adapters", "sie_api"]

sie_api = 1

_ADAPTERS = {"torch-dense": DenseAdapter}


@hookimpl
def register_adapters(registrar: AdapterRegistrar) -> None:
    for name, adapter in _ADAPTERS.items():
        registrar.add(name, adapter)


@hookimpl
def admission_reserve(model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
    adapter = _ADAPTERS.get(model.adapter)
    return None if adapter is None else adapter().reserve(model, devices)
