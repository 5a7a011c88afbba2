"""``python -m sie_testing.simulate``: many seeds of the simulation, on several cores; the first that fails is shown."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from sie_testing.simulation import SCENES, SimulationFailed, interrupt, simulate

__all__ = ["main"]

_CHUNK = 25


class Share(NamedTuple):
    """What a worker process made of its seeds."""

    runs: int
    looks: int
    counts: Counter[str]
    failures: list[str]


def _work(seeds: range, steps: int) -> Share:
    counts: Counter[str] = Counter()
    failures, looks = [], 0
    for seed in seeds:
        try:
            report = simulate(seed, steps=steps)
        except SimulationFailed as error:
            failures.append(str(error))
        except Exception as error:  # a fault of the simulation itself must name its seed too
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
        else:
            counts.update(report.counts)
            looks += report.looks
    return Share(len(seeds), looks, counts, failures)


def _shares(seeds: range, steps: int, jobs: int) -> Iterator[Share]:
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    if jobs == 1:
        yield from (_work(chunk, steps) for chunk in chunks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_work, chunks, [steps] * len(chunks))


def _lines(counts: Counter[str]) -> Iterable[str]:
    return (f"  {number:>9,}  {what}" for what, number in sorted(counts.items()))


def _interrupt(scenes: list[str], seeds: range) -> int:
    try:
        stood = sum(interrupt(scene, seed=seed) for seed in seeds for scene in scenes)
    except SimulationFailed as error:
        print(error)
        return 1
    print(f"{len(seeds)} seeds of {len(scenes)} scenes, {stood:,} cancellations, nothing was lost")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m sie_testing.simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="how many runs (default 500)")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--steps", type=int, default=80, help="at most so many requests a run (default 80)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--keep-going", action="store_true", help="show every seed that fails, not only the first")
    parser.add_argument("--trace", action="store_true", help="show what happened in the run (one seed)")
    parser.add_argument(
        "--scene", choices=[*SCENES, "all"], help="instead: cancel a transition at each await of this scene, in turn"
    )
    options = parser.parse_args(argv)
    seeds = range(options.first, options.first + options.seeds)
    if options.scene is not None:
        return _interrupt(list(SCENES) if options.scene == "all" else [options.scene], seeds)
    if options.trace and len(seeds) == 1:
        print("\n".join(simulate(seeds[0], steps=options.steps).trace))
        return 0
    began, done, looks, failed = time.monotonic(), 0, 0, 0
    counts: Counter[str] = Counter()
    for share in _shares(seeds, options.steps, options.jobs):
        done, looks = done + share.runs, looks + share.looks
        counts.update(share.counts)
        for failure in share.failures:
            failed += 1
            print(failure, flush=True)
        if done // 1000 > (done - share.runs) // 1000:
            print(f"{done:,} of {len(seeds):,} runs, {failed} failed", file=sys.stderr, flush=True)
        if failed and not options.keep_going:
            break
    seconds = time.monotonic() - began
    print("\n".join(_lines(counts)))
    print(f"{done:,} runs, {looks:,} times all rules checked, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
