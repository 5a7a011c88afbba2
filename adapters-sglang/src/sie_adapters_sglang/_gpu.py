"""What the driver says that processes hold on a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["held_on"]


def held_on(number: int, pids: Iterable[int]) -> int | None:
    """Bytes that these processes hold on the device; ``None``: the driver does not say (in many containers)."""
    wanted = set(pids)
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handle = _handle(pynvml, number)
            told = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    sizes = [process.usedGpuMemory for process in told if process.pid in wanted]
    if not sizes or None in sizes:
        return None
    return int(sum(sizes))


def _handle(pynvml: object, number: int) -> object:
    """Devices are numbered among the visible ones; the driver numbers all."""
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    name = visible[number] if number < len(visible) else str(number)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))  # type: ignore[attr-defined]
    return pynvml.nvmlDeviceGetHandleByUUID(name)  # type: ignore[attr-defined]
