"""What a fake engine scores and extracts: by the words that texts share, so that a test can tell what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import frozen
from sie_core import (
    BatchRequest,
    Classification,
    DetectedObject,
    Entity,
    ExtractOutput,
    InvalidInput,
    Item,
    Relation,
    RequestParams,
    ScoreOutput,
    Task,
)

if TYPE_CHECKING:
    from sie_testing.fake import FakeOptions

__all__ = ["Wanted", "answer", "expected_score", "text_of", "wanted_of"]

_NEXT_TO = "next to"


@frozen(eq=False)
class Wanted:
    """What is wanted of one item, when that is no vector."""

    query: str | None = None
    labels: tuple[str, ...] = ()
    images: int = 0


def wanted_of(request: BatchRequest, item: Item, options: FakeOptions) -> Wanted | None:
    """Raises InvalidInput: labels are needed and neither the request nor the model has any."""
    if request.task is Task.ENCODE:
        return None
    if request.task is Task.SCORE:
        query = None if request.query is None else text_of(request.query)
        if not query or not query.split():
            raise InvalidInput("the query is empty", param="query")
        return Wanted(query=query)
    labels = request.labels or options.labels
    if not labels:
        raise InvalidInput("this model finds what 'labels' name: give at least one", param="labels")
    return Wanted(labels=labels, images=len(item.images))


def answer(
    tokens: int, text: str, params: RequestParams, wanted: Wanted, salt: str, non_finite: Sequence[str]
) -> ScoreOutput | ExtractOutput:
    """NaN for a text among ``non_finite``."""
    if wanted.query is None:
        return _extract(tokens, text, wanted, sure=float("nan") if text in non_finite else 1.0)
    if text in non_finite:
        return ScoreOutput(tokens, float("nan"))
    return ScoreOutput(tokens, expected_score(wanted.query, text, salt=(params.lora or "") + salt))


def text_of(item: Item) -> str | None:
    """The item's words; an image is a word of its own, made from its bytes."""
    if item.text is None and item.token_ids is not None:
        return " ".join(map(str, item.token_ids))
    if not item.images:
        return item.text
    words = [hashlib.blake2b(image, digest_size=4).hexdigest() for image in item.images]
    return " ".join([item.text, *words] if item.text else words)


def expected_score(query: str, text: str, *, salt: str = "") -> float:
    """What a fake engine with this ``salt`` answers: the share of the query's words that ``text`` has, and a little
    more that tells texts apart."""
    asked = set(query.split())
    share = len(asked.intersection(text.split())) / len(asked)
    digest = hashlib.blake2b(f"{salt}\0{query}\0{text}".encode("utf-8", "surrogatepass"), digest_size=2).digest()
    return 0.9 * share + 0.1 * int.from_bytes(digest, "little") / 65536


def _extract(tokens: int, text: str, wanted: Wanted, *, sure: float) -> ExtractOutput:
    """Entities: words that are labels. Relations: entities that follow on one another. Classifications: every label,
    with its share of the words. Objects: one an image, of the first label."""
    words = list(_words(text))
    entities = tuple(
        Entity(text=word, label=word.casefold(), score=sure, start=start, end=start + len(word))
        for start, word in words
        if word.casefold() in wanted.labels
    )
    named = [entity.label for entity in entities]
    shares = {label: named.count(label) / len(words) for label in wanted.labels}
    best_first = sorted(wanted.labels, key=lambda label: -shares[label])
    return ExtractOutput(
        tokens,
        entities=entities,
        relations=tuple(Relation(one.text, other.text, _NEXT_TO, 0.5) for one, other in pairwise(entities)),
        classifications=tuple(Classification(label, shares[label]) for label in best_first),
        objects=tuple(
            DetectedObject(wanted.labels[0], 0.75, (float(place), 0.0, 10.0, 20.0)) for place in range(wanted.images)
        ),
    )


def _words(text: str) -> Iterator[tuple[int, str]]:
    place = 0
    for word in text.split():
        start = text.index(word, place)
        place = start + len(word)
        yield start, word
