"""The built-in plugin: what SIE knows without any other package, registered like everybody else's."""

from __future__ import annotations

from collections.abc import Sequence

from sie_core.adapter import Device
from sie_core.hookspecs import hookimpl

__all__ = ["probe_devices", "sie_api"]

sie_api = 1


@hookimpl
def probe_devices(emulate: int | None) -> Sequence[Device]:
    """CUDA devices by NVML, the CPU, or the emulated device alone when one is asked for."""
    from sie_core.memory.device import probe_all  # NVML and psutil: only for those who serve

    return probe_all(emulate=emulate)
