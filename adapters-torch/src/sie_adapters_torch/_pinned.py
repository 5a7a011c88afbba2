"""Page-locking of host memory that belongs to somebody else, so that a GPU copies to and from it at full speed."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from sie_core import format_bytes

__all__ = ["PinnedRange"]

log = logging.getLogger("sie.torch")


class PinnedRange:
    """A range of host memory, page-locked for CUDA if that can be had. ``undo`` before the memory is given up."""

    def __init__(self, address: int, nbytes: int, cudart: Any = None) -> None:
        self._address = address
        cuda: Any = torch.cuda
        self._cudart = cudart if cudart is not None else cuda.cudart()
        code = int(self._cudart.cudaHostRegister(address, nbytes, 0))
        self.pinned = code == 0
        if not self.pinned:
            _clear_error()
            log.warning(
                "%s of host memory can't be page-locked (CUDA error %d; is the memlock limit too low?): copies to and "
                "from the device will be slower",
                format_bytes(nbytes),
                code,
            )

    def undo(self) -> None:
        """Unlock. Idempotent."""
        if self.pinned:
            self.pinned = False
            code = int(self._cudart.cudaHostUnregister(self._address))
            if code:
                _clear_error()
                log.warning("host memory can't be unlocked (CUDA error %d)", code)


def _clear_error() -> None:
    """The runtime keeps the error of a failed call for the next kernel launch, which would then seem to fail."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)
