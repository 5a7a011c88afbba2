"""The host copy of an engine, and moving bytes between it and the device."""

from __future__ import annotations

import gc

import torch
from attrs import define, evolve
from sie_core import HostOutOfMemory, TransitionCancelled, TransitionContext, format_bytes

from sie_adapters_torch._bytes import copy_bytes
from sie_adapters_torch._layout import UNTRACKED, Layout, Region
from sie_adapters_torch._pinned import PinnedRange
from sie_adapters_torch._torch import bytes_of, out_of_memory

__all__ = ["HostImage", "bring_back", "check_wanted", "copy_out", "free_device_memory", "synchronise"]


_WINDOW = 64
"""Bytes that are compared after a wake."""
_SPOTS = 16


def check_wanted(ctx: TransitionContext) -> None:
    if ctx.cancelled.is_set():
        raise TransitionCancelled("no longer wanted")


@define(eq=False)
class HostImage:
    """An engine's tensors in host memory that the core owns."""

    layout: Layout
    view: memoryview
    host: torch.Tensor
    """The same memory, uint8."""
    pin: PinnedRange | None = None
    parked: bool = False
    stale: bool = False

    @classmethod
    def of(cls, layout: Layout, view: memoryview) -> HostImage:
        image = cls(layout, view, bytes_of(view))
        if any(region.device.type == "cuda" for region in layout.regions):
            image.pin = PinnedRange(image.host.data_ptr(), len(view))
        return image

    @property
    def pinned(self) -> bool:
        return self.pin is not None and self.pin.pinned

    def holds(self, layout: Layout) -> bool:
        """Whether the copy is what these tensors hold now."""
        return not self.stale and self.layout.is_still(layout)

    def is_back(self) -> bool:
        """Whether a few bytes on each device are those of the copy. Yes also where they were written since."""
        return self.stale or all(_as_copied(self, index) for index in self.layout.witnesses())

    def release(self) -> int:
        """Let go of the memory, so that the core can give it to somebody else. Returns its bytes."""
        nbytes = len(self.view)
        if self.pin is not None:
            self.pin.undo()
        self.host = torch.empty(0, dtype=torch.uint8)
        self.view.release()
        return nbytes

    def __del__(self) -> None:
        if self.pin is not None:
            self.pin.undo()  # an engine that was dropped without a word


def copy_out(old: HostImage | None, layout: Layout, ctx: TransitionContext) -> HostImage:
    """Copy every region; into the memory of an outdated copy, if there is one. Raises HostOutOfMemory."""
    if old is not None and len(old.view) >= layout.nbytes:
        image, image.stale = old, True
    elif old is not None:
        raise HostOutOfMemory(
            f"the engine has grown: its host copy has {format_bytes(len(old.view))}, and it takes "
            f"{format_bytes(layout.nbytes)} now",
            account="host", needed=layout.nbytes, free=len(old.view),
        )  # fmt: skip
    else:
        image = HostImage.of(layout, ctx.host_buffer(layout.nbytes))
    try:
        storages = layout.storages()
        for region, storage in zip(layout.regions, _by_region(layout, storages), strict=True):
            check_wanted(ctx)
            _copy(image, region, storage, out=True)
        synchronise(layout)
    except BaseException:
        if image is not old:
            image.release()
        raise
    image.stale = False
    return image


def _as_copied(image: HostImage, index: int) -> bool:
    layout = image.layout
    tensor, piece = layout.tensors[index](), layout.pieces[layout.places[index][1]]
    if tensor is None or layout.versions[index] not in (UNTRACKED, tensor._version):
        return True  # the engine has let go of it since, or has written it
    storage = tensor.untyped_storage()
    if storage.nbytes() != piece.nbytes:
        return False  # it is as empty as when it was parked
    start = layout.regions[piece.region].offset + piece.start
    copy = image.host[start : start + piece.nbytes]
    at, step = 0, max(1, piece.nbytes // _SPOTS)
    while not copy[at : at + _WINDOW].any() and at + step < piece.nbytes:
        at += step  # nothing is told by zeros: fresh memory has them, too
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.equal(there[at : at + _WINDOW].cpu(), copy[at : at + _WINDOW])


# --- moving bytes --------------------------------------------------------------------------------------


def _by_region(layout: Layout, storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """A storage in each region: on CUDA the one that is the region."""
    first = {piece.region: storage for piece, storage in zip(layout.pieces, storages, strict=True)}
    return [first[index] for index in range(len(layout.regions))]


def _copy(image: HostImage, region: Region, storage: torch.UntypedStorage, *, out: bool) -> None:
    """One region, out to the host or back. ``storage`` is the region on CUDA."""
    if region.device.type == "cpu":
        host = image.host.data_ptr() + region.offset
        target, source = (host, region.address) if out else (region.address, host)
        copy_bytes(target, source, region.nbytes)
        return
    copy = image.host[region.offset : region.offset + region.nbytes]
    device = torch.empty(0, dtype=torch.uint8, device=region.device).set_(storage)
    if out:
        copy.copy_(device, non_blocking=image.pinned)
    else:
        device.copy_(copy, non_blocking=image.pinned)


def synchronise(layout: Layout) -> None:
    for device in {region.device for region in layout.regions if region.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def free_device_memory(layout: Layout, *, collect: bool) -> None:
    for region in layout.regions:
        if region.buffer is not None:
            region.buffer.free()
    if any(region.device.type == "cuda" for region in layout.regions):
        if collect:
            gc.collect()  # what graphs recorded is often held in cycles
        torch.cuda.empty_cache()


def bring_back(image: HostImage, ctx: TransitionContext) -> None:
    """Take device memory, fill it, and let the tensors look into it. Raises DeviceOutOfMemory, with nothing taken."""
    layout = image.layout
    regions: list[Region] = []
    storages: list[torch.UntypedStorage] = []
    pieces: list[torch.UntypedStorage] = []
    try:
        for region in layout.regions:
            regions.append(_allocate(region, ctx, storages))
        pieces += _pieces(layout, regions, storages)
        for region, storage in zip(regions, storages, strict=True):
            _copy(image, region, storage, out=False)
        synchronise(layout)
    except BaseException:
        storages.clear()
        pieces.clear()
        free_device_memory(evolve(layout, regions=regions), collect=False)
        raise
    layout.point_at(pieces)
    for before, region in zip(layout.regions, regions, strict=True):
        for slot in before.slots:
            slot.put(region.buffer)
    layout.regions = regions
    layout.addresses = [piece.data_ptr() for piece in pieces]


def _allocate(region: Region, ctx: TransitionContext, storages: list[torch.UntypedStorage]) -> Region:
    """The region's new self; its storage goes to ``storages``."""
    if region.device.type == "cpu":
        buffer = ctx.device_buffer(region.account, region.nbytes)
        storage = bytes_of(buffer.view).untyped_storage()
    else:
        buffer = None
        with out_of_memory(region.account):
            storage = torch.empty(region.nbytes, dtype=torch.uint8, device=region.device).untyped_storage()
    storages.append(storage)
    return evolve(region, address=storage.data_ptr(), buffer=buffer)


def _pieces(layout: Layout, regions: list[Region], storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    pieces = []
    for piece in layout.pieces:
        region = regions[piece.region]
        if piece.nbytes == region.nbytes or region.buffer is None:
            pieces.append(storages[piece.region])
        else:
            pieces.append(bytes_of(region.buffer.view[piece.start : piece.start + piece.nbytes]).untyped_storage())
    return pieces
