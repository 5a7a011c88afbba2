"""Measure SIE beside infinity-emb, the raw model and a bare Starlette. Run it with ``nox -s bench``.

Without names it measures everything and writes the table into docs/benchmarks.md; with names it prints those measures.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import contestants
import inner
from attrs import define, evolve, field
from contestants import Server
from load import Load, drive
from raw import WINDOW, RawProcess
from results import Ratio, Row, alternate, write_table
from startup import startup_s

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FAKE = "models: [{name: fake, adapter: fake, options: {vector: constant, dims: 4}}]\n"
MIB = 1024 * 1024


@define
class Bench:
    """What the measures share. ``pairs``: how often the contestants take turns; ``seconds``: how long each turn is."""

    pairs: int
    seconds: float
    infinity: Path
    stack: contextlib.ExitStack = field(factory=contextlib.ExitStack)
    _servers: dict[str, Server] = field(factory=dict)
    _raw: RawProcess | None = None

    def server(self, name: str) -> Server:
        """A server, started when it is first asked for; it idles while others are measured."""
        if name not in self._servers:
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            starts: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
                "sie": lambda: contestants.sie(folder),
                "sie-fake": lambda: contestants.sie(folder, FAKE),
                "infinity": lambda: contestants.infinity(self.infinity),
                "starlette": contestants.bare_starlette,
            }
            self._servers[name] = self.stack.enter_context(starts[name]())
            model = "fake" if name == "sie-fake" else "minilm"
            self._servers[name].warm(model)
            for clients, texts in ((1, 1), (32, 1), (4, 32)) if model == "minilm" else ((32, 1),):
                # What is made or compiled on first use, for each kind of load, is made now.
                drive(self._servers[name], clients=clients, seconds=5, texts_per_request=texts, model=model)
        return self._servers[name]

    def raw(self) -> RawProcess:
        """The model in a process of its own, with no server."""
        if self._raw is None:
            self._raw = self.stack.enter_context(RawProcess(contestants.model_folder()))
        return self._raw


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


MEASURES = {f.__name__: f for f in (latency, single, batch, start, overhead, memory, registry)}


def _median(runs: Sequence[Load], what: str) -> float:
    values: list[float] = [getattr(run, what) for run in runs]
    return statistics.median(values)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"any of: {', '.join(MEASURES)}")
    parser.add_argument("--pairs", type=int, default=5, help="how often the contestants take turns (default: 5)")
    parser.add_argument("--seconds", type=float, default=10, help="how long a turn is (default: 10)")
    parser.add_argument("--infinity", type=Path, default=Path("infinity_emb"), help="the peer's executable")
    options = parser.parse_args(argv)
    if unknown := set(options.measures) - set(MEASURES):
        parser.error(f"there is no measure {', '.join(sorted(unknown))}; there is {', '.join(MEASURES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped, too
    rows: list[Row] = []
    for name in options.measures or MEASURES:
        print(f"{name}: {MEASURES[name].__doc__}", flush=True)
        # Each measure starts what it needs and stops it again, so that nothing else is up while another is taken.
        with contextlib.ExitStack() as stack:
            found = MEASURES[name](Bench(options.pairs, options.seconds, options.infinity, stack))
        for row in found:
            print(f"  {row.line()}", flush=True)
        rows += found
    if not options.measures:
        write_table(
            PAGE,
            rows,
            note=f"Beside infinity-emb 0.0.77; {options.pairs} turns of {options.seconds:.0f} s for each contestant.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
