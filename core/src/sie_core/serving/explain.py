"""Why a model is where it is, from what the registry keeps: its status and the ring of decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

from attrs import frozen

from sie_core.errors import EngineDied
from sie_core.types import Cause, Decision, Residency, WakeCheck
from sie_core.units import format_bytes

if TYPE_CHECKING:
    from sie_core.memory.ledger import AccountState
    from sie_core.residency import HostTierStatus, LoadFailure, ModelStatus

__all__ = ["Departure", "Explanation", "Facts", "explain"]

_HOST: Final = "host"
_LEFT: Final[Mapping[str, Literal["parked", "unloaded", "dropped"]]] = {
    "park": "parked",
    "unload": "unloaded",
    "drop": "dropped",
}
_NOT_PARKED: Final = ("not parked", "park failed")
_AT_HAND: Final = (Residency.RESIDENT, Residency.DRAINING)
_SHOWN: Final = 10
_GAVE_BACK: Final = 0.9
"""Of what was promised; below this the shortfall is worth a sentence."""


@frozen
class Facts:
    """What an explanation is made from. ``decisions``: the ring, oldest first; ``accounts`` by name."""

    status: ModelStatus
    decisions: Sequence[Decision]
    host_tier: HostTierStatus
    accounts: Mapping[str, AccountState]
    why_not_parked: str | None


@frozen
class Departure:
    """The last time that a model left its device, or that its copy was dropped. Sizes in bytes, ``at`` since 1970.

    ``for_model``: whose room it made; ``needed_bytes``: what that one was short of; ``promised_bytes`` and
    ``freed_bytes``: what the model was charged for, and what was measured to come free.
    """

    at: float
    how: Literal["parked", "unloaded", "dropped"]
    reason: str
    cause: Cause | None = None
    for_model: str | None = None
    needed_bytes: int = 0
    promised_bytes: int = 0
    freed_bytes: int = 0
    why_not_parked: str | None = None


@frozen
class Explanation:
    """``sentences`` tell it to people; ``keep`` says what would have kept the model, the surest first.

    ``parks``: whether an eviction would park it now; ``None`` while it has no engine. ``decisions``: the newest ones
    about it, oldest first.
    """

    model: str
    residency: Residency
    sentences: tuple[str, ...]
    departure: Departure | None
    keep: tuple[str, ...]
    parks: bool | None
    why_not_parked: str | None
    decisions: tuple[Decision, ...]


def explain(facts: Facts) -> Explanation:
    """Why the model was evicted, what it freed against what was promised, and what would have kept it."""
    status = facts.status
    mine = [one for one in facts.decisions if one.model == status.name or status.name in one.victims]
    departure = _departure(status.name, mine)
    parks = facts.why_not_parked is None if status.residency in _AT_HAND else None
    why_not = _why_not(facts, departure)
    return Explanation(
        model=status.name,
        residency=status.residency,
        sentences=(*_now(facts, parks), *_refused(status, mine), *_then(departure)),
        departure=departure,
        keep=tuple(_keep(facts, departure)) if departure is not None else (),
        parks=parks,
        why_not_parked=why_not,
        decisions=tuple(mine[-_SHOWN:]),
    )


# --- what happened -----------------------------------------------------------------------------------


def _departure(model: str, mine: Sequence[Decision]) -> Departure | None:
    """The last departure, with what led to it: everything since the departure before."""
    ends = [position for position, one in enumerate(mine) if one.model == model and one.action in _LEFT]
    if not ends:
        return None
    last, before = mine[ends[-1]], ends[-2] + 1 if len(ends) > 1 else 0
    since = mine[before : ends[-1]]
    how = _LEFT[last.action]
    # An eviction of the model's own making names others as its victims; one by circumstance names none.
    evictions = [one for one in reversed(since) if one.action == "evict" and (model in one.victims or not one.victims)]
    # One that was called off led to nothing: the model left for another cause.
    evicted = evictions[0] if evictions and evictions[0].cause is last.cause else None
    not_parked = next((one for one in reversed(since) if one.model == model and one.action in _NOT_PARKED), None)
    return Departure(
        at=last.at,
        how=how,
        reason=evicted.reason if evicted is not None else last.reason,
        cause=last.cause,
        for_model=evicted.model if evicted is not None and model in evicted.victims else None,
        needed_bytes=evicted.needed_bytes if evicted is not None else 0,
        promised_bytes=last.promised_bytes,
        freed_bytes=last.freed_bytes,
        why_not_parked=not_parked.reason if not_parked is not None and how == "unloaded" else None,
    )


def _why_not(facts: Facts, departure: Departure | None) -> str | None:
    """Why the model does not park: asked of its engine where it has one, else what was said when it left."""
    if facts.status.residency in _AT_HAND:
        return facts.why_not_parked
    if not facts.host_tier.budget:
        return "there is no host tier (memory.host_cache_bytes)"
    if not facts.status.spec.host_offload:
        return "its configuration says host_offload: false"
    return departure.why_not_parked if departure is not None else None


def _now(facts: Facts, parks: bool | None) -> Iterator[str]:
    status = facts.status
    where = f" on {', '.join(status.devices)}" if status.residency in _AT_HAND and status.devices else ""
    held = [
        f"{format_bytes(nbytes)} of {kind} memory"
        for kind, nbytes in (("device", status.device_bytes), ("host", status.host_bytes))
        if nbytes
    ]
    state = "has failed" if status.residency is Residency.FAILED else f"is {status.residency}"
    yield f"{status.name} {state}{where}" + (f" and charged {' and '.join(held)}." if held else ".")
    if status.failure is not None:
        yield _went_wrong(status.failure)
    if status.pinned:
        yield "It is pinned: nothing evicts it but a request, a changed configuration and the end of the server."
    elif parks:
        cost = f" (the last wake took {status.wake_s:.3f} s)" if status.wake_s is not None else ""
        yield f"An eviction would park it{cost}."
        if status.wake_checked is not None:
            yield _wakes(status, status.wake_checked)
    elif parks is False:
        yield f"An eviction would unload it: {facts.why_not_parked}."


def _wakes(status: ModelStatus, checked: WakeCheck) -> str:
    setting = status.spec.wake_check
    if checked is WakeCheck.NEVER and setting is not WakeCheck.NEVER:
        return "Its wakes are unchecked: its engine has no probe."
    which = {
        WakeCheck.ALWAYS: "Every wake is", WakeCheck.FIRST: "Only its first wake is", WakeCheck.NEVER: "No wake is"
    }  # fmt: skip
    cost = "" if status.wake_check_s is None else f" (the last check took {status.wake_check_s:.3f} s of the wake)"
    return f"{which[checked]} checked, as wake_check: {setting} has it{cost}."


def _refused(status: ModelStatus, mine: Sequence[Decision]) -> Iterator[str]:
    """A refusal that nothing has followed since: why the model is not resident."""
    about = [one for one in mine if one.model == status.name]
    if about and about[-1].action == "refused" and status.residency not in _AT_HAND:
        yield f"The last request to bring it in was refused: {about[-1].reason}."


def _went_wrong(failure: LoadFailure) -> str:
    what = f"Loading failed ({failure.error_class})"
    if failure.error_class == EngineDied.__name__:
        what = "Its engine died" if failure.attempts == 1 else f"Its engine died, {failure.attempts} times in a row"
    again = "It is not tried again" if failure.permanent else "It will be tried again"
    return f"{what}: {failure.message}. {again}."


def _then(departure: Departure | None) -> Iterator[str]:
    if departure is None:
        yield "It has not been evicted, parked or unloaded, as far back as decisions are kept."
        return
    if departure.for_model is not None:
        needed = f", which was {format_bytes(departure.needed_bytes)} short" if departure.needed_bytes else ""
        yield f"It was {departure.how} to make room for {departure.for_model}{needed}."
    else:
        yield f"It was {departure.how}: {departure.reason}."
    if departure.why_not_parked is not None:
        yield f"It was unloaded rather than parked: {departure.why_not_parked}."
    if departure.promised_bytes:
        freed, promised = departure.freed_bytes, departure.promised_bytes
        short = " That is less than it was charged for." if freed < _GAVE_BACK * promised else ""
        yield f"It freed {format_bytes(freed)} of the {format_bytes(promised)} that were promised to it.{short}"


# --- what would have helped ------------------------------------------------------------------------------


def _keep(facts: Facts, departure: Departure) -> Iterator[str]:
    status, tier = facts.status, facts.host_tier
    if departure.how == "dropped":
        yield from _keep_copy(facts, departure)
        return
    if departure.for_model is not None:
        yield f"pin it (`sie pin {status.name}`, or pinned: true): then {departure.for_model} has to wait or is refused"
        if departure.needed_bytes:
            rooms = ", ".join(
                f"{account} has {format_bytes(facts.accounts[account].capacity)}"
                for account in status.devices or tuple(facts.accounts)
                if account in facts.accounts and account != _HOST
            )
            yield (
                f"{format_bytes(departure.needed_bytes)} more on the device ({rooms}): a larger one, a smaller dtype, "
                "or less runtime_headroom"
            )
    elif departure.cause is Cause.IDLE:
        seconds = f" (it is {status.spec.idle_evict_s:g} s)" if status.spec.idle_evict_s is not None else ""
        yield f"a longer idle_evict_s{seconds}, or none"
    elif departure.cause is Cause.MEMORY_PRESSURE:
        yield "less memory taken by other programs, or a larger memory.device_reserve set aside for them"
    if departure.how == "unloaded" and departure.why_not_parked is not None:
        if not tier.budget:
            yield "a host tier (memory.host_cache_bytes): it would have been parked and come back in a moment"
        elif not status.spec.host_offload:
            yield "host_offload: true: it would have been parked and come back in a moment"
        else:
            yield f"to be parked, what stood in the way has to go: {departure.why_not_parked}"
    elif departure.how == "unloaded" and departure.for_model is not None and not tier.budget:
        yield "a host tier (memory.host_cache_bytes): it would have been parked and come back in a moment"


def _keep_copy(facts: Facts, departure: Departure) -> Iterator[str]:
    tier = facts.host_tier
    if departure.cause is Cause.TIER_FULL:
        more = f" of {format_bytes(tier.budget + departure.freed_bytes)}" if departure.freed_bytes else ""
        yield f"a memory.host_cache_bytes{more} instead of {format_bytes(tier.budget)}"
    elif departure.cause in (Cause.HOST_SHORT, Cause.HOST_WAITS):
        yield "more host memory, less of it taken by other programs, or a smaller memory.host_floor"
