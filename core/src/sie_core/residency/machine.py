"""The residency machine: which state may follow which. Pure."""

from __future__ import annotations

from sie_core.errors import TransitionError
from sie_core.types import Residency

__all__ = ["FOLLOWS", "HOLDS_ENGINE", "IN_TRANSITION", "check"]

_R = Residency

FOLLOWS: dict[Residency, frozenset[Residency]] = {
    _R.UNLOADED: frozenset({_R.QUEUED}),
    _R.QUEUED: frozenset({_R.LOADING, _R.UNLOADED, _R.FAILED, _R.QUARANTINED}),
    _R.LOADING: frozenset({_R.RESIDENT, _R.QUEUED, _R.UNLOADING, _R.UNLOADED, _R.FAILED, _R.QUARANTINED}),
    _R.RESIDENT: frozenset({_R.DRAINING, _R.UNLOADING}),
    _R.DRAINING: frozenset({_R.RESIDENT, _R.PARKING, _R.UNLOADING}),
    _R.PARKING: frozenset({_R.PARKED, _R.UNLOADING, _R.QUARANTINED}),
    _R.PARKED: frozenset({_R.WAKING, _R.UNLOADING}),
    _R.WAKING: frozenset({_R.RESIDENT, _R.PARKED, _R.UNLOADING, _R.QUARANTINED}),
    _R.UNLOADING: frozenset({_R.UNLOADED, _R.FAILED, _R.QUARANTINED}),
    _R.FAILED: frozenset({_R.UNLOADED}),
    _R.QUARANTINED: frozenset({_R.UNLOADED, _R.FAILED}),
}
"""``LOADING → QUEUED`` is a load that ran out of memory and plans again with more victims."""

HOLDS_ENGINE = frozenset({_R.RESIDENT, _R.DRAINING, _R.PARKING, _R.PARKED, _R.WAKING, _R.UNLOADING})
IN_TRANSITION = frozenset({_R.QUEUED, _R.LOADING, _R.PARKING, _R.WAKING, _R.UNLOADING, _R.QUARANTINED})


def check(model: str, before: Residency, after: Residency) -> None:
    """Raise TransitionError unless ``after`` may follow ``before``: that would be a bug in the lifecycle."""
    if after not in FOLLOWS[before]:
        raise TransitionError(f"model {model!r} can't go from {before} to {after}")
