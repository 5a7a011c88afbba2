"""What the commands print: tables for people, JSON for scripts. rich is imported only when a table is drawn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["console", "local_time", "print_json", "print_table", "printable", "size"]

_WIDE = 10_000
"""Columns where nobody looks: what goes into a pipe or a file is never folded."""
_GAP = 2
"""Blanks between two columns."""
_FOLDED = 24
"""Characters that a column of sentences wants at least."""

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
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    empty: str = "",
    right: Sequence[str] = (),
    drops: Sequence[str] = (),
    folds: str = "",
) -> None:
    """A table without lines, so that it can be cut with ``awk``. ``right`` names the columns of numbers.

    On a terminal that is too narrow, the columns ``drops`` are left out, in that order, and named below. The column
    ``folds`` takes several lines where it has to; the cells of all others stay whole.
    """
    cells = [[printable(value if value not in (None, "") else "-") for value in row] for row in rows]
    if not cells and empty:
        print(empty)
        return
    out = console()
    widths = {column: _width(column, of) for column, *of in zip(columns, *cells, strict=True)}
    if folds:
        widths[folds] = min(widths[folds], _FOLDED)
    left_out = []
    for column in drops:
        if sum(widths.values()) - _GAP <= out.width:
            break
        left_out.append(column)
        del widths[column]
    shown = [number for number, column in enumerate(columns) if column in widths]
    with out.capture() as captured:
        table = _table(columns, cells, shown, right, folds)
        out.width = max(out.width, sum(widths.values()) - _GAP)  # a name that is wider still runs over
        out.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    if left_out:
        print(f"(no room for {', '.join(left_out)}: a wider terminal or --json shows more)")


def _width(column: str, cells: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, (column, *cells))) + _GAP


def _table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], shown: Sequence[int], right: Sequence[str], folds: str
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in (columns[number] for number in shown):
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != folds)
    for row in cells:
        table.add_row(*(Text(row[number], style=_COLOURS.get(row[number], "")) for number in shown))
    return table
