"""Pairs of measurements, their ratios, and the tables that are made of them."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from attrs import frozen

HEAD = (
    "| name | measure | SIE | beside it | ratio, median (least to most) | wanted | met |",
    "|---|---|---|---|---|---|---|",
)


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

    def line(self, name: str) -> str:
        """As a line of the table; ``name`` is that of the measure which gives it."""
        verdict = {True: "yes", False: "**no**", None: ""}[self.met]
        return f"| {name} | {self.measure} | {self.ours} | {self.theirs} | {self.ratio} | {self.wanted} | {verdict} |"


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


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that no more than ``100 - percent`` percent of them exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def write_table(path: Path, part: str, found: Mapping[str, Sequence[Row]], *, order: Sequence[str], note: str) -> None:
    """Put rows into the table between the markers of ``part``, in the place of those that the same measures gave.

    ``found`` has rows by measure. What other measures gave, in this run or an earlier one, stays as it is, with the
    line that says when and on what it was measured. ``order``: the measures there are; rows of others go.
    Raises ValueError if the page has no such markers.
    """
    start, end = f"<!-- measured: {part}, start -->", f"<!-- measured: {part}, end -->"
    page = path.read_text(encoding="utf-8")
    head, found_start, rest = page.partition(start)
    before, found_end, tail = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"{path.name} has no {start} … {end}")
    rows, remarks = _read_table(before)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for name, lines in found.items():
        rows[name] = [row.line(name) for row in lines]
        remarks[name] = f"{today}, {machine()}. {note}"
    names = [name for name in order if name in rows]
    together = {text: [name for name in names if remarks.get(name) == text] for text in remarks.values()}
    said = [f"- {', '.join(f'`{name}`' for name in which)}: {text}" for text, which in together.items() if which]
    body = [*said, "", *HEAD, *(line for name in names for line in rows[name])]
    path.write_text(head + "\n".join([start, "", *body, "", end]) + tail, encoding="utf-8")


def _read_table(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """By measure: its rows as they stand there, and when and on what they were measured."""
    rows: dict[str, list[str]] = {}
    remarks: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| ") and line not in HEAD:
            rows.setdefault(line.split(" | ")[0].removeprefix("| "), []).append(line)
        elif remark := re.match(r"- ((?:`\w+`(?:, )?)+): (.*)", line):
            remarks.update(dict.fromkeys(re.findall(r"`(\w+)`", remark[1]), remark[2]))
    return rows, remarks
