"""How long the server's own routines take to make bytes of vectors, in this process, and what json.dumps takes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sie_core import EncodeOutput, Item
from sie_core.http.vectors import native_items, openai_data
from sie_core.http.wire import pack

__all__ = ["DIMS", "WANTED", "answers", "contenders"]

DIMS = 384
WANTED = (
    ("JSON floats, OpenAI's route", 3),
    ("JSON floats, native route", 3),
    ("base64, OpenAI's route", 10),
    ("msgpack, native route", 10),
)
"""What is measured beside ``json.dumps``, and how many times as fast it is to be."""
_TURN_S = 0.4
Answer = Callable[[], Coroutine[Any, Any, bytes]]


def contenders(vectors: int) -> list[Callable[[], float]]:
    """Turns, each giving milliseconds an answer: ``json.dumps``, and then what ``WANTED`` names, in that order."""
    rows = _vectors(vectors)
    lists = rows.tolist()  # of plain numbers before the clock starts
    return [partial(_turn, partial(_plainly, lists)), *(partial(_turn, answer) for answer in answers(rows))]


def answers(rows: NDArray[np.float32]) -> list[Answer]:
    """What ``WANTED`` names, in that order: the body of an answer, or all of it that grows with the vectors."""
    outputs = [EncodeOutput(tokens=8, dense=row) for row in rows]
    items = [Item(text="") for _ in outputs]
    return [
        partial(openai_data, outputs, as_base64=False),
        partial(_native, items, outputs, msgpack=False),
        partial(openai_data, outputs, as_base64=True),
        partial(_native, items, outputs, msgpack=True),
    ]


def _vectors(count: int) -> NDArray[np.float32]:
    """Of length 1, as models give them: (count, DIMS)."""
    rows = np.random.default_rng(0).standard_normal((count, DIMS), dtype=np.float32)
    found: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return found


async def _plainly(lists: Sequence[Sequence[float]]) -> bytes:
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(lists)]
    return json.dumps(data).encode()


async def _native(items: Sequence[Item], outputs: Sequence[EncodeOutput], *, msgpack: bool) -> bytes:
    entries = await native_items(items, outputs, ("dense",), "float32", msgpack=msgpack)
    return pack({"model": "model", "items": entries}, msgpack=msgpack).body


def _turn(answer: Answer) -> float:
    """Milliseconds an answer, the mean over some time: on an event loop, as in the server."""

    async def run() -> float:
        await answer()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < _TURN_S:
            await answer()
            count += 1
        return (time.perf_counter() - began) / count * 1e3

    return asyncio.run(run())
