"""The texts that every contestant gets, and the request bodies made of them. The same seed gives the same bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SEED = 20
TEXTS = 1024
SHORTEST, LONGEST = 6, 46
"""Words in a text."""
QUERY = 8
"""Words in a query, at most."""


def texts(count: int = TEXTS, seed: int = SEED) -> list[str]:
    """``count`` texts of 6 to 46 words."""
    words = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=rng.randint(SHORTEST, LONGEST))).capitalize() + "." for _ in range(count)]


def reranks(count: int, documents: int) -> list[tuple[str, list[str]]]:
    """``count`` queries, each with so many documents to be ranked; no two have a document in common."""
    queries = [" ".join(text.split()[:QUERY]) for text in texts(count, SEED + 1)]
    return list(zip(queries, windows(texts(count * documents), documents), strict=True))


def windows(items: Sequence[str], size: int) -> Iterator[list[str]]:
    """The texts in slices of ``size``, in order; a last one that is not full is left out."""
    for start in range(0, len(items) - size + 1, size):
        yield list(items[start : start + size])


def write_bodies(path: Path, *, model: str, texts_per_request: int) -> int:
    """Write one OpenAI embeddings request a line, for the load generator. Returns how many there are."""
    bodies = [
        json.dumps({"model": model, "input": window[0] if texts_per_request == 1 else window})
        for window in windows(texts(), texts_per_request)
    ]
    write_lines(path, bodies)
    return len(bodies)


def write_lines(path: Path, bodies: Sequence[str]) -> None:
    """Bodies as the load generator reads them, one a line."""
    path.write_text("\n".join(bodies) + "\n", encoding="utf-8")
