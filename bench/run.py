"""Measure SIE beside infinity-emb, the raw model and a bare Starlette. Run it with ``nox -s bench``.

What was measured replaces the same measures in docs/benchmarks.md, and leaves the others there as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import families
import generation
import inner
import soak
import tier
from attrs import evolve
from load import Load, drive
from raw import WINDOW
from results import Ratio, Row, alternate, write_table
from stage import SMALL, Bench, Sizes, absolute
from startup import startup_s

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MIB = 1024 * 1024


# --- the measures ------------------------------------------------------------------------------------------


def latency(bench: Bench) -> list[Row]:
    """One text, one client: the median time of a request."""
    ask = partial(drive, clients=1, seconds=bench.seconds)
    ours, theirs, alone = alternate(
        bench.pairs,
        partial(ask, bench.server("sie")),
        partial(ask, bench.server("infinity")),
        partial(bench.raw().run, 1, bench.seconds),
    )
    ratio = Ratio.of([run.p50_ms for run in ours], [run.p50_ms for run in theirs])
    return [
        Row(
            "one text, 1 client, p50",
            f"{_median(ours, 'p50_ms'):.1f} ms",
            f"infinity {_median(theirs, 'p50_ms'):.1f} ms; raw model {_median(alone, 'p50_ms'):.1f} ms",
            str(ratio),
            "≤ 0.65 × infinity",
            ratio.median <= 0.65,
        )
    ]


def single(bench: Bench) -> list[Row]:
    """One text a request, 32 clients."""
    return _throughput(bench, "one text a request, 32 clients", clients=32, texts=1, peer=1.5, raw=0.85)


def batch(bench: Bench) -> list[Row]:
    """32 texts a request, 4 clients. Wanted: the smaller of both."""
    rows = _throughput(bench, "32 texts a request, 4 clients", clients=4, texts=32, peer=1.2, raw=0.9)
    met = any(row.met for row in rows)  # the smaller of the two is wanted
    return [evolve(row, wanted=f"{row.wanted}, or the other", met=met) if row.wanted else row for row in rows]


def _throughput(bench: Bench, measure: str, *, clients: int, texts: int, peer: float, raw: float) -> list[Row]:
    ask = partial(drive, clients=clients, seconds=bench.seconds, texts_per_request=texts)
    ours, theirs, alone = alternate(
        bench.pairs,
        partial(ask, bench.server("sie")),
        partial(ask, bench.server("infinity")),
        partial(bench.raw().run, WINDOW, bench.seconds),
    )
    rates = [[run.texts_per_s for run in runs] for runs in (ours, theirs, alone)]
    to_peer, to_raw = Ratio.of(rates[0], rates[1]), Ratio.of(rates[0], rates[2])
    mine = f"{statistics.median(rates[0]):.0f} texts/s"
    cpu = [_median(runs, "cpu_s_per_text") * 1e3 for runs in (ours, theirs, alone)]
    to_peer_cpu = Ratio.of(*([run.cpu_s_per_text for run in runs] for runs in (ours, theirs)))
    return [
        Row(
            measure,
            mine,
            f"infinity {statistics.median(rates[1]):.0f} texts/s",
            str(to_peer),
            f"≥ {peer} × infinity",
            to_peer.median >= peer,
        ),
        Row(
            measure,
            mine,
            f"raw model {statistics.median(rates[2]):.0f} texts/s",
            str(to_raw),
            f"≥ {raw} × raw model",
            to_raw.median >= raw,
        ),
        Row(
            f"CPU time a text, {measure}",
            f"{cpu[0]:.1f} ms",
            f"infinity {cpu[1]:.1f} ms; raw model {cpu[2]:.1f} ms",
            str(to_peer_cpu),
        ),
    ]


def start(bench: Bench) -> list[Row]:
    """`import sie_core` and `sie --help`, each in a fresh process."""
    imported, helped = startup_s()
    return [
        Row("`import sie_core`", f"{imported:.3f} s", "", "", "≤ 0.15 s, no torch", imported <= 0.15),
        Row("`sie --help`", f"{helped:.3f} s", "", "", "≤ 0.3 s, no torch", helped <= 0.3),
    ]


def overhead(bench: Bench) -> list[Row]:
    """What the server itself costs: an engine that answers at once, against an application that does."""
    ours, theirs = alternate(
        bench.pairs,
        partial(drive, bench.server("sie-fake"), clients=32, seconds=bench.seconds, model="fake"),
        partial(drive, bench.server("starlette"), clients=32, seconds=bench.seconds, model="fake"),
    )
    ratio = Ratio.of([run.requests_per_s for run in ours], [run.requests_per_s for run in theirs])
    return [
        Row(
            "requests with a fake engine, 32 clients",
            f"{_median(ours, 'requests_per_s'):.0f}/s",
            f"bare Starlette {_median(theirs, 'requests_per_s'):.0f}/s",
            str(ratio),
            "≥ 0.25 × Starlette",
            ratio.median >= 0.25,
        )
    ]


def memory(bench: Bench) -> list[Row]:
    """Resident memory with MiniLM loaded, after the same texts."""
    server, raw = bench.server("sie"), bench.raw()
    drive(server, clients=32, seconds=bench.seconds)
    raw.run(WINDOW, bench.seconds)
    ours, theirs = server.rss_bytes(), raw.rss_bytes()
    return [
        Row(
            "resident memory with MiniLM",
            f"{ours / MIB:.0f} MiB",
            f"raw process {theirs / MIB:.0f} MiB",
            f"{ours / theirs:.2f}",
            "≤ 1.2 × raw process",
            ours <= 1.2 * theirs,
        )
    ]


def registry(bench: Bench) -> list[Row]:
    """Inside the process: a lease and its release, choosing victims."""
    lease, victims = inner.lease_us(), inner.victims_us()
    return [
        Row("lease and release", f"{lease:.1f} µs", "", "", "≤ 20 µs", lease <= 20),
        Row("choosing victims among 1,000 models", f"{victims:.0f} µs", "", "", "≤ 200 µs", victims <= 200),
    ]


PARTS: dict[str, dict[str, Callable[[Bench], list[Row]]]] = {
    "serving": {f.__name__: f for f in (latency, single, batch, start, overhead, memory, registry)},
    "tier": {f.__name__: f for f in (tier.turns, tier.copies, tier.beside, tier.host_bytes)},
    "families": {f.__name__: f for f in (families.rerank, families.sparse, families.multivector, families.wire)},
    "generation": {f.__name__: f for f in (generation.streaming, generation.relay, generation.idle, generation.killed)},
    "soak": {"soak": soak.soak},
}
"""By table of the page: the measures, in its order."""
LONG = ("soak",)
"""Parts that run only when they are named."""
MEASURES = [name for part in PARTS.values() for name in part]


def _median(runs: Sequence[Load], what: str) -> float:
    values: list[float] = [getattr(run, what) for run in runs]
    return statistics.median(values)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = f"{', '.join(MEASURES)}; or all of a kind: {', '.join(PARTS)} (default: everything but {', '.join(LONG)})"
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"any of: {known}")
    parser.add_argument("--pairs", type=int, default=5, help="how often the contestants take turns (default: 5)")
    parser.add_argument("--seconds", type=float, default=10, help="how long a turn is, but in the tier (default: 10)")
    parser.add_argument("--minutes", type=float, default=60, help="how long the soak is (default: 60)")
    parser.add_argument("--infinity", type=Path, default=Path("infinity_emb"), help="the peer's executable")
    parser.add_argument("--sglang-python", type=absolute, metavar="PATH", help="an interpreter that has SGLang")
    parser.add_argument("--print", action="store_true", help="print what was measured, and leave the page alone")
    parser.add_argument(
        "--small", action="store_true", help="all but serving at a tiny size, to see that they work; only prints"
    )
    options = parser.parse_args(argv)
    if unknown := set(options.measures) - {*MEASURES, *PARTS}:
        parser.error(f"there is no measure {', '.join(sorted(unknown))}; there is {known}")
    return options


def _wanted(asked: Sequence[str]) -> list[tuple[str, str]]:
    """Part and name of the measures that were asked for by their names or their part's, in the order of the page."""
    if not asked:
        return [(part, name) for part in PARTS if part not in LONG for name in PARTS[part]]
    return [(part, name) for part in PARTS for name in PARTS[part] if name in asked or part in asked]


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    notes = {
        "serving": f"Beside infinity-emb 0.0.77; {options.pairs} turns of {options.seconds:.0f} s for each contestant.",
        "tier": f"{options.pairs} turns.",
        "families": f"{options.pairs} turns of {options.seconds:.0f} s for each contestant; infinity-emb 0.0.77.",
        "generation": f"{options.pairs} turns of {options.seconds:.0f} s for each contestant.",
        "soak": f"{options.minutes:.0f} minutes.",
    }
    sizes = SMALL if options.small else Sizes(soak_s=60 * options.minutes)
    for part, name in _wanted(options.measures):
        measure = PARTS[part][name]
        print(f"{name}: {measure.__doc__}", flush=True)
        # Each measure starts what it needs and stops it again, so that nothing else is up while another is taken.
        with contextlib.ExitStack() as stack:
            rows = measure(Bench(options.pairs, options.seconds, options.infinity, sizes, options.sglang_python, stack))
        for row in rows:
            print(f"  {row.line(name)}", flush=True)
        if rows and not options.print and not options.small:
            # At once: what has been measured is not lost when a later measure fails.
            write_table(PAGE, part, {name: rows}, order=[*PARTS[part]], note=notes[part])
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    sys.exit(main())
