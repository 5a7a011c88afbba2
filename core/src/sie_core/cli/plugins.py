"""``sie plugins``: what is installed, and why something of it is not used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.client import Client, Remote
from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.look import slow_hooks
from sie_core.cli.output import print_json, print_table, printable
from sie_core.plugins import PluginInfo, Plugins

__all__ = ["plugins"]


_NO_REMOTE = Remote()


@command("[OPTIONS]", "sie plugins", "sie plugins --verbose")
def plugins(
    *,
    verbose: Annotated[bool, Parameter(negative="", show_default=False, help="Show the tracebacks, too.")] = False,
    strict: Annotated[
        bool, Parameter(negative="", show_default=False, help="Exit with 1 if any plugin can't be used.")
    ] = False,
    remote: Remote = _NO_REMOTE,
) -> int:
    """List the installed plugins with the hooks and adapters that each brings, and why one was left out.

    If a server runs, it is asked which hooks it has disabled.
    """
    logging.getLogger("sie_core.plugins").addHandler(logging.NullHandler())  # the table says it all
    loaded = Plugins.load(strict=False)
    loaded.commands()  # a plugin may fail in this hook, too
    found = loaded.info()
    bad = [info for info in found if info.state != "loaded"]
    status = _status(remote)
    if remote.json:
        print_json([_as_json(info, status) for info in found])
        return Exit.FAILED if strict and bad else Exit.OK
    print_table(
        ("NAME", "VERSION", "DISTRIBUTION", "STATE", "HOOKS", "ADAPTERS"),
        (
            (
                info.name,
                info.version,
                info.distribution,
                info.state,
                ", ".join(info.hooks),
                ", ".join(info.adapters),
            )
            for info in found
        ),
        drops=("VERSION", "HOOKS", "DISTRIBUTION"),
        folds="ADAPTERS",
    )
    for info in found:
        if info.reason:
            print(printable(f"\n{info.name}: {info.state}: {info.reason}", newlines=True))
        if verbose and info.traceback:
            print(printable(info.traceback.rstrip(), newlines=True))
    for line in slow_hooks(status):
        print(printable(f"\n{line}", newlines=True))
    if bad and not verbose and any(info.traceback for info in bad):
        print("\n`sie plugins --verbose` shows the tracebacks.")
    return Exit.FAILED if strict and bad else Exit.OK


def _as_json(info: PluginInfo, status: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": info.name,
        "version": info.version,
        "distribution": info.distribution,
        "hooks": list(info.hooks),
        "adapters": list(info.adapters),
        "slow_hooks": [slow for slow in status.get("slow_hooks") or () if slow["plugin"] == info.name],
        "state": info.state,
        "reason": info.reason or None,
        "traceback": info.traceback or None,
    }


def _status(remote: Remote) -> dict[str, Any]:
    """What a running server says; empty where none answers."""
    try:
        with Client(remote, timeout_s=2.0) as client:
            return client.get("/v1/status")
    except CommandError:
        return {}
