"""The composition root: builds every room of a server, in the order of the floors, and owns no rule of its own."""

from __future__ import annotations

import os
from typing import Any

from attrs import frozen

from sie_core.adapter import Device
from sie_core.cli.errors import CommandError
from sie_core.config import Config
from sie_core.errors import ConfigError, ConfigProblem
from sie_core.http import create_app
from sie_core.memory.host import HostMemory
from sie_core.memory.ledger import Ledger, Need
from sie_core.plugins import Plugins
from sie_core.residency import Registry, RegistrySettings
from sie_core.serving import Service
from sie_core.telemetry import Telemetry
from sie_core.units import format_bytes

__all__ = ["Parts", "compose"]

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
        ConfigError: an emulated device that the host's memory can't hold; a malformed API key.
        PluginError: in strict mode, a hook that failed.
        CommandError: no device at all.
    """
    if config.compute.threads is not None:
        # Read by OpenMP when the first framework is imported, which happens with the first load.
        os.environ["OMP_NUM_THREADS"] = str(config.compute.threads)
    host, ledger = HostMemory(), Ledger()
    devices = _accounts(config, plugins, host, ledger)
    telemetry = Telemetry.create(config.telemetry)
    registry = Registry(plugins, ledger, devices, _settings(config), host_available=host.available, observer=telemetry)
    service = Service(registry, telemetry=telemetry)
    app = create_app(service, config.server, plugins=plugins, telemetry=telemetry)
    registry.apply(config.models)
    return Parts(config, plugins, tuple(devices), ledger, registry, telemetry, service, app)


def _settings(config: Config) -> RegistrySettings:
    return RegistrySettings(
        load_wait_s=config.requests.load_wait_s,
        wake_wait_s=config.requests.wake_limit_s,
        run_permits=config.memory.run_permits,
    )


def _accounts(config: Config, plugins: Plugins, host: HostMemory, ledger: Ledger) -> list[Device]:
    """Open the host's account and one for each device."""
    memory = config.memory
    ledger.add_account(_HOST, total=host.total(), reserve=memory.host_floor)
    ledger.observe_available(_HOST, host.available())
    _check_emulation(config, ledger)
    devices = plugins.probe_devices(emulate=memory.emulate_device)
    if not devices:
        raise CommandError("no device was found, not even a CPU", hint="`sie plugins --verbose` says what failed")
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
