"""Residency: which models are where, and who may move them."""

from __future__ import annotations

from sie_core.residency.record import HostTierStatus, Lease, ModelStatus, RegistrySettings
from sie_core.residency.registry import Registry
from sie_core.residency.worker import EngineWorker, Worker

__all__ = ["EngineWorker", "HostTierStatus", "Lease", "ModelStatus", "Registry", "RegistrySettings", "Worker"]
