"""From the errors of the other rooms to what the command line says about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sie_core.cli.errors import CommandError, Exit
from sie_core.errors import ConfigError, ConfigProblem, PluginError, SieError

__all__ = ["as_json", "explained"]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what the other rooms raise on purpose into a CommandError."""
    try:
        yield
    except ConfigError as error:
        raise _of_configuration(error) from error
    except PluginError as error:
        raise _of_plugin(error) from error
    except SieError as error:
        raise CommandError(error.message, code=error.code) from error


def _of_configuration(error: ConfigError) -> CommandError:
    """Every problem on a line of its own. Exit code 2."""
    count = len(error.problems)
    lines = [f"the configuration has {count} problem{'s' if count != 1 else ''}"]
    lines += [str(problem) for problem in error.problems]
    return CommandError(
        "\n".join(lines),
        exit_code=Exit.USAGE,
        code="CONFIG_ERROR",
        details={"problems": [as_json(problem) for problem in error.problems]},
    )


def _of_plugin(error: PluginError) -> CommandError:
    """In strict mode, a plugin that can't be used is a faulty installation: exit code 1."""
    lines = [f"{'plugin ' + repr(error.plugin) + ': ' if error.plugin else ''}{error.message}"]
    lines += getattr(error, "__notes__", [])
    return CommandError(
        "\n".join(lines),
        code=error.code,
        hint="`sie plugins --verbose` says more; without strict plugins the server leaves it out and starts",
    )


def as_json(problem: ConfigProblem) -> dict[str, Any]:
    """A problem for scripts; ``line`` and ``column`` are null for flags and variables."""
    return {
        "file": problem.file or None,
        "line": problem.line,
        "column": problem.column,
        "path": problem.path or None,
        "message": problem.message,
    }
