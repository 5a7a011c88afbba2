# ruff: noqa: RUF009 - option() makes an attrs field
"""The settings of a server, section by section. Every default, check, flag, variable and help text stands here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs
from attrs import frozen

from sie_core.config._fields import above, at_least, between, of_device, of_memory, option
from sie_core.config._value import Value, Where
from sie_core.errors import ConfigProblem
from sie_core.types import ModelSpec
from sie_core.units import ByteSize

__all__ = [
    "ComputeConfig",
    "Config",
    "MemoryConfig",
    "Origin",
    "PluginsConfig",
    "RequestsConfig",
    "ServerConfig",
    "TelemetryConfig",
]

_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3
_OFF = ": write null (off, in a variable or a flag) to switch it off"


def _host(value: str) -> str | None:
    return None if value and value == value.strip() and " " not in value else "must be an address or a host name"


def _url(value: str) -> str | None:
    good = value.startswith(("http://", "https://")) and " " not in value
    return None if good else "must be an address such as http://localhost:4318"


_HOST_NAME = re.compile(r"\*|\[?[A-Za-z0-9_.:-]+\]?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def _hosts(value: tuple[str, ...]) -> str | None:
    wrong = [host for host in value if _HOST_NAME.fullmatch(host) is None or _has_port(host)]
    return f"must be names without scheme, port and path, and {wrong[0]!r} is not one" if wrong else None


def _has_port(host: str) -> bool:
    name, _, port = host.rpartition(":")
    return bool(name) and port.isdigit() and (":" not in name or name.endswith("]"))


def _origins(value: tuple[str, ...]) -> str | None:
    wrong = [origin for origin in value if _ORIGIN.fullmatch(origin) is None]
    wanted = "must be origins such as https://app.example, without a path"
    return f"{wanted}, and {wrong[0]!r} is not one" if wrong else None


def _root_path(value: str) -> str | None:
    return None if _PREFIX.fullmatch(value.removesuffix("/")) else "must be a path such as /sie"


@frozen
class ServerConfig:
    """Where the server listens, who may ask, and how much at once."""

    host: str = option(
        "127.0.0.1", help="Address to listen on. Any other than this machine's own needs API keys.", check=_host
    )
    port: int | None = option(
        None,
        help="Port to listen on. Not set: 8080, or a free one when that is taken. 0: any free one.",
        check=between(0, 65535),
    )
    api_keys: tuple[str, ...] = option(
        (),
        help="API keys, each as role:name:sha256-of-key; the role is inference or admin.",
        file_only=True,
        secret=True,
    )
    api_keys_file: Path | None = option(None, help="File with API keys, one role:name:sha256-of-key a line.")
    allow_insecure_bind: bool = option(False, help="Allow another address than this machine's own without API keys.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        help="Without API keys: names besides localhost that requests may give as their Host. '*': any.",
        check=_hosts,
    )
    cors_origins: tuple[str, ...] = option(
        (),
        help="Origins whose web pages may use the server, such as https://app.example. '*': all, not advised without "
        "API keys.",
        check=_origins,
    )
    root_path: str | None = option(
        None, help="Prefix that a proxy in front puts before every path, such as /sie.", check=_root_path
    )
    max_connections: int = option(
        1024, help="Most connections at a time; fewer where the limit of open files is low.", check=at_least(8)
    )
    max_body_bytes: ByteSize = option(34 * _MIB, help="Largest request body.", check=at_least(_KIB, " bytes"))
    max_item_bytes: ByteSize = option(2 * _MIB, help="Largest text of one item.", check=at_least(1, " byte"))
    max_answer_bytes: ByteSize = option(
        256 * _MIB, help="Largest answer to a request that encodes or extracts.", check=at_least(_KIB, " bytes")
    )
    max_items: int = option(2048, help="Most items in a request.", check=at_least(1))
    max_image_bytes: ByteSize = option(20 * _MIB, help="Largest image file.", check=at_least(1, " byte"))
    max_image_pixels: int = option(
        40_000_000, help="Most pixels of an image, whatever the size of its file.", check=at_least(1)
    )
    max_images: int = option(256, help="Most images in a request.", check=at_least(0))
    allow_image_urls: bool = option(
        False, help="Fetch images that requests name by http or https addresses; only from the open internet."
    )
    drain_s: float = option(
        30.0, help="Seconds that running requests have to finish when the server stops.", check=between(0, 86_400)
    )


@frozen
class MemoryConfig:
    """What the server may take of the host's and the devices' memory."""

    host_cache_bytes: Literal["auto"] | ByteSize = option(
        "auto",
        help="Host memory for parked models. auto: a quarter of it when there is an accelerator, else none. 0: off.",
        check=lambda value: None if value == "auto" else of_memory(value),
    )
    host_floor: ByteSize = option(2 * _GIB, help="Host memory that always stays free.", check=of_memory)
    device_reserve: ByteSize | None = option(
        None,
        help="Memory that stays free on each device. Not set: 512 MiB on CUDA, none elsewhere.",
        check=of_memory,
    )
    emulate_device: ByteSize | None = option(
        None,
        help="Size of a pretend accelerator made of host memory, to rehearse on.",
        check=lambda value: "must be at least 1MiB, and is 0" if value == 0 else of_memory(value),
    )
    run_permits: int = option(
        1, help="How many engines of this process may run at the same time on a device.", check=at_least(1)
    )
    idle_evict_s: float | None = option(
        None,
        help="Seconds without a request after which a model gives its memory back. Not set: never.",
        check=above(0, " s", _OFF),
    )


@frozen
class RequestsConfig:
    """How long requests wait."""

    load_wait_s: float = option(30.0, help="Seconds that a request waits for a model to load.", check=at_least(0, " s"))
    load_timeout_s: float = option(
        600.0,
        help="Seconds that loading a model may take, a download included; then it has failed.",
        check=above(0, " s"),
    )
    wake_wait_s: float = option(
        15.0,
        help="Seconds that a request waits for a parked model to wake.",
        check=at_least(0, " s"),
        env="SIE_WAKE_TIMEOUT_S",
    )
    model_ready_timeout_s: float | None = option(
        None,
        help="Readiness time-out (s) of a caller that shares this worker; no request waits longer than half of it.",
        check=above(0, " s"),
    )
    deadline_s: float = option(
        120.0, help="Seconds that a request may take in all; models may set their own.", check=above(0, " s")
    )

    @property
    def wake_limit_s(self) -> float:
        """Seconds that a request really waits for a wake: ``wake_wait_s`` or half of the caller's time-out."""
        return self._within_readiness(self.wake_wait_s)

    @property
    def load_limit_s(self) -> float:
        """Seconds that a request really waits for a load: ``load_wait_s`` or half of the caller's time-out."""
        return self._within_readiness(self.load_wait_s)

    def _within_readiness(self, seconds: float) -> float:
        ready = self.model_ready_timeout_s
        return seconds if ready is None else min(seconds, ready / 2)


@frozen
class ComputeConfig:
    """Where and with how many threads engines compute."""

    device: str | None = option(
        None,
        help="Device for models that name none: cpu, cuda:N or emulated:N. Not set: whichever has room.",
        check=of_device,
    )
    threads: int | None = option(
        None,
        help="Threads that an engine computes with on the CPU. Not set: the framework's choice.",
        check=at_least(1),
    )


@frozen
class TelemetryConfig:
    """Logs, metrics and traces."""

    prometheus: bool = option(True, help="Serve metrics at /metrics.")
    otlp_endpoint: str | None = option(
        None, help="Address of an OpenTelemetry collector (OTLP over HTTP). Not set: nothing is sent.", check=_url
    )
    log_file: Path | None = option(None, help="File to append logs to, beside standard error.")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", help="Least severe level that is logged.")


@frozen
class PluginsConfig:
    """Plugins."""

    strict: bool = option(
        False,
        help="Refuse to start when a plugin can't be used, instead of leaving it out.",
        flag="--strict-plugins",
        env="SIE_STRICT_PLUGINS",
    )


@frozen
class Origin:
    """Where a value came from. ``place``: ``--port``, ``SIE_PORT``, ``sie.yaml:3:5``, empty for a default."""

    kind: Literal["flag", "environment", "file", "default"]
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.kind


_DEFAULT = Origin("default")


@frozen
class Config:
    """A whole configuration. ``path`` is the file it came from, ``None`` without one.

    ``warnings``: what looks like a slip and is none for sure (a variable whose name is close to one of ours), and what
    lets strangers in.
    """

    server: ServerConfig = attrs.field(factory=ServerConfig)
    memory: MemoryConfig = attrs.field(factory=MemoryConfig)
    requests: RequestsConfig = attrs.field(factory=RequestsConfig)
    compute: ComputeConfig = attrs.field(factory=ComputeConfig)
    telemetry: TelemetryConfig = attrs.field(factory=TelemetryConfig)
    plugins: PluginsConfig = attrs.field(factory=PluginsConfig)
    models: tuple[ModelSpec, ...] = ()
    path: Path | None = attrs.field(default=None, eq=False)
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False)
    origins: Mapping[str, Origin] = attrs.field(factory=dict, eq=False, repr=False)
    model_values: Mapping[str, tuple[Value, Where]] = attrs.field(factory=dict, eq=False, repr=False)
    """What the file says of each model, by name, with its place: for binding, and for :meth:`problem`."""

    def origin(self, key: str) -> Origin:
        """Where the value of an option (``server.port``, ``models``) came from."""
        return self.origins.get(key, _DEFAULT)

    @property
    def option_values(self) -> Mapping[str, tuple[Value, Where]]:
        """What stands under ``options`` of each model, by name, with its place."""
        return {
            name: (entry.data.get("options") or Value("mapping", {}), place.key("options", entry))
            for name, (entry, place) in self.model_values.items()
        }

    def problem(self, model: str, field: str, message: str) -> ConfigProblem:
        """A complaint about a field of a model (``adapter``, ``source``), at its place in the file where it has one."""
        index = next((index for index, spec in enumerate(self.models) if spec.name == model), 0)
        where = Where(f"models[{index}].{field}")
        if model in self.model_values:
            value, place = self.model_values[model]
            where = place.key(field, value)
        file = str(self.path) if self.path is not None else ""
        return ConfigProblem(message, path=where.path, file=file, line=where.line, column=where.column)

    @property
    def unbound(self) -> tuple[str, ...]:
        """Names of the models whose options no adapter has typed (yet): after binding, those without an adapter."""
        return tuple(model.name for model in self.models if isinstance(model.options, Mapping))


SECTIONS: Mapping[str, type] = {
    "server": ServerConfig,
    "memory": MemoryConfig,
    "requests": RequestsConfig,
    "compute": ComputeConfig,
    "telemetry": TelemetryConfig,
    "plugins": PluginsConfig,
}
