"""From the scores of tokens to entities, as the token classification pipeline of transformers puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from sie_core import Entity

from sie_adapters_torch._entities_files import OUTSIDE, Tag
from sie_adapters_torch._options import Aggregation

__all__ = ["Place", "entities", "without_overlaps"]


@frozen
class Place:
    """Where a token is in its text, in code points. ``subword``: it goes on with the word of the one before."""

    start: int
    end: int
    subword: bool


@frozen
class _Piece:
    """A token, or a word of several: its label's place among the tags."""

    start: int
    end: int
    tag: int
    score: float


def entities(
    text: str, places: Sequence[Place], scores: NDArray[np.float32], tags: Sequence[Tag], how: Aggregation
) -> list[Entity]:
    """In the order of the text. ``scores``: (tokens, tags), of the tokens at ``places``."""
    pieces = _tokens(places, scores) if how == "simple" else _words(places, scores, how)
    found, group = [], list[_Piece]()
    for piece in pieces:
        if group and not _goes_on(tags[group[-1].tag], tags[piece.tag]):
            found += _entity(text, group, tags)
            group = []
        group.append(piece)
    return found + (_entity(text, group, tags) if group else [])


def _goes_on(last: Tag, this: Tag) -> bool:
    return last.name == this.name and not last.ends and not this.starts


def _entity(text: str, group: Sequence[_Piece], tags: Sequence[Tag]) -> list[Entity]:
    name, start, end = tags[group[0].tag].name, group[0].start, group[-1].end
    shown = text[start:end]
    start += len(shown) - len(shown.lstrip())  # tokenizers that mark words by a space before them count it in
    shown = shown.strip()
    if name == OUTSIDE or not shown:
        return []
    score = float(np.mean([piece.score for piece in group]))
    return [Entity(shown, name, score, start, start + len(shown))]


def _tokens(places: Sequence[Place], scores: NDArray[np.float32]) -> list[_Piece]:
    best = scores.argmax(axis=1) if len(places) else ()
    return [
        _Piece(place.start, place.end, int(tag), float(row[tag]))
        for place, tag, row in zip(places, best, scores, strict=True)
    ]


def _words(places: Sequence[Place], scores: NDArray[np.float32], how: Aggregation) -> list[_Piece]:
    starts = [index for index, place in enumerate(places) if not index or not place.subword]
    pieces = []
    for first, end in zip(starts, [*starts[1:], len(places)], strict=True):
        rows = scores[first:end]
        if how == "first":
            row = rows[0]
        elif how == "max":
            row = rows[rows.max(axis=1).argmax()]
        else:
            row = rows.mean(axis=0)
        tag = int(row.argmax())
        pieces.append(_Piece(places[first].start, places[end - 1].end, tag, float(row[tag])))
    return pieces


def without_overlaps(found: Iterable[Entity]) -> list[Entity]:
    """Of entities that begin inside of another, the longest, and of equally long ones the likeliest."""
    kept: list[Entity] = []
    for entity in sorted(found, key=_start):
        if not kept or not _start(kept[-1]) <= _start(entity) < _end(kept[-1]):
            kept.append(entity)
        elif (_end(entity) - _start(entity), entity.score) > (_end(kept[-1]) - _start(kept[-1]), kept[-1].score):
            kept[-1] = entity
    return kept


def _start(entity: Entity) -> int:
    return entity.start or 0


def _end(entity: Entity) -> int:
    return entity.end or 0
