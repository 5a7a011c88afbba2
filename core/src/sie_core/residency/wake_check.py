"""What an engine has to show after a wake: that it lives, and by the model's ``wake_check`` that it is unharmed.

It is unharmed if it answers its fixed input as it did before it was first parked. That costs about one encode, which is
nothing beside the wake of a large model and more than the wake of a small one: ``auto`` measures both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_core.errors import WakeCheckFailed
from sie_core.residency.roster import log
from sie_core.types import WakeCheck

if TYPE_CHECKING:
    from sie_core.residency.lifecycle import Lifecycle
    from sie_core.residency.record import Record, Seat

__all__ = ["take_baseline", "verify_wake", "wake_checked"]

_CHEAP = 0.1
"""``auto`` checks every wake of a model whose check takes less than this share of the wake itself."""


def wake_checked(record: Record) -> WakeCheck | None:
    """Which wakes of the model's engine are really checked; ``None``: it does not park, or that is not known yet."""
    seat, setting = record.seat, record.spec.wake_check
    if seat is None or not isinstance(seat.offload, int):
        return None
    if setting is WakeCheck.NEVER:
        return setting
    if not seat.probed:
        return None
    if seat.baseline is None:
        return WakeCheck.NEVER
    return seat.auto if setting is WakeCheck.AUTO else setting


async def take_baseline(life: Lifecycle, record: Record, seat: Seat) -> None:
    """Have an engine that may be parked answer its fixed input, once, unless that is never looked at."""
    if seat.probed or not isinstance(seat.offload, int) or record.spec.wake_check is WakeCheck.NEVER:
        return
    timeout = life.roster.settings.close_timeout_s
    ctx = life.context(record, timeout)
    seat.baseline = await seat.worker.call(seat.engine.probe, ctx, hook="probe", timeout=timeout)
    seat.probed = True
    if seat.baseline is None:
        log.info("%s: wakes unchecked: its engine has no probe", record.name)


async def verify_wake(life: Lifecycle, record: Record, seat: Seat) -> None:
    """Ask a woken engine what it has to show. Raises WakeCheckFailed."""
    timeout, clock = life.roster.settings.close_timeout_s, life.roster.now
    seat.wakes += 1
    if not await seat.worker.call(seat.engine.alive, hook="alive", timeout=timeout):
        raise WakeCheckFailed(f"the engine of model {record.name!r} does not answer after its wake")
    baseline = seat.baseline
    if baseline is None or not _due(record.spec.wake_check, seat):
        return
    ctx, engine = life.context(record, timeout), seat.engine

    def answers_as_before() -> bool:
        answer = engine.probe(ctx)
        return answer is not None and bool(engine.probe_matches(baseline, answer))

    woken_at = clock()
    if not await seat.worker.call(answers_as_before, hook="wake check", timeout=timeout):
        raise WakeCheckFailed(f"model {record.name!r} does not answer as it did before it was parked")
    _measured(record, seat, wake_s=woken_at - record.admitted_at, check_s=clock() - woken_at)


def _due(setting: WakeCheck, seat: Seat) -> bool:
    if setting is WakeCheck.AUTO:
        return seat.auto is not WakeCheck.FIRST
    return setting is WakeCheck.ALWAYS or (setting is WakeCheck.FIRST and seat.wakes == 1)


def _measured(record: Record, seat: Seat, *, wake_s: float, check_s: float) -> None:
    """The first measurement decides for this engine: if each could change it, noise would end every check in time."""
    seat.check_s = check_s
    if seat.auto is not None:
        return
    seat.auto = WakeCheck.ALWAYS if check_s < _CHEAP * wake_s else WakeCheck.FIRST
    if record.spec.wake_check is WakeCheck.AUTO:
        which = "every wake is checked" if seat.auto is WakeCheck.ALWAYS else "only its first wake was checked"
        log.info("%s: %s: the check took %.4f s, the wake %.4f s", record.name, which, check_s, wake_s)
