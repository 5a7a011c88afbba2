"""The SIE plugin of this package: adapters ``fake`` and ``fake-stream``, for rehearsals without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sie_core import AdapterRegistrar, hookimpl

if TYPE_CHECKING:
    from sie_core import (
        AdmissionReserve,
        Declined,
        DeviceView,
        Engine,
        HostOffload,
        HostResidue,
        ModelSpec,
        TransitionContext,
    )

__all__ = [
    "admission_reserve",
    "host_offload_bytes",
    "offload_to_host",
    "register_adapters",
    "restore_from_host",
    "sie_api",
]

sie_api = 1


@hookimpl
def register_adapters(registrar: AdapterRegistrar) -> None:
    from sie_testing.fake import FakeAdapter, FakeStreamAdapter

    registrar.add("fake", FakeAdapter)
    registrar.add("fake-stream", FakeStreamAdapter)


@hookimpl
def admission_reserve(model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
    from sie_testing.fake import reserve_for

    return reserve_for(model)


@hookimpl
def host_offload_bytes(engine: Engine) -> int | Declined | None:
    from sie_testing.fake import FakeLifecycle

    return engine.host_offload_bytes() if isinstance(engine, FakeLifecycle) else None


@hookimpl
def offload_to_host(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    from sie_testing.fake import FakeLifecycle

    return engine.offload(ctx) if isinstance(engine, FakeLifecycle) else None


@hookimpl
def restore_from_host(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    from sie_testing.fake import FakeLifecycle

    return engine.restore(ctx) if isinstance(engine, FakeLifecycle) else None
