"""What parking an engine takes on the host, and what stays there.

The memory saver keeps a pinned copy of every weight; the KV cache is given up. Up to its release 0.0.9.post1 the copy
stays after a resume; later ones let it go, unless ``TMS_RETAIN_CPU_BACKUP=1`` is in the engine's environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from sie_core import Declined, Engine, HostOffload, HostResidue, TransitionContext

from sie_adapters_sglang._engine import SglangEngine
from sie_adapters_sglang._flags import version_key
from sie_adapters_sglang._gpu import used_on

__all__ = ["announce", "keeps_copy", "offload", "restore"]

_LETS_GO = version_key("0.0.10")
_FREED = 0.95
_BACK_S, _STILL_S, _POLL_S = 20.0, 2.0, 0.05
"""After a release: how long memory may take to come back, how long it may stand still, how often to look."""
_SPARE_S = 2.0


def keeps_copy(memory_saver: str | None, retain: str | None) -> bool:
    """Whether the copy of the weights survives a wake. ``retain``: the engine's ``TMS_RETAIN_CPU_BACKUP``."""
    if memory_saver is None:
        return False
    return version_key(memory_saver) < _LETS_GO or retain == "1"


def announce(engine: Engine) -> int | Declined | None:
    """Bytes of the copy."""
    if not isinstance(engine, SglangEngine):
        return None
    kinds = {account.partition(":")[0] for account in engine.devices}
    if not engine.plan.options.park:
        return Declined("its options say park: false")
    if "cpu" in kinds:
        return Declined("it runs on the CPU: parking it would free nothing")
    if "cuda" in kinds and not engine.plan.parks:
        return Declined("it was started when it could not be parked: unload it, and the next start is one that can")
    if "cuda" in kinds and not engine.saver:
        return Declined("torch-memory-saver is not installed beside its SGLang: a release would free nothing")
    if engine.usage is None:
        return Declined("the engine does not say how large its weights are")
    return engine.usage.weights * len(engine.devices)


def offload(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    """Park it. Raises TransitionError."""
    if not isinstance(engine, SglangEngine):
        return None
    copied = engine.usage.weights * len(engine.devices) if engine.usage is not None else 0
    before = _levels(engine)
    engine.parking.park(ctx)
    _come_back(engine, before, ctx)
    engine.emulated.give_back()
    context = engine.context_bytes
    return HostOffload(host_bytes=copied, retained=dict.fromkeys(engine.devices, context))


def _levels(engine: SglangEngine) -> dict[str, int]:
    """Bytes in use, as the driver says: by the engine where it tells one from the other, else by all."""
    found = {}
    for account, held in engine.memory().devices.items():
        kind, _, number = account.partition(":")
        level = (held if held is not None else used_on(int(number or 0))) if kind == "cuda" else None
        if level is not None:
            found[account] = level
    return found


def _come_back(engine: SglangEngine, before: Mapping[str, int], ctx: TransitionContext) -> None:
    """A release may return before the memory is back: wait until it is, or until no more comes.

    What was not there by then stays booked, and the engine would pass for one that frees less than it says.
    """
    owed = int(_FREED * engine.usage.total) if engine.usage is not None else 0
    now = heard = time.monotonic()
    until = min(now + _BACK_S, ctx.deadline - _SPARE_S)
    lowest = before
    while now < until and now - heard < _STILL_S:
        level = _levels(engine)
        if all(before[account] - level[account] >= owed for account in before.keys() & level.keys()):
            return
        if any(level[account] < lowest[account] for account in lowest.keys() & level.keys()):
            lowest, heard = level, now
        if engine.ended_within(_POLL_S):
            return
        now = time.monotonic()


def restore(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    """Wake it. Raises TransitionError, and on an emulated device DeviceOutOfMemory."""
    if not isinstance(engine, SglangEngine):
        return None
    engine.emulated.take(ctx)
    engine.parking.wake(ctx)
    env = {**os.environ, **engine.plan.options.env}
    if not keeps_copy(engine.plan.installed.memory_saver, env.get("TMS_RETAIN_CPU_BACKUP")):
        return HostResidue()
    copied = engine.usage.weights * len(engine.devices) if engine.usage is not None else 0
    return HostResidue(host_bytes=copied, droppable=False)
