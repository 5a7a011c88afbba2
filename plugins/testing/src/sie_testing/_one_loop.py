"""What the suites for engines that answer on an event loop share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from sie_core import Engine, HostResidue, TransitionContext

from sie_testing._books import BooksConformance
from sie_testing._bounds import in_thread
from sie_testing._lifecycle import call_hook
from sie_testing._policies import PolicyConformance

__all__ = ["OnOneLoop", "said", "text_of", "wake"]

T = TypeVar("T")


class OnOneLoop(BooksConformance, PolicyConformance):
    """An engine's connections belong to an event loop: all the tests of a class share one."""

    patience_s: ClassVar[float] = 20.0
    """How long what has to happen at once may take on a busy machine."""
    _runner: ClassVar[asyncio.Runner]

    @classmethod
    def play(cls, work: Coroutine[Any, Any, T]) -> T:
        """Run it on the class's event loop."""
        if "_runner" not in vars(cls):
            cls._runner = asyncio.Runner()
        return cls._runner.run(work)

    async def until(self, check: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        async with asyncio.timeout(self.patience_s):
            while not await check():
                await asyncio.sleep(0.005)

    @classmethod
    def blocking(cls, call: Callable[..., T], *arguments: Any) -> T:
        """Beside the event loop, which runs meanwhile."""
        return cls.play(in_thread(call, *arguments))

    @classmethod
    def leave_behind(cls) -> None:
        super().leave_behind()
        if "_runner" in vars(cls):
            del cls._runner

    @classmethod
    def end(cls) -> None:
        if "_runner" in vars(cls):
            cls._runner.close()
            del cls._runner


def said(kind: str, prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}


def text_of(choice: Mapping[str, Any]) -> str:
    said = choice["message"]["content"] if "message" in choice else choice["text"]
    return str(said or "")


def wake(plugin: Any, engine: Engine, ctx: TransitionContext) -> None:
    assert isinstance(call_hook(plugin, "restore_from_host", engine=engine, ctx=ctx), HostResidue)
