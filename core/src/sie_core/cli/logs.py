"""The server's log: lines on stderr, and in a file where one is named. A log that can't be written never stops it."""

from __future__ import annotations

import logging
import logging.handlers
import sys
from pathlib import Path
from typing import Any

from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.output import printable

__all__ = ["set_up"]

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S"


def set_up(level: str, file: Path | None) -> None:
    """Log at ``level`` from now on. Raises CommandError, with exit code 2, for a file that can't be opened."""
    handlers: list[logging.Handler] = [_Screen(sys.stderr)]
    if file is not None:
        try:
            handlers.append(_File(file, encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise CommandError(
                f"the log file {file} can't be written: {error.strerror}",
                exit_code=Exit.USAGE,
                code="CONFIG_ERROR",
                hint="telemetry.log_file (--log-file, SIE_LOG_FILE) names it",
            ) from error
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        handler.setFormatter(_Lines(_FORMAT, _TIME))
        root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # Uvicorn's own account of starting and stopping says nothing that ours does not; httpx has a line a request.
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)


class _Lines(logging.Formatter):
    """One line an entry, whatever a client managed to get into it; tracebacks below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(" | ".join(record.message.splitlines()))
        return super().formatMessage(record)


class _Screen(logging.StreamHandler[Any]):
    """stderr. When even that is gone there is nobody left to tell."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _File(logging.handlers.WatchedFileHandler):
    """A file that others may rotate. A full disk is reported once, on stderr; every entry is a new try."""

    failing = False

    def emit(self, record: logging.LogRecord) -> None:
        self.failed = False
        super().emit(record)
        if not self.failed:
            self.failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        self.failed = True
        if self.failing:
            return
        self.failing = True
        error = sys.exc_info()[1]
        reason = getattr(error, "strerror", None) or str(error)
        try:
            print(
                f"sie: the log file {self.baseFilename} can't be written: {reason}; going on without", file=sys.stderr
            )
        except OSError:
            return
