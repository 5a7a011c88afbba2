"""What the measures share: how long they take, and the servers that stay up between their turns."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import contestants
from attrs import define, field, frozen
from contestants import Server
from load import drive
from raw import RawProcess

__all__ = ["SMALL", "Bench", "Sizes", "absolute"]

FAKE = "models: [{name: fake, adapter: fake, options: {vector: constant, dims: 4}}]\n"
MIB = 1024 * 1024


def absolute(text: str) -> Path:
    """A path that means the same to servers, which run elsewhere. Links stay: an environment's Python is one."""
    return Path(text).absolute()


@frozen
class Sizes:
    """How much the measures of the families, the host tier and generation do. Counts are of all turns together."""

    requests: int = 240
    """That evict one model and wake another."""
    weights: int = 1024 * MIB
    """Bytes that are copied."""
    wakes: int = 500
    """Beside a load; and as many beside none."""
    load_s: float = 10.0
    cycles: int = 10
    turn_s: float = 60.0
    """The longest turn of the generation and family measures, whatever was asked for."""
    pieces: int = 128
    """Of each streamed answer."""
    idle_s: float = 10.0
    documents: int = 100
    """Of each rerank request."""
    vectors: int = 1024
    """Of an answer that is serialised."""
    soak_s: float = 3600.0
    """How long the soak takes."""
    asks: int = 24
    """Different requests of each model in the soak."""


SMALL = Sizes(
    requests=8,
    weights=16 * MIB,
    wakes=12,
    load_s=0.5,
    cycles=2,
    turn_s=0.6,
    pieces=8,
    idle_s=0.5,
    documents=8,
    vectors=16,
    soak_s=6.0,
    asks=6,
)
"""To see that the measures work. The figures mean nothing."""


@define
class Bench:
    """What the measures share. ``pairs``: how often the contestants take turns; ``seconds``: how long each turn is."""

    pairs: int
    seconds: float
    infinity: Path
    sizes: Sizes = field(factory=Sizes)
    sglang: Path | None = None
    """An interpreter that has SGLang."""
    stack: contextlib.ExitStack = field(factory=contextlib.ExitStack)
    _servers: dict[str, Server] = field(factory=dict)
    _raw: RawProcess | None = None

    def server(self, name: str) -> Server:
        """A server, started when it is first asked for; it idles while others are measured."""
        if name not in self._servers:
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            starts: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
                "sie": lambda: contestants.sie(folder),
                "sie-fake": lambda: contestants.sie(folder, FAKE),
                "infinity": lambda: contestants.infinity(self.infinity),
                "starlette": contestants.bare_starlette,
            }
            self._servers[name] = self.stack.enter_context(starts[name]())
            model = "fake" if name == "sie-fake" else "minilm"
            self._servers[name].warm(model)
            for clients, texts in ((1, 1), (32, 1), (4, 32)) if model == "minilm" else ((32, 1),):
                # What is made or compiled on first use, for each kind of load, is made now.
                drive(self._servers[name], clients=clients, seconds=5, texts_per_request=texts, model=model)
        return self._servers[name]

    def raw(self) -> RawProcess:
        """The model in a process of its own, with no server."""
        if self._raw is None:
            self._raw = self.stack.enter_context(RawProcess(contestants.model_folder()))
        return self._raw
