"""Learns what models can do before they are asked anything, for lists of models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sie_core.errors import ModelNotFound

if TYPE_CHECKING:
    from sie_core.residency import ModelStatus, Registry

__all__ = ["Describer"]

AT_MOST_S: Final = 5.0
"""A list waits so long for adapters that read files; what is not known then is told the next time."""
AGAIN_S: Final = 60.0
_AT_A_TIME: Final = 4
"""Each on a thread of its own."""


class Describer:
    """Asks adapters to describe their models, each at most once in ``AGAIN_S``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._asked: dict[tuple[str, int], float] = {}

    async def ask(self, models: Iterable[ModelStatus]) -> None:
        """Have these described, ``AT_MOST_S`` seconds long."""
        now = asyncio.get_running_loop().time()
        self._asked = {key: at for key, at in self._asked.items() if now - at < AGAIN_S}
        due = [model for model in models if (model.name, model.epoch) not in self._asked]
        if not due:
            return
        places = asyncio.Semaphore(_AT_A_TIME)

        async def one(name: str) -> None:
            async with places:
                with contextlib.suppress(ModelNotFound):
                    await self._registry.describe(name)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AT_MOST_S), asyncio.TaskGroup() as group:
                for model in due:
                    group.create_task(one(model.name))
        self._asked |= {(model.name, model.epoch): now for model in due}
