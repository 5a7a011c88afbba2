"""What to serve: the configuration bound to the installed adapters, or what these offer when nothing is configured."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from sie_core.cli.errors import CommandError, Exit
from sie_core.config import Config, bind_models, load_config
from sie_core.errors import MissingAdapter
from sie_core.plugins import Plugins
from sie_core.types import ModelSpec

__all__ = ["bind", "read"]

_log = logging.getLogger("sie.cli")


def read(file: Path | None, flags: Mapping[str, Any], plugins: Plugins) -> Config:
    """The whole configuration, bound. Raises ConfigError; CommandError where there is nothing to serve at all."""
    return bind(load_config(file, flags=flags), plugins)


def bind(config: Config, plugins: Plugins) -> Config:
    """Bind the models' options to their adapters; take the adapters' own models where none are configured."""
    if not config.models and config.origin("models").kind == "default":
        models = (evolve(model, device=model.device or config.compute.device) for model in _default_models(plugins))
        config = evolve(config, models=tuple(models))
    config = bind_models(config, {name: entry.cls for name, entry in plugins.adapters.items()})
    for model in config.models:
        if model.adapter not in plugins.adapters:
            missing = MissingAdapter(model.adapter, found=sorted(plugins.adapters))
            _log.warning("model %r can't be served: %s", model.name, missing.message)
    return config


def _default_models(plugins: Plugins) -> tuple[ModelSpec, ...]:
    found: dict[str, ModelSpec] = {}
    hints: list[str] = []
    for name, entry in sorted(plugins.adapters.items()):
        try:
            offered = list(entry.cls().default_models())
        except (Exception, SystemExit):
            _log.exception("the adapter %r of plugin %r could not say which models it offers", name, entry.plugin)
            continue
        for model in offered:
            if not model.available:
                hints.append(model.hint or f"{model.spec.name} ({name}) is not installed")
            elif model.spec.name in found:
                _log.warning("the adapter %r offers a second default model %r: left out", name, model.spec.name)
            else:
                found[model.spec.name] = model.spec
    if not found:
        raise _nothing_to_serve(plugins, hints)
    return tuple(found.values())


def _nothing_to_serve(plugins: Plugins, hints: list[str]) -> CommandError:
    lines = ["there is nothing to serve: no model is configured, and no installed adapter has one at hand"]
    if hints:
        lines += [f"  {hint}" for hint in hints]
    elif not plugins.adapters:
        lines.append("  no adapter is installed: pip install sie-adapters-torch (`sie plugins` lists what there is)")
    else:
        lines.append(f"  installed adapters: {', '.join(sorted(plugins.adapters))}")
    return CommandError(
        "\n".join(lines),
        exit_code=Exit.FAILED,
        code="NO_MODELS",
        hint="or name your own models in sie.yaml, under models:",
    )
