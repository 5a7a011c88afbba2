"""Whether the answer of a blocking hook, an adapter or an engine can be used, in words that its author can act on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from sie_core.adapter import AdmissionReserve, Declined, DeviceNeed, Engine, HostOffload, HostResidue, MemoryReport
from sie_core.types import Capabilities

__all__ = ["problem_of_engine", "problem_with"]


def problem_with(hook: str, answer: object) -> str | None:
    """What is wrong with an answer that is not ``None``; ``None``: nothing."""
    check = _CHECKS.get(hook)
    return None if check is None else check(answer)


def problem_of_engine(method: str, answer: object) -> str | None:
    """The same for a method of an adapter or an engine, where ``None`` is an answer like any other."""
    check = _ENGINE_CHECKS.get(method)
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


def _memory(answer: object) -> str | None:
    if not isinstance(answer, MemoryReport):
        return _wrong_kind(answer, "a MemoryReport", or_none=False)
    if not isinstance(answer.devices, Mapping):
        return f"returned devices={answer.devices!r}: give the bytes by account"
    if not isinstance(answer.figures, Mapping):
        return f"returned figures={answer.figures!r}: give the figures by name"
    for account, nbytes in answer.devices.items():
        problem = None if nbytes is None else _not_bytes(f"devices[{account!r}]", nbytes)
        if problem:
            return problem
    return _not_bytes("host", answer.host)


def _engine(answer: object) -> str | None:
    return None if isinstance(answer, Engine) else _wrong_kind(answer, "an Engine", or_none=False)


def _capabilities(answer: object) -> str | None:
    return None if answer is None or isinstance(answer, Capabilities) else _wrong_kind(answer, "Capabilities")


def _probe(answer: object) -> str | None:
    return None if answer is None or isinstance(answer, bytes) else _wrong_kind(answer, "bytes")


def _alive(answer: object) -> str | None:
    return None if isinstance(answer, bool) else _wrong_kind(answer, "True or False", or_none=False)


def _freed(answer: object) -> str | None:
    return _not_bytes("", answer)


def _wrong_kind(answer: object, allowed: str, *, or_none: bool = True) -> str:
    return f"returned {type(answer).__name__}: return {allowed}{' or None' if or_none else ''}"


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
_ENGINE_CHECKS: Mapping[str, Callable[[object], str | None]] = {
    "load": _engine,
    "describe": _capabilities,
    "memory": _memory,
    "probe": _probe,
    "alive": _alive,
    "drop_backup": _freed,
}
