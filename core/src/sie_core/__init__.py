"""SIE's core: what plugins import. The face is lazy, so that importing it costs next to nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sie_core.adapter import *  # noqa: F403
    from sie_core.checkpoints import *  # noqa: F403
    from sie_core.errors import *  # noqa: F403
    from sie_core.files import *  # noqa: F403
    from sie_core.hookspecs import *  # noqa: F403
    from sie_core.types import *  # noqa: F403

_ROOMS = {
    "sie_core.adapter": (
        "Adapter AdmissionReserve BatchEngine Declined DefaultModel Device DeviceBuffer DeviceGrant DeviceNeed "
        "DeviceView Engine EngineEvents Grant HostOffload HostResidue LoraEngine MemoryReport Prepared StreamEngine "
        "TransitionContext is_emulated"
    ),
    "sie_core.checkpoints": "TensorEntry read_header read_headers",
    "sie_core.errors": (
        "BodyTooLarge ConfigError ConfigProblem DeadlineExceeded DeviceNotFound DeviceOutOfMemory EngineDied "
        "EngineStartError Forbidden GatedModel HookFailed HookTimeout HostMemoryError HostOutOfMemory InferenceError "
        "InputTooLong InvalidInput LedgerError LoadError LoraLoading MissingAdapter MissingDependency ModelLoadFailed "
        "ModelLoading ModelNotFound ModelSourceInvalid ModelSourceNotFound NeverFits NonFiniteOutput OutOfMemory "
        "PluginBroken PluginConflict PluginError PluginIncompatible QueueFull RequestError ReserveOutdated "
        "ResourceExhausted ShuttingDown SieError TransitionCancelled TransitionError Unauthorized Unavailable "
        "UnsafeSource Unsupported WakeCheckFailed"
    ),
    "sie_core.files": "open_file read_file",
    "sie_core.hookspecs": "API_VERSION AdapterRegistrar Command VictimCandidate hookimpl hookspec",
    "sie_core.memory.emulated": "EmulatedBuffer EmulatedDevice",
    "sie_core.memory.host": "HostMemory",
    "sie_core.sources": "locate parse_source",
    "sie_core.types": (
        "BatchRequest Capabilities Cause Classification Decision DetectedObject EncodeOutput Entity ExtractOutput "
        "GenerateRequest Item ModelSpec Output Relation RequestParams Residency ResidencyChanged ScoreOutput Source "
        "SparseVector Task WakeCheck"
    ),
    "sie_core.units": "format_bytes parse_bytes",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605 - a test compares it with the rooms' own lists


def __getattr__(name: str) -> Any:
    room = _HOME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
