"""The page of models lists what the catalogues hold. ``UPDATE_DOCS=1`` writes the tables instead of comparing them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from sie_core.config import adapter_options
from sie_core.config.catalogue import CatalogueEntry, read_catalogues

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
FOLDERS = sorted(ROOT.glob("adapters-*/src/*/catalogue"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _keys() -> str:
    infos = [info for info in adapter_options(CatalogueEntry) if info.key != "file"]
    rows = [(f"`{info.key}`", info.expects, "required" if info.required else "", info.help) for info in infos]
    return _table(["key", "value", "", "meaning"], rows)


def _dims(entry: CatalogueEntry) -> str:
    sizes = [str(count) if len(entry.dims) == 1 else f"{kind} {count}" for kind, count in entry.dims.items()]
    return ", ".join(sizes)


def _row(entry: CatalogueEntry) -> list[str]:
    return [
        f"[{entry.name}]({entry.facts[0]})",
        f"`{entry.adapter}`",
        _dims(entry),
        str(entry.max_length or ""),
        f"{entry.parameters / 1e6:,.0f} M" if entry.parameters else "",
        entry.languages or "",
        entry.licence or "",
    ]


def _catalogue() -> str:
    entries, problems = read_catalogues(FOLDERS)
    assert problems == []
    head = ["model", "adapter", "dims", "max length", "parameters", "languages", "licence"]
    parts = []
    for family, models in groupby(entries, key=lambda entry: entry.family):
        parts.append(f"### {family}\n\n{_table(head, map(_row, models))}")
    return "\n\n".join(parts)


@pytest.mark.parametrize("part", ["keys", "catalogue"])
def test_the_page_lists_what_there_is(part: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = f"<!-- {part}: start -->", f"<!-- {part}: end -->"
    head, found, rest = text.partition(start)
    shown, ended, tail = rest.partition(end)
    assert found and ended
    table = f"\n\n{_keys() if part == 'keys' else _catalogue()}\n\n"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(head + start + table + end + tail, encoding="utf-8")
    else:
        assert shown == table, "run: UPDATE_DOCS=1 nox -R -s docs -- -k page_lists"


def test_there_are_models_enough_of_both_packages() -> None:
    assert [folder.parts[-4] for folder in FOLDERS] == ["adapters-sglang", "adapters-torch"]
    entries, _ = read_catalogues(FOLDERS)
    assert len(entries) >= 60
    hub = [entry.source.partition("@")[0] for entry in entries if not entry.name.endswith("-sglang")]
    assert len(set(hub)) == len(hub)  # one model is listed twice only where two adapters serve it
