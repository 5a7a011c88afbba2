"""Exit codes, and the one exception that the commands end with when something is wrong."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["CommandError", "Exit", "suggestion"]


class Exit(enum.IntEnum):
    """What ``sie`` exits with."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Wrong usage, or a configuration that can't be used."""
    UNREACHABLE = 3
    """No server answers, or what answers is not one."""
    INTERRUPTED = 130


class CommandError(Exception):
    """A command can't do what was asked. ``hint`` says what to do about it; ``details`` go into the ``--json`` form."""

    def __init__(
        self,
        message: str,
        *,
        exit_code: Exit = Exit.FAILED,
        code: str = "FAILED",
        hint: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.message = message
        self.exit_code = exit_code
        self.code = code
        self.hint = hint
        self.details = dict(details or {})
        super().__init__(message)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest of ``known``, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else ""
