"""Residency: which models are where, and who may move them."""

from __future__ import annotations

from sie_core.residency.failures import LoadFailure
from sie_core.residency.loras import LoraHold
from sie_core.residency.record import HostTierStatus, Lease, LoraStatus, ModelStatus, RegistrySettings
from sie_core.residency.registry import Registry
from sie_core.residency.worker import EngineWorker, Worker

__all__ = [
    "EngineWorker",
    "HostTierStatus",
    "Lease",
    "LoadFailure",
    "LoraHold",
    "LoraStatus",
    "ModelStatus",
    "Registry",
    "RegistrySettings",
    "Worker",
]
