"""What the C library's allocator keeps of freed memory: bounded, and given back when an engine has gone.

glibc gives threads arenas of their own, eight for each core, and a freed block stays in its arena. A server whose
engines each have a thread, and whose batches differ in size, comes to hold several hundred MiB that way. Two arenas
hold as much work at the same CPU time (``bench soak`` has the figures of memory).

Elsewhere than on glibc nothing is done: other allocators have ways of their own.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["cap_arenas", "trim"]

_M_ARENA_MAX = -8
"""Of ``malloc.h``."""
_ARENAS = 2


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        library.mallopt, library.malloc_trim  # noqa: B018  # musl has neither
    except (OSError, AttributeError):
        return None
    return library


def cap_arenas() -> None:
    """Have the process use two arenas. Does nothing where ``MALLOC_ARENA_MAX`` or ``GLIBC_TUNABLES`` says another."""
    asked = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    library = _glibc()
    if library is not None and not asked:
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def trim() -> None:
    """Give freed memory back to the system. It takes milliseconds: not on the event loop."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
