"""What is known of a model before its files are there: from the catalogue, or by its adapter's declaration."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import evolve

from sie_core.config.catalogue import CatalogueEntry, read_catalogues
from sie_core.sources import parse_source
from sie_core.types import Capabilities, Task

if TYPE_CHECKING:
    from sie_core.residency import ModelStatus

__all__ = ["Catalogue", "Known"]

Known: TypeAlias = tuple[Capabilities | None, str | None]
"""What a model can do, and what says so: ``model`` (its engine or files), ``catalogue``, ``adapter``, or nothing."""
_Entries: TypeAlias = Mapping[tuple[str, str], CatalogueEntry]
_OUTPUTS: Final = ("dense", "sparse", "multivector")
_TASKS: Final[Mapping[str, Task]] = {
    **dict.fromkeys(_OUTPUTS, Task.ENCODE),
    **dict.fromkeys(("entities", "relations", "classifications"), Task.EXTRACT),
    "score": Task.SCORE,
    "text": Task.GENERATE,
}


class Catalogue:
    """The well-known models, read by the first who needs them: there are many files."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = folders
        self._entries: _Entries | None = None

    async def known(self, models: Sequence[ModelStatus]) -> list[Known]:
        """What is known of each of the models."""
        if self._entries is None and any(model.capabilities is None for model in models):
            self._entries = await asyncio.to_thread(_read, self._folders)
        return [_known(model, self._entries or {}) for model in models]


def _read(folders: Sequence[Path]) -> _Entries:
    """By adapter and source; faulty files are for `sie models --available` to report."""
    entries, _ = read_catalogues(folders)
    return {(entry.adapter, parse_source(entry.source).location): entry for entry in entries}


def _known(model: ModelStatus, entries: _Entries) -> Known:
    if model.capabilities is not None:
        return model.capabilities, "model"
    source = model.spec.source
    entry = entries.get((model.adapter, source.location)) if source is not None and source.kind == "hf" else None
    if entry is not None:
        return _of(entry, model.declared), "catalogue"
    return model.declared, None if model.declared is None else "adapter"


def _of(entry: CatalogueEntry, declared: Capabilities | None) -> Capabilities:
    """What an entry states; what its adapter says of all its models goes before."""
    if declared is None:
        declared = Capabilities(
            tasks=frozenset(_TASKS[kind] for kind in entry.gives),
            outputs=tuple(kind for kind in _OUTPUTS if kind in entry.gives),
        )
    return evolve(declared, dims=dict(entry.dims), max_sequence_length=entry.max_length)
