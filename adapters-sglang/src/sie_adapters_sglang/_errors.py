"""Errors of this package, in the core's tree: ``SieError`` → ``LoadError`` → ``BadOptions``."""

from __future__ import annotations

from sie_core import LoadError

__all__ = ["BadOptions"]


class BadOptions(LoadError):
    """The model's options can't be handed to the SGLang that is installed: says which, and what to write instead."""

    permanent = True
