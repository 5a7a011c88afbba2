"""The LoRA adapters of a fake engine: made-up bytes, real order, faults on demand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sie_core import DeviceNeed, DeviceOutOfMemory, InferenceError, ModelSourceNotFound, TransitionContext

from sie_testing._memory import FakeMemory
from sie_testing.faults import FaultPoints
from sie_testing.virtual import pause

if TYPE_CHECKING:
    from sie_testing.fake import FakeOptions

__all__ = ["FakeLoras"]


class FakeLoras:
    """What makes a fake engine a ``LoraEngine``. A source whose text ends in ``missing`` is not found."""

    options: FakeOptions
    faults: FaultPoints
    devices: Sequence[str]
    _held: FakeMemory

    @property
    def max_loras(self) -> int:
        return self.options.max_loras

    @property
    def loras(self) -> tuple[str, ...]:
        """Adapters that are loaded, in the order of their loading."""
        return tuple(self._held.loras)

    def lora_reserve(self, name: str, source: str) -> DeviceNeed:
        """Made-up bytes. Raises ModelSourceNotFound."""
        with self._alone("lora_reserve"):
            self.faults.reach("lora_reserve")
            if source.endswith("missing"):
                raise ModelSourceNotFound(f"{source} is made up to be missing")
            return DeviceNeed(self.options.lora_bytes)

    def lora_load(self, name: str, source: str, ctx: TransitionContext) -> None:
        """Take ``lora_s`` seconds. Raises DeviceOutOfMemory ``oom_at_lora`` times."""
        with self._alone("lora_load"):
            attempt = self.faults.reach("lora_load", ctx.cancelled)
            if name in self._held.loras or len(self._held.loras) >= self.max_loras or self._held.parked:
                raise RuntimeError(f"LoRA adapter {name!r} was loaded twice, beyond the limit, or while parked")
            pause(self.options.lora_s)
            self._check_alive()
            if attempt <= self.options.oom_at_lora:
                raise DeviceOutOfMemory("the fake device is full", account=self.devices[0])
            self._held.add_lora(ctx, name, self.options.lora_bytes)

    def lora_unload(self, name: str, ctx: TransitionContext) -> None:
        with self._alone("lora_unload"):
            self.faults.reach("lora_unload", ctx.cancelled)
            self._held.remove_lora(name)

    def _check_lora(self, name: str) -> None:
        """A core that lets a request run without its adapter must not get away with it here."""
        if name not in self._held.loras:
            raise InferenceError(f"LoRA adapter {name!r} is not loaded")

    # The engine's own:

    def _alone(self, what: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _check_alive(self) -> None:
        raise NotImplementedError
