# ruff: noqa: RUF009 - option() makes an attrs field
"""The catalogue of well-known models: one YAML file each, in folders that plugins announce.

A file states how its model is configured (adapter, source, options) and what is known of it, with the addresses that
the facts come from. A file that does not keep to this is left out and reported with its place; the others count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, evolve, frozen

from sie_core.config._fields import above, option
from sie_core.config._models import check_name
from sie_core.config._readers import AttrsReader
from sie_core.config._value import INVALID, Report, Value, Where
from sie_core.config._yaml import read_yaml
from sie_core.errors import ConfigProblem
from sie_core.sources import parse_source

__all__ = ["FAMILIES", "CatalogueEntry", "read_catalogue", "read_catalogues"]

FAMILIES = (
    "dense",
    "sparse",
    "multivector",
    "hybrid",
    "cross-encoder",
    "image-text",
    "entities",
    "zero-shot-entities",
    "classifier",
    "generation",
)
"""The families of this project's own adapters, in the order of a list. A catalogue may bring others."""

Gives = Literal["dense", "sparse", "multivector", "score", "entities", "relations", "classifications", "text"]
_WORD = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_ADDRESS = re.compile(r"https://[^\s/]+/?\S*")


def _family(family: str) -> str | None:
    if _WORD.fullmatch(family):
        return None
    return f"{family!r} is no family: write small letters, digits and hyphens, such as cross-encoder"


def _source(source: str) -> str | None:
    try:
        parse_source(source)
    except ValueError as exc:
        return str(exc)
    return None


def _not_empty(text: str) -> str | None:
    return None if text.strip() else "is empty: leave it out when nobody knows it"


def _some(items: Sequence[str]) -> str | None:
    return None if items else "is empty: a model gives something"


def _facts(addresses: Sequence[str]) -> str | None:
    if not addresses:
        return "is empty: name the page that the facts come from"
    odd = next((address for address in addresses if _ADDRESS.fullmatch(address) is None), None)
    return None if odd is None else f"{odd!r} is no address: write https://…"


def _dims(dims: dict[str, int]) -> str | None:
    odd = next((f"{kind}: {count}" for kind, count in dims.items() if count < 1), None)
    return None if odd is None else f"{odd} is no size of a vector"


@frozen
class CatalogueEntry:
    """A well-known model: how it is configured, and what is known of it. What nobody knows is left out."""

    name: str = option(help="What a server would call it; the name of its file, too.", check=check_name)
    family: str = option(help="What kind of model it is.", check=_family)
    adapter: str = option(help="The adapter that makes its engine.", check=_not_empty)
    source: str = option(help="Where its files are, as in the configuration.", check=_source)
    gives: tuple[Gives, ...] = option(help="What comes out of it.", check=_some)
    facts: tuple[str, ...] = option(help="Addresses that the facts come from.", check=_facts)
    options: dict[str, Any] = option(factory=dict, help="The adapter's settings that it needs.")
    dims: dict[str, int] = option(
        factory=dict, help="Size of a vector of each kind; of sparse ones the vocabulary's.", check=_dims
    )
    max_length: int | None = option(None, help="Tokens that an input may have.", check=above(0))
    parameters: int | None = option(None, help="How many there are, all experts included.", check=above(0))
    languages: str | None = option(None, help="Which it was made for.", check=_not_empty)
    licence: str | None = option(None, help="As the hub writes it.", check=_not_empty)
    notes: str | None = option(None, help="What else one should know before using it.", check=_not_empty)
    file: str = ""
    """Where it stands; not part of the file's content."""

    def model(self) -> dict[str, Any]:
        """The entry of ``models`` in a configuration."""
        entry = {"name": self.name, "adapter": self.adapter, "source": self.source}
        return {**entry, "options": self.options} if self.options else entry

    def as_json(self) -> dict[str, Any]:
        """Everything but the place, as plain values."""
        return {**asdict(self, filter=lambda field, _: field.name != "file"), "gives": [*self.gives]}


_READER = AttrsReader(CatalogueEntry)


def read_catalogue(folder: Path) -> tuple[list[CatalogueEntry], list[ConfigProblem]]:
    """The models whose files (``*.yaml``) stand in the folder, by name, and what is wrong with the other files."""
    problems: list[ConfigProblem] = []
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".yaml")
    except OSError as exc:
        return [], [ConfigProblem(f"the catalogue can't be read: {exc.strerror or exc}", file=str(folder))]
    entries = [entry for entry in (_read(file, problems) for file in files) if entry is not None]
    return entries, problems


def read_catalogues(folders: Iterable[Path]) -> tuple[list[CatalogueEntry], list[ConfigProblem]]:
    """The models of several folders, by family and name. Of two with one name the first counts, and is a problem."""
    found: dict[str, CatalogueEntry] = {}
    problems: list[ConfigProblem] = []
    for folder in dict.fromkeys(folders):
        entries, wrong = read_catalogue(folder)
        problems += wrong
        for entry in entries:
            first = found.setdefault(entry.name, entry)
            if first is not entry:
                problems.append(ConfigProblem(f"{first.file} has the model {entry.name!r} already", file=entry.file))
    return sorted(found.values(), key=_order), problems


def _order(entry: CatalogueEntry) -> tuple[int, str, str]:
    known = FAMILIES.index(entry.family) if entry.family in FAMILIES else len(FAMILIES)
    return known, entry.family, entry.name


def _read(file: Path, problems: list[ConfigProblem]) -> CatalogueEntry | None:
    report = Report(str(file), file.parent, problems)
    before = len(problems)
    value = read_yaml(file, report, least="name, family, adapter, source, gives and facts")
    if value is None:
        return None
    if value.kind != "mapping":
        report.mismatch(Where("", value.line, value.column), "a model (name, family, adapter, source, ...)", value)
        return None
    if "file" in value.data:
        report.add(Where().key("file", value), "unknown key 'file'")
        return None
    entry = _READER.read(value, Where(), report)
    if entry is not INVALID:
        _check_whole(entry, file, value, report)
    return evolve(entry, file=str(file)) if len(problems) == before else None


def _check_whole(entry: CatalogueEntry, file: Path, value: Value, report: Report) -> None:
    """What one field says about another."""
    if entry.name != file.stem:
        # One file a name: two files of a folder can't have the same one.
        report.add(Where().key("name", value), f"the file of {entry.name!r} must be called {entry.name}.yaml")
    for kind in entry.dims:
        if kind not in entry.gives:
            where = Where().key("dims", value).key(kind, value.data["dims"])
            report.add(where, f"the model gives no {kind} vectors: it gives {', '.join(entry.gives)}")
