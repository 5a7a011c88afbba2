"""An LLM engine and an encoder on a device: what a wake costs beside a reload, and what a park frees."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from attrs import frozen
from gpu_models import CHAT
from gpu_stage import Asker, Stage
from results import Ratio, Row
from sie_core.units import format_bytes

__all__ = ["encoder", "engine"]


@frozen
class Turn:
    """Seconds; ``freed`` in bytes. ``parked`` and ``resident``: a request, to its whole answer.
    ``text``: that of the first one."""

    park: float
    wake: float
    parked: float
    resident: float
    freed: int
    text: str


@frozen
class Seen:
    """``loads``: seconds, the first from files that nobody has read yet, perhaps. ``held``: bytes on the device.

    ``promised``: bytes that the ledger promised to the last launch.
    """

    loads: Sequence[float]
    turns: Sequence[Turn]
    held: int
    promised: int
    texts: frozenset[str]


def engine(stage: Stage, turns: int) -> list[Row]:
    """The LLM engine: its load, its park and its wake."""
    seen = measure(stage, CHAT, turns)
    stage.promise = seen.promised
    return _rows(f"LLM, {stage.models.engine}", seen)


def encoder(stage: Stage, turns: int) -> list[Row]:
    """An encoder in the server's process: its load, its park and its wake."""
    return _rows("encoder", measure(stage, stage.models.encoder_names[0], turns))


def measure(stage: Stage, name: str, turns: int) -> Seen:
    """Load it twice, and in between park it and wake it ``turns`` times, by the routes and by requests."""
    with stage.asker() as asker:
        before, promised = stage.used(), stage.promised()
        loads = [_timed(lambda: asker.act(name, "load"))]
        first = asker.answer(name).text
        held = stage.used() - before
        _turn(stage, asker, name)  # what is taken and set up for the first time
        found = [_turn(stage, asker, name) for _ in range(turns)]
        texts = {first, *(turn.text for turn in found)}  # each with an empty cache
        asker.act(name, "unload")
        loads.append(_timed(lambda: asker.act(name, "load")))
        promised = stage.promised() - promised
        asker.act(name, "park")
    return Seen(loads, found, held, promised, frozenset(texts))


def _turn(stage: Stage, asker: Asker, name: str) -> Turn:
    resident = asker.answer(name).seconds
    held = stage.used()
    park = _timed(lambda: asker.act(name, "park"))
    freed = held - stage.used()
    wake = _timed(lambda: asker.act(name, "wake"))
    asker.act(name, "park")
    parked = asker.answer(name)
    return Turn(park, wake, parked.seconds, resident, freed, parked.text)


def _rows(what: str, seen: Seen) -> list[Row]:
    def median(of: Callable[[Turn], float]) -> float:
        return statistics.median([of(turn) for turn in seen.turns])

    wake, reload = median(lambda turn: turn.wake), seen.loads[-1]
    freed = int(median(lambda turn: turn.freed))
    same = len(seen.texts) == 1
    return [
        Row(f"{what}: first load", f"{seen.loads[0]:.2f} s", ""),
        Row(
            f"{what}: wake",
            _time(wake),
            f"loaded again, its files in memory, {_time(reload)}",
            str(Ratio.of([turn.wake for turn in seen.turns], [reload] * len(seen.turns))),
            "less than a load",
            wake < reload,
        ),
        Row(f"{what}: park", _time(median(lambda turn: turn.park)), ""),
        Row(
            f"{what}: a request that finds it parked",
            _time(median(lambda turn: turn.parked)),
            f"resident {_time(median(lambda turn: turn.resident))}",
        ),
        Row(
            f"{what}: freed by a park, by the driver's count",
            format_bytes(freed),
            f"its load took {format_bytes(seen.held)}",
            f"{freed / max(1, seen.held):.2f}",
        ),
        Row(f"{what}: answers before and after", "the same" if same else "others", "", "", "the same", same),
    ]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
