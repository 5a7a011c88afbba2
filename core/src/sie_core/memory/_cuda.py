"""CUDA devices as NVML sees them. No CUDA context is made, so that looking costs no device memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal

from sie_core.adapter import DeviceBuffer
from sie_core.units import format_bytes

_log = logging.getLogger(__name__)


class CudaDevice:
    """One device. ``name`` counts as CUDA does, after ``CUDA_VISIBLE_DEVICES``: ``cuda:0`` is torch's ``cuda:0``."""

    kind: Literal["cuda", "cpu", "emulated"] = "cuda"

    def __init__(self, name: str, handle: Any, *, nvml: Any) -> None:
        self.name = name
        self._handle = handle
        self._nvml = nvml
        self._total = int(self._memory().total)
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.description = f"{_text(nvml.nvmlDeviceGetName(handle))}, {format_bytes(self._total)}"

    def total(self) -> int:
        """Bytes of the device, what the driver keeps for itself included."""
        return self._total

    def used(self) -> int | None:
        """Bytes that nobody else can have: taken by any process, or kept by the driver. ``None``: it won't say."""
        try:
            memory = self._memory()
        except self._nvml.NVMLError as error:
            _log.warning("%s: the driver does not tell its memory in use: %s", self.name, error)
            return None
        # Not `used`: from its second version on, that leaves out what the driver reserves.
        return int(memory.total) - int(memory.free)

    def process_used(self, pid: int) -> int | None:
        """Bytes of one process; ``None`` where the driver does not tell, as in most containers."""
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        sizes = [process.usedGpuMemory for process in processes if process.pid == pid]
        return sum(sizes) if sizes and all(size is not None for size in sizes) else None

    def allocate(self, nbytes: int) -> DeviceBuffer:
        raise TypeError(f"{self.name} is no emulated device: frameworks allocate there themselves")

    def _memory(self) -> Any:
        nvml = self._nvml
        version = getattr(nvml, "nvmlMemory_v2", None)
        if version is not None:
            try:
                return nvml.nvmlDeviceGetMemoryInfo(self._handle, version=version)
            except (TypeError, nvml.NVMLError):
                pass  # an older driver, or an older binding
        return nvml.nvmlDeviceGetMemoryInfo(self._handle)


def probe_cuda(environ: Mapping[str, str] | None = None, *, nvml: Any = None) -> list[CudaDevice]:
    """The devices that CUDA would show this process, in its order. Empty without a driver; never raises for absence."""
    environ = os.environ if environ is None else environ
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # No driver is the normal case on a machine without a GPU; a driver that is broken is worth a line.
        known = getattr(nvml, "NVML_ERROR_LIBRARY_NOT_FOUND", None)
        if getattr(error, "value", None) != known:
            _log.warning("NVIDIA devices can't be used: %s", error)
        return []
    devices: list[CudaDevice] = []
    for handle in _visible(environ, nvml):
        try:
            devices.append(CudaDevice(f"cuda:{len(devices)}", handle, nvml=nvml))
        except nvml.NVMLError as error:
            # Leaving it out would shift the names of those behind it away from CUDA's.
            _log.warning("CUDA devices from number %d on are left out, it can't be read: %s", len(devices), error)
            break
    _warn_of_order(devices, environ)
    return devices


def _visible(environ: Mapping[str, str], nvml: Any) -> list[Any]:
    """Handles in CUDA's order. As in CUDA, a list counts up to its first entry that names nothing."""
    count = nvml.nvmlDeviceGetCount()
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles: list[Any] = []
    seen: set[str] = set()
    for word in (part.strip() for part in wanted.split(",")):
        handle = _find(word, count, nvml)
        if handle is None:
            break
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        if uuid in seen:
            _log.warning("CUDA_VISIBLE_DEVICES names one device twice, for which CUDA shows none: %s", wanted)
            return []
        seen.add(uuid)
        handles.append(handle)
    return handles


def _find(word: str, count: int, nvml: Any) -> Any | None:
    """A device by number, by UUID, or by a beginning of its UUID that no other has."""
    if word.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(word)) if int(word) < count else None
    if word.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(word)
        except nvml.NVMLError:
            return None
    if not word.startswith("GPU-"):
        return None
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    found = [handle for handle in handles if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(word)]
    return found[0] if len(found) == 1 else None


def _warn_of_order(devices: list[CudaDevice], environ: Mapping[str, str]) -> None:
    """Where the devices differ, CUDA counts the fastest first and NVML by slot, and only CUDA knows which is which."""
    kinds = {device.description for device in devices}
    if len(kinds) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        _log.warning("this machine has different CUDA devices: set CUDA_DEVICE_ORDER=PCI_BUS_ID so that names agree")


def _text(value: str | bytes) -> str:
    """Older bindings answer with bytes."""
    return value.decode() if isinstance(value, bytes) else value
