"""Parts of a CPU batch side by side, instead of one after the other on all cores.

Torch spreads each operation over its threads and waits for the slowest at the end of each: hundreds of meetings a
batch. Where the cores have other work too (a server's event loop, other processes), one thread is often late and the
others spin. Parts that share nothing meet once, at the end of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

__all__ = ["Lanes"]


class Lanes:
    """Up to ``threads`` CPU threads, for one batch at a time."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def run(self, parts: Sequence[Callable[[], None]]) -> None:
        """Run all parts, and return when all have ended. Raises the first error of them."""
        width = min(self.threads, len(parts))
        if width < 2:
            torch.set_num_threads(self.threads)
            for part in parts:
                part()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix=f"sie-{self._name}-lane")
        each = self.threads // width
        futures = [self._pool.submit(_run, part, each) for part in parts]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _run(part: Callable[[], None], threads: int) -> None:
    torch.set_num_threads(threads)  # of this thread, and of the matrix library as a whole: every part sets the same
    part()
