"""The front of ``sie``: finds the command, shows the overall help, turns every ending into an exit code.

The overall help is rendered here from :mod:`sie_core.cli.catalogue`, because importing cyclopts alone would take most
of the 0.3 s that ``sie --help`` may take. Everything below a command name is parsed and explained by cyclopts.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sie_core.cli.catalogue import COMMANDS, GROUPS
from sie_core.cli.errors import CommandError, Exit, suggestion

if TYPE_CHECKING:
    from sie_core.hookspecs import Command

__all__ = ["run"]

_HELP = """\
sie: a model server that keeps more models at hand than the device can hold.

Usage: sie COMMAND [ARGUMENTS] [OPTIONS]

First steps:
  sie serve                           start a server with the models that are installed
  sie encode minilm "Hello, world"    turn a text into a vector
  sie status                          see what is in memory
"""

_OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)

_TAIL = """\
`sie COMMAND --help` explains a command, with examples; `sie --version` says which version this is.

The commands under Look, Act and Use talk to a running server: http://127.0.0.1:8080, or the one that --url or
SIE_BASE_URL names, with the API key in SIE_API_KEY if it wants one. --json gives output for scripts.
Exit codes: 0 ok, 1 failed, 2 wrong usage or configuration, 3 no server reached."""


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Nothing but an exit code leaves here."""
    _mend_streams()
    try:
        code = _dispatch(list(argv))
        sys.stdout.flush()
    except CommandError as error:
        return _fail(error, as_json=_wants_json(argv))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return Exit.FAILED
    except OSError as error:
        if error.errno not in _OUTPUT_LOST:
            raise
        _discard_stdout()
        return _fail(CommandError(f"the output can't be written: {error.strerror}"), as_json=False)
    return code


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h") or (name == "help" and len(argv) == 1):
        print(_overview())
        return Exit.OK
    if name in ("--version", "-V"):
        from sie_core import __version__

        print(f"sie {__version__}")
        return Exit.OK
    if name == "help":
        argv = [argv[1], "--help"]
        name = argv[0]
    if name.startswith("-"):
        raise CommandError(
            f"{name} stands before a command: the command comes first, its options after it",
            exit_code=Exit.USAGE,
            code="USAGE",
            hint="for example: sie status --json",
        )
    from sie_core.cli import app

    for entry in COMMANDS:
        if entry.name == name:
            return app.call(entry.name, entry.help, entry.target, argv[1:])
    extra, _ = _plugin_commands()
    for command in extra:
        if command.name == name:
            return app.call(command.name, command.help, command.target, argv[1:], plugin=True)
    known = [entry.name for entry in COMMANDS] + [command.name for command in extra]
    raise CommandError(
        f"there is no command {name!r}",
        exit_code=Exit.USAGE,
        code="USAGE",
        hint=suggestion(name, known) or "`sie --help` lists the commands",
    )


# --- help ------------------------------------------------------------------------------------------


def _overview() -> str:
    extra, left_out = _plugin_commands()
    width = max(len(name) for name in [*(entry.name for entry in COMMANDS), *(command.name for command in extra)]) + 2
    lines = [_HELP]
    for group in GROUPS:
        lines.append(_heading(group))
        lines += [f"  {entry.name:<{width}}{entry.help}" for entry in COMMANDS if entry.group == group]
        lines.append("")
    if extra:
        lines.append(_heading("From plugins"))
        lines += [f"  {command.name:<{width}}{command.help}" for command in extra]
        lines.append("")
    lines.append(_TAIL)
    if left_out:
        lines.append(f"\n{left_out} plugin(s) can't be used: `sie plugins` says why.")
    return "\n".join(lines)


def _heading(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def _plugin_commands() -> tuple[list[Command], int]:
    """What the plugins add (names and help only), and how many plugins were left out."""
    import logging

    from sie_core.plugins import Plugins

    # Whoever wants the reasons asks for them with `sie plugins`; every other command just does without the plugin.
    logging.getLogger("sie_core.plugins").addHandler(logging.NullHandler())
    plugins = Plugins.load(strict=False, adapters=False)
    commands = sorted(plugins.commands(), key=lambda command: command.name)
    taken = {entry.name for entry in COMMANDS}
    return [command for command in commands if command.name not in taken], sum(
        info.state != "loaded" for info in plugins.info()
    )


# --- beginnings and endings ---------------------------------------------------------------------------------------


def _mend_streams() -> None:
    """Be able to write, whatever was closed before we began and however little the locale can show."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Ascending, so that each gets its own number: else the next file or socket would be taken for it.
            os.open(os.devnull, os.O_RDWR)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - open as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _wants_json(argv: Sequence[str]) -> bool:
    options = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in options


def _fail(error: CommandError, *, as_json: bool) -> int:
    if as_json:
        import json

        body = {"code": error.code, "message": error.message, "hint": error.hint or None, **error.details}
        print(json.dumps({"error": body}))
    else:
        from sie_core.cli.output import printable

        print(f"sie: {printable(error.message, newlines=True)}", file=sys.stderr)
        if error.hint:
            print(f"     {printable(error.hint)}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()
    return error.exit_code


def _discard_stdout() -> None:
    """Whoever read the output is gone: don't let the interpreter complain about it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
