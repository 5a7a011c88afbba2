"""What the reference pages list is what there is. ``UPDATE_DOCS=1`` writes the tables instead of comparing them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import sie_core
from sie_adapters_torch.plugin import register_adapters
from sie_core.config import OptionInfo, adapter_options, model_options, options
from sie_core.units import format_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _sections() -> dict[str, list[OptionInfo]]:
    """Every option there is, by the heading of its table."""
    sections: dict[str, list[OptionInfo]] = {}
    for info in options():
        sections.setdefault(info.key.split(".")[0], []).append(info)
    sections["models"] = list(model_options())
    adapters: dict[str, Any] = {}

    class Registrar:
        def add(self, name: str, adapter: type[Any]) -> None:
            adapters[name] = adapter

        def add_catalogue(self, folder: Path) -> None:
            pass

    register_adapters(Registrar())
    for name, adapter in adapters.items():
        sections[name] = list(adapter_options(adapter.options))
    return sections


def _table(infos: Iterable[OptionInfo]) -> str:
    infos = list(infos)
    columns = {
        "key": [f"`{info.key}`" for info in infos],
        "value": [info.expects.replace("|", "\\|") for info in infos],
        "default": [_default(info) for info in infos],
        "meaning": [info.help for info in infos],
        "flag, variable": [f"`{info.flag}`, `{info.env}`" if info.flag else "" for info in infos],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [list(shown), ["---"] * len(shown), *zip(*shown.values(), strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _default(info: OptionInfo) -> str:
    if info.required:
        return "required"
    value = info.default
    if isinstance(value, Enum):
        value = value.value
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "size" in info.expects:
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize("section", _sections())
def test_the_configuration_reference_lists_every_option(section: str) -> None:
    page = DOCS / "configuration.md"
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- options of {section}: start -->", f"<!-- options of {section}: end -->"
    head, found, rest = text.partition(start)
    shown, ended, tail = rest.partition(end)
    assert found and ended, f"configuration.md has no table for {section}"
    table = f"\n\n{_table(_sections()[section])}\n\n"
    if os.environ.get("UPDATE_DOCS"):
        page.write_text(head + start + table + end + tail, encoding="utf-8")
    else:
        assert shown == table, "run: UPDATE_DOCS=1 nox -R -s docs -- -k reference"


def test_the_glossary_has_every_residency() -> None:
    page = (DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    for residency in sie_core.Residency:
        assert residency.value in page
