"""The devices of this machine: CUDA by NVML, the CPU, and an emulated accelerator in RAM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sie_core.adapter import Device, DeviceBuffer
from sie_core.memory._cuda import CudaDevice, probe_cuda
from sie_core.memory.emulated import EmulatedDevice
from sie_core.memory.host import HostMemory
from sie_core.units import format_bytes

__all__ = ["CpuDevice", "CudaDevice", "EmulatedDevice", "probe_all", "probe_cuda"]


class CpuDevice:
    """The CPU and the memory that this process may have. Its account should have the host's as its parent."""

    kind: Literal["cuda", "cpu", "emulated"] = "cpu"

    def __init__(self, name: str = "cpu", *, host: HostMemory | None = None) -> None:
        self.name = name
        self._host = host if host is not None else HostMemory()
        self.description = f"CPU, {format_bytes(self.total())} of RAM"

    def total(self) -> int:
        """Bytes of RAM, or the container's limit where that is less."""
        return self._host.total()

    def used(self) -> int | None:
        """Always ``None``: what others take is counted once, in the host's account."""
        return None

    def allocate(self, nbytes: int) -> DeviceBuffer:
        raise TypeError(f"{self.name} is no emulated device: frameworks allocate there themselves")


def probe_all(
    *,
    emulate: int | None = None,
    root: str | Path = "/",
    environ: Mapping[str, str] | None = None,
    nvml: Any = None,
) -> list[Device]:
    """Every device of this machine, accelerators first, the CPU always last.

    ``emulate``: bytes of an emulated accelerator that takes the place of all others; None or 0: none. ``nvml`` stands
    in for the ``pynvml`` module, ``environ`` for ``os.environ``, ``root`` for the root of the file system.

    Raises:
        HostOutOfMemory: the emulated device does not fit in RAM.
    """
    accelerators: list[Device] = []
    if emulate:
        accelerators.append(EmulatedDevice("emulated:0", emulate))
    else:
        accelerators.extend(probe_cuda(environ, nvml=nvml))
    return [*accelerators, CpuDevice("cpu", host=HostMemory(root))]
