"""The measures of generation: what passing on an engine's pieces costs, an idle engine, a server that is killed."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Sequence
from functools import partial

import contestants
import killing
import launched
from attrs import evolve, frozen
from results import Ratio, Row, alternate, percentile
from stage import Bench
from streams import Seen, Wanted, drive

__all__ = ["idle", "killed", "relay", "streaming"]

STREAMS = 32
STEP_S = 0.02
"""Fifty tokens a second in each stream, as a mid-sized model gives them."""
LONG = 15
"""By how much answers at full speed are longer: they are to measure pieces, not requests."""
_WARM_S = 1.0
_SETTLE_S = 3.0


@frozen
class Turn:
    """What the client saw, and what the passing on took of a processor."""

    seen: Seen
    cpu_s: float

    @property
    def cpu_us(self) -> float:
        """Microseconds a piece."""
        return self.cpu_s / self.seen.pieces * 1e6


# --- passing on --------------------------------------------------------------------------------------------


def streaming(bench: Bench) -> list[Row]:
    """32 streams of 50 tokens a second each: through SIE, and straight from the engine's own port."""
    pieces = bench.sizes.pieces
    wanted = Wanted(0, STREAMS, _seconds(bench), pieces, spread_s=pieces * STEP_S, pause_s=2 * STEP_S)
    with launched.serving(step_s=STEP_S) as serving:
        ours = _ready(serving.server.port, serving.server_cpu_s, wanted)
        theirs = _ready(serving.engine_port(), serving.engine_cpu_s, wanted)
        mine, direct = alternate(bench.pairs, ours, theirs)
    first, plain = ([statistics.median(turn.seen.first_ms) for turn in turns] for turns in (mine, direct))
    added = statistics.median([a - b for a, b in zip(first, plain, strict=True)])
    every, without = ([*itertools.chain(*(turn.seen.first_ms for turn in turns))] for turns in (mine, direct))
    of = f"{STREAMS} streams at {1 / STEP_S:.0f} tokens a second"
    return [
        Row(
            f"{of}: added time to the first token, p50 of {len(every)}",
            f"{added:.1f} ms ({statistics.median(first):.1f} ms)",
            f"the engine's own port {statistics.median(plain):.1f} ms",
            "",
            "≤ 5 ms",
            added <= 5,
        ),
        Row(
            f"{of}: time to the first token, p99",
            f"{percentile(every, 99):.1f} ms",
            f"the engine's own port {percentile(without, 99):.1f} ms",
        ),
        Row(
            f"{of}: pieces a second",
            f"{_rate(mine):.0f}/s",
            f"the engine's own port {_rate(direct):.0f}/s",
            str(_rates(mine, direct)),
        ),
        Row(f"{of}: CPU time of the server a piece", f"{_cpu_us(mine):.0f} µs", ""),
    ]


def relay(bench: Bench) -> list[Row]:
    """An engine that emits as fast as it is read, 32 streams: through SIE, and through relays that only pass bytes."""
    wanted = Wanted(0, STREAMS, _seconds(bench), bench.sizes.pieces * LONG)
    with launched.serving() as serving:
        engine = serving.engine_port()
        with contestants.bare_relay("raw", engine) as raw, contestants.bare_relay("httpx", engine) as plain:
            takes = [
                _ready(serving.server.port, serving.server_cpu_s, wanted),
                *(_ready(bare.port, bare.cpu_seconds, wanted) for bare in (raw, plain)),
                _ready(engine, serving.engine_cpu_s, wanted),
            ]
            mine, *others, direct = alternate(bench.pairs, *takes)
    names = ("bare relay of bytes", "bare relay with httpx")
    rows = [_beside(mine, turns, name, least) for turns, name, least in zip(others, names, (0.5, None), strict=True)]
    busy = max(turn.seen.cpu_s / turn.seen.seconds for turn in itertools.chain(mine, *others))
    return [
        *rows,
        Row(
            f"CPU time a piece, {STREAMS} streams at full speed",
            f"{_cpu_us(mine):.1f} µs",
            "; ".join(f"{name} {_cpu_us(turns):.1f} µs" for turns, name in zip(others, names, strict=True)),
            str(Ratio.of([turn.cpu_us for turn in mine], [turn.cpu_us for turn in others[0]])),
        ),
        Row(
            "what the engine and the client would do",
            "",
            f"{_rate(direct):.0f} pieces/s with nothing in between; the client takes {busy:.0%} of a core at most",
        ),
    ]


def _beside(mine: Sequence[Turn], others: Sequence[Turn], name: str, least: float | None) -> Row:
    ratio = _rates(mine, others)
    return Row(
        f"pieces a second, {STREAMS} streams at full speed",
        f"{_rate(mine):.0f}/s",
        f"{name} {_rate(others):.0f}/s",
        str(ratio),
        "" if least is None else f"≥ {least} × {name}",
        None if least is None else ratio.median >= least,
    )


def _take(port: int, cpu_s: Callable[[], float], wanted: Wanted) -> Turn:
    before = cpu_s()
    seen = drive(evolve(wanted, port=port))
    return Turn(seen, cpu_s() - before)


def _ready(port: int, cpu_s: Callable[[], float], wanted: Wanted) -> Callable[[], Turn]:
    """A contestant that has had a short turn already: nothing is done for the first time in the next."""
    _take(port, cpu_s, evolve(wanted, seconds=min(_WARM_S, wanted.seconds), spread_s=0.0))
    return partial(_take, port, cpu_s, wanted)


def _seconds(bench: Bench) -> float:
    return min(bench.seconds, bench.sizes.turn_s)


def _rate(turns: Sequence[Turn]) -> float:
    return statistics.median([turn.seen.rate for turn in turns])


def _rates(mine: Sequence[Turn], others: Sequence[Turn]) -> Ratio:
    return Ratio.of([turn.seen.rate for turn in mine], [turn.seen.rate for turn in others])


def _cpu_us(turns: Sequence[Turn]) -> float:
    return statistics.median([turn.cpu_us for turn in turns])


# --- its life ----------------------------------------------------------------------------------------------


def idle(bench: Bench) -> list[Row]:
    """A real SGLang engine that has nothing to do: what it takes of a processor."""
    if bench.sglang is None:
        print("  skipped: there is no SGLang here; --sglang-python names an interpreter that has it", flush=True)
        return []
    with launched.serving(python=bench.sglang) as serving:
        serving.ask()
        pause = threading.Event()
        pause.wait(_SETTLE_S)
        before = serving.engine_cpu_s(), serving.server_cpu_s()
        pause.wait(bench.sizes.idle_s)
        after = serving.engine_cpu_s(), serving.server_cpu_s()
    engine, server = ((b - a) / bench.sizes.idle_s for a, b in zip(before, after, strict=True))
    return [
        Row(
            f"CPU of an idle engine, SGLang {serving.version}, {bench.sizes.idle_s:.0f} s",
            f"{engine:.1%} of a core",
            f"the server itself {server:.1%}",
            "",
            "≤ 2% of a core",
            engine <= 0.02,
        )
    ]


def killed(bench: Bench) -> list[Row]:
    """A server is killed while its engine runs: when the engine's processes are told, and when all is free again."""
    rows = []
    for python in (None, bench.sglang) if bench.sglang else (None,):
        with launched.serving(step_s=STEP_S, python=python) as serving:
            end = killing.kill(serving)
        engine = "the stand-in" if python is None else f"SGLang {serving.version}"
        ports = "1 port" if end.ports == 1 else f"{end.ports} ports"
        what = f"server killed, {engine} with {end.processes} processes and {ports}"
        rows += [
            Row(f"{what}: until all are told", f"{end.told_s:.2f} s", "", "", "≤ 1 s", end.told_s <= 1),
            Row(f"{what}: until all ports are free", f"{end.free_s:.2f} s", "", "", "≤ 5 s", end.free_s <= 5),
            Row(f"{what}: until all are gone", f"{end.gone_s:.2f} s", ""),
        ]
    return rows
