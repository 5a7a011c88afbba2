"""Give the models' options the types that their adapters want, and tell what differs between two configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from sie_core.config._readers import AttrsReader
from sie_core.config._value import INVALID, Report, Value, Where, value_of
from sie_core.config.model import Config
from sie_core.errors import ConfigError
from sie_core.types import ModelSpec


@frozen
class NoOptions:
    """The options of an adapter that states none."""


def bind_models(config: Config, adapters: Mapping[str, type]) -> Config:
    """The configuration with every model's ``options`` as an object of its adapter's ``options`` class.

    ``adapters``: adapter classes by name. A model whose adapter is not among them keeps its plain options and is listed
    in :attr:`Config.unbound`.

    Raises:
        ConfigError: with every problem found, at its place in the file.
    """
    report = Report(
        str(config.path) if config.path is not None else "",
        config.path.parent.absolute() if config.path is not None else Path.cwd(),
    )
    readers: dict[str, AttrsReader | str] = {}
    in_file = config.option_values
    models = []
    for index, model in enumerate(config.models):
        adapter = adapters.get(model.adapter)
        if adapter is not None and isinstance(model.options, Mapping):  # else made in code, and typed already
            if model.adapter not in readers:
                readers[model.adapter] = _reader(model.adapter, getattr(adapter, "options", NoOptions))
            place = Where(f"models[{index}].options")
            value, where = in_file.get(model.name) or (value_of(dict(model.options)), place)
            model = _bind(model, readers[model.adapter], value, where, report)
        models.append(model)
    if report.problems:
        raise ConfigError(report.problems)
    return attrs.evolve(config, models=tuple(models))


def _bind(model: ModelSpec, reader: AttrsReader | str, value: Value, where: Where, report: Report) -> ModelSpec:
    if isinstance(reader, str):
        report.add(where, reader)
        return model
    before = len(report.problems)
    options = reader.read(value, where, report)
    for problem in report.problems[before:]:
        problem.message += f" (model {model.name}, adapter {model.adapter})"
    return model if options is INVALID else attrs.evolve(model, options=options)


def _reader(name: str, cls: Any) -> AttrsReader | str:
    """The reader of an adapter's options, or why there can be none."""
    if not isinstance(cls, type) or not attrs.has(cls):
        return f"the adapter {name!r} is faulty: its options are no attrs class"
    reader = AttrsReader(cls)
    try:
        _ = reader.fields
    except Exception as exc:  # a type that no file can hold, or an annotation that names nothing
        return f"the adapter {name!r} is faulty: its options can't be read from a file: {exc}"
    return reader


@frozen
class ConfigChange:
    """Names of models. ``changed``: their engine must be made anew; ``policy_only``: the rest takes effect at once."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    policy_only: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.policy_only)


def compare(old: Config, new: Config) -> ConfigChange:
    """What differs in the models. Both must be bound, or neither: plain options never equal typed ones."""
    before = {model.name: model for model in old.models}
    after = {model.name: model for model in new.models}
    both = [(before[name], model) for name, model in after.items() if name in before]
    changed = [new_model.name for old_model, new_model in both if _engine(old_model) != _engine(new_model)]
    return ConfigChange(
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        changed=tuple(changed),
        policy_only=tuple(m.name for old_model, m in both if old_model != m and m.name not in changed),
    )


def _engine(model: ModelSpec) -> Any:
    # One relative path from two folders is two sources, though they read the same.
    source = model.source
    relative = source is not None and source.kind == "path" and not Path(source.location).is_absolute()
    return (model.engine_key(), source.base if relative and source is not None else None)
