"""Pairs of measurements, their ratios, and the table that is made of them."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from attrs import frozen

TABLE_START = "<!-- measured: start -->"
TABLE_END = "<!-- measured: end -->"


@frozen
class Ratio:
    """Ours over theirs: the median of the pairs, with the smallest and the largest beside it."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        return cls(statistics.median(pairs), min(pairs), max(pairs))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@frozen
class Row:
    """One line of the table."""

    measure: str
    ours: str
    theirs: str
    ratio: str = ""
    wanted: str = ""
    met: bool | None = None

    def line(self) -> str:
        verdict = {True: "yes", False: "**no**", None: ""}[self.met]
        return f"| {self.measure} | {self.ours} | {self.theirs} | {self.ratio} | {self.wanted} | {verdict} |"


T = TypeVar("T")


def alternate(rounds: int, *contestants: Callable[[], T]) -> list[list[T]]:
    """Run the contestants one after the other, A B A B …, so that a slow minute of the machine hits them alike."""
    results: list[list[T]] = [[] for _ in contestants]
    for _ in range(rounds):
        for contestant, seen in zip(contestants, results, strict=True):
            seen.append(contestant())
    return results


def machine() -> str:
    """What the figures were measured on, in words that hold no names of hosts or folders."""
    processor = platform.machine()
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "starlette")]
    return (
        f"{os.cpu_count()} cores ({processor}), {psutil.virtual_memory().total / 2**30:.0f} GiB of memory, "
        f"{platform.system()} {platform.machine()}, {', '.join(versions)}"
    )


def write_table(path: Path, rows: Sequence[Row], *, note: str) -> None:
    """Replace what stands between the markers in the page. Raises ValueError if it has none."""
    page = path.read_text(encoding="utf-8")
    head, found_start, rest = page.partition(TABLE_START)
    _, found_end, tail = rest.partition(TABLE_END)
    if not (found_start and found_end):
        raise ValueError(f"{path.name} has no {TABLE_START} … {TABLE_END}")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    table = [
        TABLE_START,
        "",
        f"Measured on {today}: {machine()}. {note}",
        "",
        "| measure | SIE | beside it | ratio, median (least to most) | wanted | met |",
        "|---|---|---|---|---|---|",
        *(row.line() for row in rows),
        "",
        TABLE_END,
    ]
    path.write_text(head + "\n".join(table) + tail, encoding="utf-8")
