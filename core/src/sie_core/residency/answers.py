"""Answers that are made or sent, in the host's book: their bytes can't be promised to anything else."""

from __future__ import annotations

from typing import Final

from sie_core.memory.ledger import Ledger, Need

__all__ = ["AnswerBook"]

_OWNER: Final = "<answers>"
"""No model can have this name."""
_PURPOSE: Final = "answers"
_HOST: Final = "host"


class AnswerBook:
    """One claim for all answers; none while there are none."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.held = 0
        """Bytes."""

    def hold(self, nbytes: int) -> bool:
        """Book so many bytes more. ``False``: the host has not got them."""
        ledger = self._ledger
        if not ledger.has_account(_HOST):
            return True
        if not self.held:
            ledger.book(_OWNER, [Need(_HOST, static=0)], purpose=_PURPOSE)
            ledger.settle(_OWNER)
        if not ledger.grow(_OWNER, _HOST, nbytes, purpose=_PURPOSE):
            if not self.held:
                ledger.release(_OWNER)
            return False
        self.held += nbytes
        return True

    def free(self, nbytes: int) -> None:
        """Give so many of them back."""
        if not self.held:
            return
        self.held -= nbytes
        if self.held:
            self._ledger.shrink(_OWNER, _HOST, nbytes, purpose=_PURPOSE)
        else:
            self._ledger.release(_OWNER)
