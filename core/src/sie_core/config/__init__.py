"""The configuration: ``sie.yaml``, environment and flags, typed strictly, every problem with its place."""

from __future__ import annotations

from collections.abc import Sequence

from sie_core.config._bind import ConfigChange, NoOptions, bind_models, compare
from sie_core.config._fields import OptionInfo, describe_options
from sie_core.config._load import DEFAULT_FILE, is_loopback, load_config, options
from sie_core.config._models import ModelEntry, check_name
from sie_core.config.keys import ApiKey, parse_api_key
from sie_core.config.model import (
    ComputeConfig,
    Config,
    MemoryConfig,
    Origin,
    PluginsConfig,
    RequestsConfig,
    ServerConfig,
    TelemetryConfig,
)

__all__ = [
    "DEFAULT_FILE",
    "ApiKey",
    "ComputeConfig",
    "Config",
    "ConfigChange",
    "MemoryConfig",
    "NoOptions",
    "OptionInfo",
    "Origin",
    "PluginsConfig",
    "RequestsConfig",
    "ServerConfig",
    "TelemetryConfig",
    "adapter_options",
    "bind_models",
    "check_name",
    "compare",
    "is_loopback",
    "load_config",
    "model_options",
    "options",
    "parse_api_key",
]


def model_options() -> Sequence[OptionInfo]:
    """The fields of an entry of ``models``."""
    return describe_options(ModelEntry, file_only=True)


def adapter_options(cls: type) -> Sequence[OptionInfo]:
    """The fields of an adapter's options class, as they stand under ``options``; help from their metadata."""
    return describe_options(cls, file_only=True)
