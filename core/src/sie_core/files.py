"""Reading small files that somebody else put there: regular ones, and not more of them than expected.

A FIFO would be waited for until somebody writes to it, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_file", "read_file"]


def open_file(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Never waits.

    Raises:
        OSError: as ``open`` does; and EINVAL for a FIFO, a socket or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of ``limit`` bytes at most.

    Raises:
        OSError: as :func:`open_file` does; EFBIG for a larger file.
    """
    with open_file(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content
