"""How models, accounts and decisions look to clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import asdict

from sie_core.types import Cause, Decision, Residency

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sie_core.http.endpoint import Site
    from sie_core.http.known import Known
    from sie_core.memory.ledger import AccountState
    from sie_core.residency import LoadFailure, LoraStatus, ModelStatus
    from sie_core.serving import Explanation, ServerStatus

__all__ = ["STATES", "decision", "explanation", "model_card", "model_status", "openai_card", "server_status"]

STATES: Final = {
    Residency.RESIDENT: "loaded",
    Residency.DRAINING: "loaded",
    Residency.UNLOADED: "available",
    Residency.PARKING: "available",
    Residency.PARKED: "available",
    Residency.QUEUED: "loading",
    Residency.LOADING: "loading",
    Residency.WAKING: "loading",
    Residency.UNLOADING: "unloading",
    Residency.FAILED: "failed",
    Residency.QUARANTINED: "failed",
}
"""The coarse states that public clients know."""


def openai_card(status: ModelStatus, site: Site) -> dict[str, Any]:
    """The model as OpenAI's clients list it."""
    return {"id": status.name, "object": "model", "created": int(site.started_at), "owned_by": "sie"}


def model_card(status: ModelStatus, known_from: Known, *, operator: bool) -> dict[str, Any]:
    """What the model can do (``known_from``) and how it is, as the native clients list it. Sizes in bytes.

    ``operator``, here and below: whether who asks may see the details of errors, and where files are.
    """
    known, whence = known_from
    state = STATES[status.residency]
    return {
        "name": status.name,
        "loaded": state == "loaded",
        "state": state,
        "tasks": sorted(task.value for task in known.tasks) if known else [],
        "inputs": list(known.inputs) if known else [],
        "outputs": list(known.outputs) if known else [],
        "dims": dict(known.dims) if known else {},
        "max_sequence_length": known.max_sequence_length if known else None,
        "known_from": whence,
        "last_error": _failure(status.failure, operator),
        "residency": status.residency.value,
        "device_bytes": status.device_bytes,
        "host_bytes": status.host_bytes,
    }


def model_status(status: ModelStatus, *, operator: bool = True) -> dict[str, Any]:
    """The model as operators watch it. Sizes in bytes, times in seconds."""
    progress = status.progress
    return {
        "name": status.name,
        "adapter": status.adapter,
        "residency": status.residency.value,
        "device": ",".join(status.devices) or None,
        "device_bytes": status.device_bytes,
        "host_bytes": status.host_bytes,
        "overrun_bytes": status.overrun_bytes,
        "pinned": status.pinned,
        "leases": status.leases,
        "queued": status.queued,
        "epoch": status.epoch,
        "last_error": _failure(status.failure, operator),
        "load_s": status.load_s,
        "park_s": status.park_s,
        "wake_s": status.wake_s,
        "wake_check": status.spec.wake_check.value,
        "wake_checked": None if status.wake_checked is None else status.wake_checked.value,
        "wake_check_s": status.wake_check_s,
        "progress": None if progress is None else {"fraction": progress[0], "note": progress[1]},
        "loras": [_lora(lora, operator) for lora in status.loras],
        "figures": dict(status.figures),
        "leaving": status.leaving,
        "waits_for": status.waits_for,
    }


def _lora(lora: LoraStatus, operator: bool) -> dict[str, Any]:
    return {
        "name": lora.name,
        "source": lora.source if operator else None,
        "loaded": lora.loaded,
        "device_bytes": lora.device_bytes if lora.loaded else 0,
        "in_use": lora.in_use,
        "last_error": _failure(lora.failure, operator),
    }


def account_status(account: AccountState, left_behind: Mapping[str, int]) -> dict[str, Any]:
    """A memory account. Sizes in bytes. ``left_behind``: by model."""
    return {
        "account": account.account,
        "capacity": account.capacity,
        "used": account.used,
        # What a plan is still owed by its victims is their promise until they are gone, and counted once.
        "promised": account.promised - account.liens,
        "unrealised": account.unrealised,
        "available": account.available,
        "left_behind": dict(left_behind),
    }


def server_status(status: ServerStatus, *, operator: bool) -> dict[str, Any]:
    """Accounts, host tier and models, without what changes by itself (the uptime)."""
    tier = status.host_tier
    return {
        "accounts": [account_status(one, status.left_behind.get(one.account, {})) for one in status.accounts],
        "host_cache": {"budget": tier.budget, "used": tier.used, "idle": tier.idle},
        "models": [model_status(model, operator=operator) for model in status.models],
        "slow_hooks": [asdict(slow) for slow in status.slow_hooks],
    }


def explanation(one: Explanation) -> dict[str, Any]:
    """Why a model is where it is. ``at`` is seconds since 1970, sizes are bytes."""
    left = one.departure
    return {
        "model": one.model,
        "residency": one.residency.value,
        "explanation": list(one.sentences),
        "departure": None if left is None else {**asdict(left), "cause": _value(left.cause)},
        "would_have_kept_it": list(one.keep),
        "parks": one.parks,
        "why_not_parked": one.why_not_parked,
        "decisions": [decision(entry) for entry in one.decisions],
    }


def decision(one: Decision) -> dict[str, Any]:
    """One entry of the decision ring. ``at`` is seconds since 1970, sizes are bytes."""
    return {
        "at": one.at,
        "model": one.model,
        "action": one.action,
        "reason": one.reason,
        "cause": _value(one.cause),
        "needed_bytes": one.needed_bytes,
        "promised_bytes": one.promised_bytes,
        "freed_bytes": one.freed_bytes,
        "victims": list(one.victims),
    }


def _value(cause: Cause | None) -> str | None:
    return None if cause is None else cause.value


def _failure(failure: LoadFailure | None, operator: bool) -> dict[str, Any] | None:
    if failure is None:
        return None
    shown = {"details": failure.details} if operator and failure.details else {}
    return {
        "code": failure.code,
        "error_class": failure.error_class,
        "message": failure.message if operator else failure.public,
        "attempts": failure.attempts,
        "permanent": failure.permanent,
        **shown,
    }
