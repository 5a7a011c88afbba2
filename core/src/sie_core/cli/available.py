"""``sie models --available``: the well-known models that the installed adapters can serve, without any server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from sie_core.cli.errors import CommandError, Exit, suggestion
from sie_core.cli.output import print_json, print_table, printable
from sie_core.config.catalogue import CatalogueEntry, read_catalogues
from sie_core.errors import MissingAdapter
from sie_core.plugins import Plugins

__all__ = ["show_available"]


def show_available(names: Sequence[str], family: str | None, *, as_yaml: bool, as_json: bool) -> int:
    """Print the models that ``names`` or ``family`` choose, or all. Exit code 1 if a file of a catalogue is faulty."""
    logging.getLogger("sie_core.plugins").addHandler(logging.NullHandler())
    plugins = Plugins.load(strict=False)
    entries, problems = read_catalogues(catalogue.folder for catalogue in plugins.catalogues)
    for problem in problems:
        print(printable(f"sie: {problem}", newlines=True), file=sys.stderr)
    chosen = _chosen(entries, names, family)
    if as_json:
        print_json([entry.as_json() for entry in chosen])
    elif as_yaml:
        print(_snippet(chosen), end="")
    elif names:
        print("\n\n".join(_about(entry, plugins) for entry in chosen))
    else:
        _table(chosen)
    return Exit.FAILED if problems else Exit.OK


def _chosen(entries: Sequence[CatalogueEntry], names: Sequence[str], family: str | None) -> list[CatalogueEntry]:
    if family is not None:
        families = dict.fromkeys(entry.family for entry in entries)
        if family not in families:
            known = f"the families are {', '.join(families)}" if families else "no installed plugin has a catalogue"
            raise _unknown(f"there is no family {family!r}", suggestion(family, families) or known)
        entries = [entry for entry in entries if entry.family == family]
    by_name = {entry.name: entry for entry in entries}
    for name in names:
        if name not in by_name:
            where = "the catalogue" if family is None else f"the family {family}"
            hint = suggestion(name, by_name) or "`sie models --available` lists what there is"
            raise _unknown(f"{where} has no model {name!r}", hint)
    return [by_name[name] for name in dict.fromkeys(names)] if names else list(entries)


def _unknown(message: str, hint: str) -> CommandError:
    return CommandError(message, exit_code=Exit.USAGE, code="USAGE", hint=hint)


# --- how it looks ----------------------------------------------------------------------------------


def _table(entries: Sequence[CatalogueEntry]) -> None:
    print_table(
        ("NAME", "FAMILY", "ADAPTER", "GIVES", "DIMS", "MAX LENGTH", "PARAMETERS", "LICENCE"),
        (
            (
                entry.name,
                entry.family,
                entry.adapter,
                ", ".join(entry.gives),
                _dims(entry),
                entry.max_length,
                _count(entry.parameters),
                entry.licence,
            )
            for entry in entries
        ),
        empty="No installed plugin has a catalogue of models.",
        right=("MAX LENGTH", "PARAMETERS"),
        drops=("LICENCE", "FAMILY", "MAX LENGTH", "GIVES", "PARAMETERS", "DIMS"),
    )
    if entries:
        print("\n`sie models --available NAME` says more of one; --yaml prints what to put into sie.yaml.")


def _about(entry: CatalogueEntry, plugins: Plugins) -> str:
    lines: list[tuple[str, object]] = [
        ("family", entry.family),
        ("gives", ", ".join(entry.gives)),
        ("dims", _dims(entry)),
        ("max length", f"{entry.max_length} tokens" if entry.max_length else ""),
        ("parameters", _count(entry.parameters)),
        ("languages", entry.languages),
        ("licence", entry.licence),
        ("notes", entry.notes),
        ("facts from", "\n              ".join(entry.facts)),
    ]
    if entry.adapter not in plugins.adapters:
        lines.append(("needs", MissingAdapter(entry.adapter, found=sorted(plugins.adapters)).message))
    shown = [f"  {label:<12}{text}" for label, text in lines if text]
    about = printable("\n".join([entry.name, *shown]), newlines=True)
    return f"{about}\n\n{_snippet([entry])}".rstrip("\n")


def _snippet(entries: Sequence[CatalogueEntry]) -> str:
    """A configuration with these models."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Lists on one line; texts in which blanks or new lines matter in double quotes, where they are seen."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        plain = value == value.strip() and "\n" not in value
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    def sequence(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
        inline = not any(isinstance(item, dict | list) for item in value)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=inline)

    Dumper.add_representer(str, text)
    Dumper.add_representer(list, sequence)
    models = [entry.model() for entry in entries]
    return yaml.dump({"models": models}, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _dims(entry: CatalogueEntry) -> str:
    if len(entry.dims) == 1:
        return str(next(iter(entry.dims.values())))
    return ", ".join(f"{kind} {count}" for kind, count in entry.dims.items())


def _count(number: int | None) -> str:
    """A number of parameters for people: 22.7 M, 1.5 B."""
    if number is None:
        return ""
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
