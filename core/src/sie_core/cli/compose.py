"""The composition root: builds every room of a server, in the order of the floors, and owns no rule of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from sie_core.adapter import Device
from sie_core.cli.errors import CommandError
from sie_core.config import Config
from sie_core.errors import ConfigError, ConfigProblem
from sie_core.http import create_app
from sie_core.memory.host import HostMemory, host_cache_budget
from sie_core.memory.ledger import Ledger, Need
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service
from sie_core.telemetry import Telemetry
from sie_core.units import format_bytes

__all__ = ["Parts", "compose"]

_log = logging.getLogger("sie.cli")

_HOST = "host"
_CUDA_RESERVE = 512 * 1024**2


@frozen
class Parts:
    """A server that is built and not yet started."""

    config: Config
    plugins: Plugins
    devices: tuple[Device, ...]
    ledger: Ledger
    registry: Registry
    telemetry: Telemetry
    service: Service
    app: Any


def compose(config: Config, plugins: Plugins) -> Parts:
    """Build everything, on the event loop that will run it. ``config`` is bound.

    Raises:
        ConfigError: an emulated device or a host tier that the host's memory can't hold; a malformed API key.
        PluginError: in strict mode, a hook that failed.
        CommandError: no device at all.
    """
    if config.compute.threads is not None:
        # Read by OpenMP when the first framework is imported, which happens with the first load.
        os.environ["OMP_NUM_THREADS"] = str(config.compute.threads)
    host, ledger = HostMemory(), Ledger()
    devices = _accounts(config, plugins, host, ledger)
    telemetry = Telemetry.create(config.telemetry)
    registry = Registry(
        plugins,
        ledger,
        devices,
        _settings(config, _host_tier(config, host, ledger, devices)),
        host_available=host.available,
        host_pressure=host.pressure,
        observer=telemetry,
    )
    service = Service(registry, telemetry=telemetry)
    app = create_app(service, config.server, plugins=plugins, telemetry=telemetry)
    registry.apply(config.models)
    return Parts(config, plugins, tuple(devices), ledger, registry, telemetry, service, app)


def _settings(config: Config, host_cache_bytes: int) -> RegistrySettings:
    return RegistrySettings(
        load_wait_s=config.requests.load_limit_s,
        load_timeout_s=config.requests.load_timeout_s,
        wake_wait_s=config.requests.wake_limit_s,
        run_permits=config.memory.run_permits,
        host_cache_bytes=host_cache_bytes,
    )


def _host_tier(config: Config, host: HostMemory, ledger: Ledger, devices: list[Device]) -> int:
    """The budget of the host tier in bytes; 0: off. Says once what came of the setting."""
    key, setting = "memory.host_cache_bytes", config.memory.host_cache_bytes
    accelerator = any(device.kind != "cpu" for device in devices)
    budget = host_cache_budget(setting, accelerator=accelerator, limit=host.limit(), physical=host.physical())
    total, spare = host.total(), max(0, ledger.available(_HOST))
    if budget > total:
        # It could never fill, so whoever wrote it has another machine in mind, or another unit.
        problem = f"the host has {format_bytes(total)} in all, and {format_bytes(budget)} are asked for"
        raise ConfigError([ConfigProblem(problem, path=key, file=config.origin(key).place)])
    if not budget:
        why = f"{key} is 0" if setting == 0 else "no accelerator: a parked model would take the same memory"
        _log.info("host tier: off (%s); evicted models unload", why)
        return 0
    whence = "a quarter of the host's memory" if setting == "auto" else key
    _log.info("host tier: %s for parked models (%s)", format_bytes(budget), whence)
    if budget > spare:
        _log.warning(
            "the host has %s to give now, memory.host_floor left out: the host tier can't fill its %s, and models that "
            "find no room in it unload",
            format_bytes(spare),
            format_bytes(budget),
        )
    if not accelerator:
        _log.warning("there is no accelerator: a parked model takes the same memory as a loaded one, and wins nothing")
    return budget


def _accounts(config: Config, plugins: Plugins, host: HostMemory, ledger: Ledger) -> list[Device]:
    """Open the host's account and one for each device."""
    memory = config.memory
    ledger.add_account(_HOST, total=host.total(), reserve=memory.host_floor)
    ledger.observe_available(_HOST, host.available())
    _check_emulation(config, ledger)
    devices = plugins.probe_devices(emulate=memory.emulate_device)
    if not devices:
        raise CommandError("no device was found, not even a CPU", hint="`sie plugins --verbose` says what failed")
    _check_device(config, [device.name for device in devices])
    for device in devices:
        reserve = memory.device_reserve
        if reserve is None:
            reserve = _CUDA_RESERVE if device.kind == "cuda" else 0
        ledger.add_account(
            device.name,
            total=device.total(),
            reserve=reserve,
            parent=_HOST if device.kind == "cpu" else None,
            permits=memory.run_permits,
        )
        if device.kind == "emulated":
            ledger.book(device.name, [Need(_HOST, static=device.total())], purpose="device")
            ledger.realise(device.name, _HOST, device.total(), purpose="device")
            ledger.settle(device.name)
    return devices


def _check_device(config: Config, names: Sequence[str]) -> None:
    """The server's own choice of a device is one for all models: none of them could be loaded."""
    key, chosen = "compute.device", config.compute.device
    if chosen is not None and chosen not in names:
        problem = f"device {chosen!r} not found: this machine has {', '.join(names)}"
        raise ConfigError([ConfigProblem(problem, path=key, file=config.origin(key).place)])


def _check_emulation(config: Config, ledger: Ledger) -> None:
    """Taking more than there is would make the machine swap, or the kernel kill the process."""
    wanted = config.memory.emulate_device
    if wanted is None or wanted <= ledger.available(_HOST):
        return
    key = "memory.emulate_device"
    raise ConfigError(
        [
            ConfigProblem(
                f"the host has {format_bytes(max(0, ledger.available(_HOST)))} to give (memory.host_floor, "
                f"{format_bytes(config.memory.host_floor)}, left out), and {format_bytes(wanted)} are asked for",
                path=key,
                file=config.origin(key).place,
            )
        ]
    )
