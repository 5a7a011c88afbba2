"""An engine on an emulated device runs on the CPU, and takes of the device what it would take of a real one."""

from __future__ import annotations

from collections.abc import Sequence

from sie_core import DeviceBuffer, TransitionContext

__all__ = ["EmulatedMemory"]


class EmulatedMemory:
    """Nothing at all on devices of other kinds. ``nbytes``: what the engine says that it holds on each."""

    def __init__(self, accounts: Sequence[str], nbytes: int) -> None:
        self._accounts = [account for account in accounts if account.startswith("emulated")]
        self._nbytes = nbytes
        self._held: dict[str, DeviceBuffer] = {}

    def take(self, ctx: TransitionContext) -> None:
        """Raises DeviceOutOfMemory; then nothing is held."""
        try:
            for account in self._accounts:
                if account not in self._held and self._nbytes:
                    self._held[account] = ctx.device_buffer(account, self._nbytes)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        while self._held:
            self._held.popitem()[1].free()

    def held_on(self, account: str) -> int:
        return self._nbytes if account in self._held else 0
