"""Letting go of what an error's tracebacks hold.

A traceback holds its frames, and they hold what the functions worked with: a request's body, its images, their pixels.
Errors that wait in futures and results are part of a cycle with those frames, which only the garbage collector would
find, and the server lets that run rarely. So errors that are kept are stripped where they are caught.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

__all__ = ["empty_frames", "forget_traces"]


def forget_traces(error: BaseException) -> None:
    """Take an error's tracebacks, its causes and its contexts away, once nobody will print them any more."""
    for one in list(_family(error)):
        one.__traceback__ = one.__cause__ = one.__context__ = None


def empty_frames(error: BaseException) -> None:
    """Empty the frames of an error's tracebacks, which can still be printed. For the function that caught it.

    The caller's own frame, which runs and can't be emptied, is taken out. Not for errors that went through coroutines:
    one that is only suspended would be closed.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    for one in _family(error):
        traceback.clear_frames(one.__traceback__)


def _family(error: BaseException) -> Iterator[BaseException]:
    """The error, what it came from, what it came upon, and the members of a group; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        waiting += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        yield one
