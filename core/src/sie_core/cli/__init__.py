"""The command line, ``sie``: serves models, and talks to a server that does.

It is also the composition root: :mod:`sie_core.cli.compose` builds every room and owns no rule of its own. Importing
this package imports nothing else, so that ``sie --help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``sie`` and exit: 0 ok, 1 failed, 2 usage or configuration, 3 no server reached."""
    import sys

    from sie_core.cli.front import run

    sys.exit(run(sys.argv[1:] if argv is None else argv))
