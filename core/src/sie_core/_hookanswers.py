"""Whether a blocking hook's answer can be used, told in words that its author can act on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from sie_core.adapter import AdmissionReserve, Declined, DeviceNeed, HostOffload, HostResidue

__all__ = ["problem_with"]


def problem_with(hook: str, answer: object) -> str | None:
    """What is wrong with an answer that is not ``None``; ``None``: nothing."""
    check = _CHECKS.get(hook)
    return None if check is None else check(answer)


def _reserve(answer: object) -> str | None:
    if not isinstance(answer, AdmissionReserve):
        return _wrong_kind(answer, "an AdmissionReserve")
    ranks = answer.ranks
    if not isinstance(ranks, tuple | list) or not all(isinstance(need, DeviceNeed) for need in ranks) or not ranks:
        return f"returned ranks={ranks!r}: give one DeviceNeed for each device, one at least"
    for rank, need in enumerate(ranks):
        for name in ("min_bytes", "want_bytes", "context_bytes", "headroom_bytes"):
            problem = _not_bytes(f"ranks[{rank}].{name}", getattr(need, name))
            if problem:
                return problem
    return _not_bytes("host_bytes", answer.host_bytes) or _not_bytes("host_load_bytes", answer.host_load_bytes)


def _announcement(answer: object) -> str | None:
    if isinstance(answer, Declined):
        return None
    if not isinstance(answer, Integral):
        return _wrong_kind(answer, "the number of bytes as an int, Declined(reason)")
    return _not_bytes("", answer)


def _offload(answer: object) -> str | None:
    if not isinstance(answer, HostOffload):
        return _wrong_kind(answer, "a HostOffload")
    if not isinstance(answer.retained, Mapping):
        return f"returned retained={answer.retained!r}: give the bytes by account"
    for account, nbytes in answer.retained.items():
        problem = _not_bytes(f"retained[{account!r}]", nbytes)
        if problem:
            return problem
    return _not_bytes("host_bytes", answer.host_bytes)


def _residue(answer: object) -> str | None:
    if not isinstance(answer, HostResidue):
        return _wrong_kind(answer, "a HostResidue")
    return _not_bytes("host_bytes", answer.host_bytes)


def _wrong_kind(answer: object, allowed: str) -> str:
    return f"returned {type(answer).__name__}: return {allowed} or None"


def _not_bytes(what: str, value: Any) -> str | None:
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0:
        return None
    return f"returned {what}{'=' if what else ''}{value!r}: give bytes as an int, 0 or more"


_CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "admission_reserve": _reserve,
    "host_offload_bytes": _announcement,
    "offload_to_host": _offload,
    "restore_from_host": _residue,
}
