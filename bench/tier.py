"""The measures of the host tier: what it costs to park a model and to wake it, and whether its book is right."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from http import HTTPStatus

import beside as waking
import copies as copying
import host_bytes as growing
import turns as taking
from results import Ratio, Row, percentile
from sie_core.memory.emulated import EmulatedDevice
from stage import Bench

__all__ = ["beside", "copies", "host_bytes", "turns"]

MIB, GIB = 1024**2, 1024**3
HUGE = 0.9
"""From this share of huge pages on, they count as being had."""


def turns(bench: Bench) -> list[Row]:
    """Evict, wake, answer: two models over HTTP on a device that holds one, one client that asks for them in turn."""
    found = taking.measure(bench.pairs, bench.sizes.requests)
    # The target is set for a short text. Longer ones take longer to encode, and nothing else.
    return [row for n, (kind, rounds) in enumerate(found.items()) for row in _turns(kind, rounds, wanted=n == 0)]


def _turns(kind: str, rounds: taking.Rounds, *, wanted: bool) -> list[Row]:
    waking_ms, plain_ms = ([[one.ms for one in turn] for turn in kind] for kind in (rounds.evicting, rounds.resident))
    every, plain = [*itertools.chain(*waking_ms)], [*itertools.chain(*plain_ms)]
    answers = [*itertools.chain(*rounds.evicting, *rounds.resident)]
    errors = sum(one.status != HTTPStatus.OK for one in answers)
    p50, memcpy = statistics.median(every), statistics.median([*itertools.chain(*rounds.memcpy)])
    floors = [statistics.median(a) + statistics.median(b) for a, b in zip(plain_ms, rounds.memcpy, strict=True)]
    evicting_parts, resident_parts = rounds.parts()
    what = f"evict, wake, answer, {kind}"
    return [
        Row(
            f"{what}: p50 of {len(every)}",
            f"{p50:.1f} ms",
            f"resident model {statistics.median(plain):.1f} ms + memcpy of its weights {memcpy:.1f} ms",
            str(Ratio.of([statistics.median(turn) for turn in waking_ms], floors)),
            "≤ 25 ms" if wanted else "",
            p50 <= 25 if wanted else None,
        ),
        Row(
            f"{what}: p99 of {len(every)}",
            f"{percentile(every, 99):.1f} ms, {errors} errors",
            f"resident model {percentile(plain, 99):.1f} ms",
            "",
            "no error",
            errors == 0,
        ),
        Row(f"{what}: where the time goes (ms, means)", str(evicting_parts), f"resident model: {resident_parts}"),
    ]


def copies(bench: Bench) -> list[Row]:
    """Parks and wakes of a large engine by the plugins' hooks, each beside a plain copy of as many bytes."""
    nbytes = bench.sizes.weights
    device = EmulatedDevice("emulated:0", nbytes)
    engine = copying.BulkEngine(device, nbytes)
    hooks, copy = copying.Hooks(engine, device), copying.Memcpy(engine.nbytes)
    before = engine.answer()
    copying.take_turn(hooks, copy)  # memory that was never touched, code that never ran
    found = [copying.take_turn(hooks, copy) for _ in range(bench.pairs)]
    if not bool((engine.answer() == before).all()):
        raise RuntimeError("the weights are not what they were")
    size = f"{nbytes / GIB:.0f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
    huge = statistics.median([turn.huge for turn in found])

    def row(measure: str, of: Callable[[copying.Turn], tuple[float, float]], least: float | None) -> Row:
        pairs = [of(turn) for turn in found]
        ratio = Ratio.of([theirs for _, theirs in pairs], [ours for ours, _ in pairs])
        rates = [engine.nbytes / GIB / statistics.median([pair[side] for pair in pairs]) for side in (0, 1)]
        return Row(
            f"{measure}, {size}",
            f"{rates[0]:.1f} GiB/s",
            f"memcpy {rates[1]:.1f} GiB/s",
            str(ratio),
            "" if least is None else f"≥ {least} × memcpy",
            None if least is None else ratio.median >= least,
        )

    kept = statistics.median([turn.kept[0] for turn in found]) * 1e3
    fresh = f"first park into fresh memory ({huge:.0%} on huge pages)"
    return [
        row("wake", lambda turn: turn.wake, 0.85),
        row(fresh, lambda turn: turn.first_park, 0.6 if huge >= HUGE else None),
        row("first park into idle memory of the arena", lambda turn: turn.again, 0.6),
        Row(f"park with a kept backup, {size}", f"{kept:.2f} ms", "", "", "≤ 5 ms", kept <= 5),
    ]


def beside(bench: Bench) -> list[Row]:
    """Wakes of MiniLM while another model loads cold on the same device, against wakes with nothing beside them."""
    sizes = bench.sizes
    found = waking.measure(bench.pairs, sizes.wakes, sizes.load_s)
    loading, quiet = ([*itertools.chain(*kind)] for kind in (found.loading, found.quiet))

    def row(percent: float, wanted: str) -> Row:
        ratios = Ratio.of(*([percentile(turn, percent) for turn in kind] for kind in (found.loading, found.quiet)))
        ours, theirs = percentile(loading, percent), percentile(quiet, percent)
        met = ours <= 2 * theirs if wanted else None
        return Row(
            f"wake of MiniLM beside a cold load, {len(loading)} wakes, p{percent:.0f}",
            f"{ours:.1f} ms",
            f"with nothing beside it, {len(quiet)} wakes, {theirs:.1f} ms",
            str(Ratio(ours / theirs, ratios.least, ratios.most)),
            wanted,
            met,
        )

    return [row(50, ""), row(99, "≤ 2 × with nothing beside it")]


def host_bytes(bench: Bench) -> list[Row]:
    """What the ledger charges on the host, against what the server's process and its cgroup really grew by."""
    found = growing.measure(bench.sizes.cycles)
    after = f"charged on the host after {bench.sizes.cycles} parks and wakes of 3 models"
    rows = [_growth(after, "process", [(one.when, one.charged, one.process) for one in found])]
    seen = [(one.when, one.charged, one.cgroup) for one in found if one.cgroup is not None]
    return [*rows, *([_growth(after, "cgroup", seen)] if seen else [])]


def _growth(measure: str, whose: str, seen: Sequence[tuple[str, int, int]]) -> Row:
    """All the looks in one row; the worst counts."""
    worst = max(seen, key=lambda one: abs(one[1] - one[2]) / growing.Growth.allowed(one[1]))
    return Row(
        f"{measure}, against the {whose}",
        "; ".join(f"{when} {charged / MIB:.0f} MiB" for when, charged, _ in seen),
        f"the {whose} grew by {', '.join(f'{grown / MIB:.0f}' for _, _, grown in seen)} MiB",
        f"{worst[1] / worst[2]:.2f}" if worst[2] > 0 else "",
        "within max(5%, 32 MiB)",
        abs(worst[1] - worst[2]) <= growing.Growth.allowed(worst[1]),
    )
