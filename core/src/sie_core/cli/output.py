"""What the commands print: tables for people, JSON for scripts. rich is imported only when a table is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "local_time", "print_json", "print_table", "printable", "size"]

_WIDE = 10_000
"""Columns where nobody looks: what goes into a pipe or a file is never folded."""

_COLOURS = {
    "resident": "green",
    "loaded": "green",
    "broken": "red",
    "conflict": "red",
    "parked": "cyan",
    "loading": "yellow",
    "queued": "yellow",
    "waking": "yellow",
    "draining": "yellow",
    "parking": "yellow",
    "unloading": "yellow",
    "failed": "red",
    "quarantined": "red",
    "refused": "red",
}


def printable(text: object, *, newlines: bool = False) -> str:
    """``text`` without the control characters that could steer a terminal (a server's words are not ours)."""
    keep = "\n" if newlines else ""
    return "".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in str(text))


def size(nbytes: int | None) -> str:
    """Bytes for people; ``-`` where nobody knows them or there are none."""
    from sie_core.units import format_bytes

    return format_bytes(nbytes) if nbytes else "-"


def local_time(at: float) -> str:
    """A wall-clock time (seconds since 1970) in this machine's time zone."""
    from datetime import datetime

    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def print_json(value: object) -> None:
    """One JSON document: indented for a person's eyes, on one line for a pipe."""
    import json

    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False, default=str))


def console() -> Console:
    """A console on stdout. Honours NO_COLOR; never folds what goes into a pipe."""
    from rich.console import Console

    interactive = sys.stdout.isatty()
    return Console(highlight=False, markup=False, emoji=False, width=None if interactive else _WIDE, soft_wrap=False)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str = "", right: Sequence[str] = ()
) -> None:
    """A table without lines, so that it can be cut with ``awk``. ``right`` names the columns of numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        cells = [printable(value if value not in (None, "") else "-") for value in row]
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in cells))
    if not table.row_count and empty:
        print(empty)
        return
    out = console()
    with out.capture() as captured:
        out.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
