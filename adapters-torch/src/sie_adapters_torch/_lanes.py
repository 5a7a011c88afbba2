"""Parts of a CPU batch side by side, instead of one after the other on all cores.

Torch spreads each operation over its threads and waits for the slowest at the end of each: hundreds of meetings a
batch. Where the cores have other work too (a server's event loop, other processes), one thread is often late and the
others spin. Parts that share nothing meet once, at the end of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Lanes"]

# Asked once, before anybody sets it: it is one figure for all threads that start later.
_DEFAULT_THREADS = torch.get_num_threads()


class Lanes:
    """Up to ``threads`` CPU threads (default: as many as torch takes), for one batch at a time.

    The calling thread is one of them.
    """

    def __init__(self, name: str, threads: int | None = None) -> None:
        self.threads = threads or _DEFAULT_THREADS
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def run(self, parts: Sequence[Callable[[], None]], *, side_by_side: bool) -> None:
        """Run all parts, and return when all have ended. Raises one of their errors."""
        width = min(self.threads, len(parts)) if side_by_side else 1
        waiting = deque(parts)
        if width < 2:
            return _drain(waiting, self.threads)
        if self._pool is None:
            # Each thread keeps buffers of the matrix library's: none more than needed.
            self._pool = ThreadPoolExecutor(self.threads - 1, thread_name_prefix=f"sie-{self._name}-lane")
        each = self.threads // width
        others = [self._pool.submit(_drain, waiting, each) for _ in range(width - 1)]
        try:
            _drain(waiting, each)
        finally:
            errors = [future.exception() for future in others]
        for error in errors:
            if error is not None:
                raise error
        return None

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _drain(waiting: deque[Callable[[], None]], threads: int) -> None:
    """Run what waits until nothing does. An error ends it for all lanes."""
    torch.set_num_threads(threads)  # of this thread, and of the matrix library as a whole: every lane sets the same
    try:
        while waiting:
            try:
                part = waiting.popleft()
            except IndexError:  # another lane took the last one
                return
            part()
    except BaseException:
        waiting.clear()
        raise
