"""Parsing with cyclopts: one command at a time, so that running one imports no other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sie_core.cli.errors import CommandError, Exit

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["call", "command"]

_F = TypeVar("_F", bound=Callable[..., Any])


class _Manner(NamedTuple):
    usage: str
    examples: tuple[str, ...] = ()
    parsed: Callable[[], Callable[..., Any]] | None = None


def command(usage: str, *examples: str, parsed: Callable[[], Callable[..., Any]] | None = None) -> Callable[[_F], _F]:
    """Say how a command is used. ``parsed`` makes the function that cyclopts looks at, where it has to be made."""

    def mark(function: _F) -> _F:
        function.__sie_command__ = _Manner(usage, examples, parsed)  # type: ignore[attr-defined]
        return function

    return mark


def call(name: str, summary: str, target: str, argv: Sequence[str], *, plugin: bool = False) -> int:
    """Parse ``argv`` for the command and run it. Returns its exit code; ``None`` counts as 0.

    A command is a plain function whose parameters are its arguments and options.
    """
    function = _imported(name, target) if plugin else _resolve(target)
    from cyclopts import App, CycloptsError, Group, MissingArgumentError

    manner = getattr(function, "__sie_command__", None)
    app = App(
        name=f"sie {name}",
        help=_reflowed(function.__doc__) or summary,
        help_format="plaintext",
        help_flags=("--help", "-h"),
        help_epilogue=_examples(manner),
        usage=f"Usage: sie {name} {manner.usage}" if manner else None,
        version_flags=(),
        group_commands=Group("Commands", show=False),
        group_parameters=Group("Options", sort_key=0),
    )
    app.default(manner.parsed() if manner and manner.parsed else function)
    try:
        result = app(
            _options_first(app, argv),
            exit_on_error=False,
            print_error=False,
            verbose=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        error.verbose = False
        message = str(error).strip()
        if (
            isinstance(error, MissingArgumentError)
            and error.argument is not None
            and not error.argument.name.startswith("-")
        ):
            message = f"{error.argument.name} is missing"
        raise CommandError(
            message, exit_code=Exit.USAGE, code="USAGE", hint=f"`sie {name} --help` shows how it goes"
        ) from error
    return result if isinstance(result, int) else Exit.OK


def _options_first(app: App, argv: Sequence[str]) -> list[str]:
    """The same command line with its options in front, so that they may stand anywhere: cyclopts ends a list at one.

    A command line with an unknown option stays as it is: whether a value follows is not known.
    """
    if not any(token.startswith("-") for token in argv):
        return list(argv)
    takes = {
        name: argument.token_count()[0] for argument in app.assemble_argument_collection() for name in argument.names
    }
    options: list[str] = []
    others: list[str] = []
    left = iter(argv)
    for token in left:
        if token == "--":
            others += left
        elif not token.startswith("-") or token == "-":
            others.append(token)
        else:
            name, has_value, _ = token.partition("=")
            if name not in takes:
                return list(argv)
            options += [token, *([] if has_value else islice(left, takes[name]))]
    return [*options, "--", *others] if others else options


def _examples(manner: _Manner | None) -> str | None:
    if manner is None or not manner.examples:
        return None
    return "\n\n".join(["Examples:", *(f"  {line}" for line in manner.examples)])


def _reflowed(text: str | None) -> str:
    """A docstring with one line a paragraph: where it is folded is for the terminal to say."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _imported(name: str, target: str) -> Any:
    try:
        return _resolve(target)
    except Exception as error:
        raise CommandError(
            f"the command {name!r} comes from a plugin and could not be imported ({target}): "
            f"{type(error).__name__}: {error}",
            code="PLUGIN_BROKEN",
            hint="`sie plugins --verbose` shows which plugin it is",
        ) from error
