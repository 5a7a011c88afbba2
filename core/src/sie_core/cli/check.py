"""``sie check``: everything about a configuration that can be known without starting a server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.output import print_json, printable
from sie_core.cli.problems import as_json
from sie_core.config import DEFAULT_FILE, Config, bind_models, load_config
from sie_core.errors import ConfigError, ConfigProblem, HookFailed, LoadError, MissingAdapter
from sie_core.plugins import Plugins
from sie_core.types import ModelSpec

__all__ = ["check"]


@command("[FILE] [OPTIONS]", "sie check", "sie check /etc/sie/sie.yaml --json")
def check(
    file: Annotated[
        Path | None, Parameter(name="FILE", help=f"The file; without it {DEFAULT_FILE}, as for serve.")
    ] = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON instead of lines.")] = False,
) -> int:
    """Check a configuration without starting anything.

    Prints every problem with its place. Exit code 2: the configuration can't be used; 1: a model can't be loaded,
    because its adapter or its files are missing; 0: all is well.
    """
    logging.getLogger("sie_core.plugins").addHandler(logging.NullHandler())
    config, problems = None, list[ConfigProblem]()
    try:
        config = load_config(file)
        if config.path is None:
            raise CommandError(
                f"there is no {DEFAULT_FILE} here",
                exit_code=Exit.USAGE,
                code="USAGE",
                hint="name the file: sie check FILE",
            )
        plugins = Plugins.load(strict=False)
        config = bind_models(config, {name: entry.cls for name, entry in plugins.adapters.items()})
        problems = _of_models(config, plugins)
        code = Exit.FAILED if problems else Exit.OK
    except ConfigError as error:
        problems, code = list(error.problems), Exit.USAGE
    name = str(config.path if config is not None else file or DEFAULT_FILE)
    if json:
        print_json(_report(name, config, problems, code))
    else:
        for warning in config.warnings if config is not None else ():
            print(printable(f"warning: {warning}"))
        for problem in problems:
            print(printable(problem, newlines=True))
        if code == Exit.OK and config is not None:
            count = len(config.models)
            print(printable(f"{name}: {count} {'model' if count == 1 else 'models'}, no problem"))
    return code


def _of_models(config: Config, plugins: Plugins) -> list[ConfigProblem]:
    found = []
    for model in config.models:
        trouble = _of_model(model, plugins)
        if trouble:
            _, where = config.option_values[model.name]
            path = where.path.removesuffix(".options")
            named = f"model {model.name!r}"
            message = trouble if trouble.startswith(named) else f"{named}: {trouble}"
            found.append(ConfigProblem(message, path=path, file=str(config.path), line=where.line, column=where.column))
    return found


def _of_model(model: ModelSpec, plugins: Plugins) -> str:
    """Why the model could not be loaded, as far as its files tell; empty: nothing speaks against it."""
    entry = plugins.adapters.get(model.adapter)
    if entry is None:
        return MissingAdapter(model.adapter, found=sorted(plugins.adapters)).message
    try:
        entry.cls().describe(model)
    except LoadError as error:
        return error.message
    except (Exception, SystemExit) as error:
        return HookFailed.by(error, f"describe of adapter {model.adapter!r}", entry.plugin).message
    return ""


def _report(name: str, config: Config | None, problems: list[ConfigProblem], code: Exit) -> dict[str, Any]:
    return {
        "file": name,
        "ok": code == Exit.OK,
        "models": [model.name for model in config.models] if config is not None else [],
        "problems": [as_json(problem) for problem in problems],
        "warnings": list(config.warnings) if config is not None else [],
    }
