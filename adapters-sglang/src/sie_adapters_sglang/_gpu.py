"""What the driver says that processes hold on a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["held_on", "used_on"]

T = TypeVar("T")


def held_on(number: int, pids: Iterable[int]) -> int | None:
    """Bytes that these processes hold on the device; ``None``: the driver does not say (in many containers)."""
    wanted = set(pids)
    told = _ask(number, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if told is None:
        return None
    sizes = [process.usedGpuMemory for process in told if process.pid in wanted]
    if not sizes or None in sizes:
        return None
    return int(sum(sizes))


def used_on(number: int) -> int | None:
    """Bytes that anybody holds on the device; ``None``: there is no driver."""
    told = _ask(number, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle))
    return None if told is None else int(told.used)


def _ask(number: int, question: Callable[[Any, Any], T]) -> T | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return question(pynvml, _handle(pynvml, number))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _handle(pynvml: object, number: int) -> object:
    """Devices are numbered among the visible ones; the driver numbers all."""
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
    name = visible[number] if number < len(visible) else str(number)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))  # type: ignore[attr-defined]
    return pynvml.nvmlDeviceGetHandleByUUID(name)  # type: ignore[attr-defined]
