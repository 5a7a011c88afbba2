"""Fake batch engines that keep what they ran, for tests of the batcher."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
from sie_core import BatchRequest, EncodeOutput, Item, ModelSpec, Prepared, RequestParams, Task
from sie_core.serving import Batcher
from sie_testing import FakeAdapter, FakeEngine, FakeOptions, make_context


class RecordingEngine(FakeEngine):
    """Keeps the texts of every run. ``poison``: a text that makes every run with it fail."""

    poison: str | None = None

    def run(self, batch: Sequence[Prepared]) -> Sequence[EncodeOutput]:
        texts = [one.payload[0] for one in batch]
        self.__dict__.setdefault("ran", []).append(texts)
        if self.poison in texts:
            raise ValueError("this text is poison")
        return super().run(batch)

    @property
    def ran(self) -> list[list[str]]:
        return list(self.__dict__.get("ran", []))


class RecordingAdapter(FakeAdapter):
    _engine = RecordingEngine


class Silent:
    """Engine events that nobody listens to."""

    def died(self, reason: str, details: str = "") -> None:
        return None

    def request_growth(self, account: str, nbytes: int) -> bool:
        return False


def engine(name: str = "m", *, pads: bool = True, **options: Any) -> RecordingEngine:
    """A loaded engine, with fields of FakeOptions."""
    spec = ModelSpec(name, "fake", options=FakeOptions(max_length=5000, **options))
    made = RecordingAdapter().load(spec, make_context(), Silent())
    assert isinstance(made, RecordingEngine)
    made.pads = pads
    return made


def words(count: int, mark: str = "w") -> str:
    """A text of ``count`` tokens that starts with ``mark``."""
    return " ".join([mark] * count)


def request(*texts: str, params: RequestParams | None = None) -> BatchRequest:
    return BatchRequest(Task.ENCODE, [Item(text=text) for text in texts], params or RequestParams())


@attrs.define(eq=False)
class Client:
    """Sends requests to a batcher and keeps when each was answered."""

    batcher: Batcher
    done: dict[str, float] = attrs.field(factory=dict)

    async def ask(self, *texts: str, within: float = 1000.0, name: str | None = None) -> list[EncodeOutput]:
        loop = asyncio.get_running_loop()
        job = await self.batcher.submit(request(*texts), deadline=loop.time() + within)
        self.done[name or texts[0]] = loop.time()
        outputs = [output for output in job.outputs if output is not None]
        assert len(outputs) == len(texts)
        return outputs
