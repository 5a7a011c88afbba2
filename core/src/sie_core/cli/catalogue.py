"""Every command of ``sie`` with its one line of help. Imports nothing: ``sie --help`` is made from this table."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "GROUPS", "Entry"]


class Entry(NamedTuple):
    """A command: ``target`` (``"module:function"``) is imported when the command runs."""

    name: str
    help: str
    target: str
    group: str


GROUPS = ("Serve", "Look", "Act", "Use")

_HERE = "sie_core.cli"

COMMANDS = (
    Entry("serve", "Start the server.", f"{_HERE}.serve:serve", "Serve"),
    Entry("check", "Check a configuration file without starting anything.", f"{_HERE}.check:check", "Serve"),
    Entry("plugins", "List the installed plugins, and why one was left out.", f"{_HERE}.plugins:plugins", "Serve"),
    Entry("models", "List the models that the server knows, or well-known ones.", f"{_HERE}.look:models", "Look"),
    Entry("ps", "List the models that are in memory or on their way.", f"{_HERE}.look:ps", "Look"),
    Entry("status", "Show the memory accounts and every model's state.", f"{_HERE}.look:status", "Look"),
    Entry("decisions", "Show why models were evicted, refused or dropped.", f"{_HERE}.look:decisions", "Look"),
    Entry("explain", "Say why a model was evicted, and what would have kept it.", f"{_HERE}.look:explain", "Look"),
    Entry("load", "Load models and wait until they are resident.", f"{_HERE}.act:load", "Act"),
    Entry("unload", "Unload models.", f"{_HERE}.act:unload", "Act"),
    Entry("park", "Move models to host memory, from where they wake in a moment.", f"{_HERE}.act:park", "Act"),
    Entry("wake", "Bring parked models back to their device.", f"{_HERE}.act:wake", "Act"),
    Entry("pin", "Keep models in memory: never evict them.", f"{_HERE}.act:pin", "Act"),
    Entry("unpin", "Let pinned models be evicted again.", f"{_HERE}.act:unpin", "Act"),
    Entry("encode", "Turn texts into vectors.", f"{_HERE}.encode:encode", "Use"),
    Entry("score", "Say which texts answer a query best.", f"{_HERE}.score:score", "Use"),
    Entry("extract", "Find entities, relations and classes in texts.", f"{_HERE}.extract:extract", "Use"),
)
