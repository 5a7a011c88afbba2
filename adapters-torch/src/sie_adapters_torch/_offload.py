"""Parking and waking engines made of torch tensors: device memory to one host buffer and back.

Parameters keep their identity, because only what they look into is exchanged: while parked every tensor is empty, after
the wake each looks at its bytes as before. The host buffer is kept after a wake where the engine can drop it on
request: weights do not change while serving, so the next park needs no copy. In-place writes are seen by the versions
that tensors count. Writes through ``.data`` and writes to inference tensors are counted by nobody: whoever makes them
says so with :func:`mark_stale`.
"""

from __future__ import annotations

import ctypes
import gc

import torch
from attrs import define, evolve
from sie_core import (
    Declined,
    Engine,
    HostOffload,
    HostOutOfMemory,
    HostResidue,
    TransitionCancelled,
    TransitionContext,
    TransitionError,
    format_bytes,
)

from sie_adapters_torch._layout import Layout, Region, lay_out
from sie_adapters_torch._pinned import PinnedRange
from sie_adapters_torch._torch import bytes_of, out_of_memory
from sie_adapters_torch._walk import IMAGE, Found, walk

__all__ = ["OffloadsTensors", "announce", "drop_backup", "forget", "is_parked", "mark_stale", "offload", "restore"]

_COVERED = 0.9
"""An engine that holds more than this leaves out is not parked: most of what it would free is not to be had."""


class OffloadsTensors(Engine):
    """An engine whose tensors are parked here and that keeps its host copy after a wake, until told to drop it.

    Call :func:`forget` in ``close``.
    """

    @property
    def parked(self) -> bool:
        """Whether its tensors are on the host only."""
        return is_parked(self)

    def drop_backup(self) -> int:
        return drop_backup(self)

    def mark_stale(self) -> None:
        """Weights were written in a way that torch does not count: the next park copies again."""
        mark_stale(self)


# --- what an engine may ask for ------------------------------------------------------------------------


def is_parked(engine: Engine) -> bool:
    """Whether the engine's tensors are on the host only."""
    image = _image(engine)
    return image is not None and image.parked


def drop_backup(engine: Engine) -> int:
    """Drop the copy that survived a wake. Returns the bytes freed; 0: there is none, or it is all there is."""
    image = _image(engine)
    return 0 if image is None or image.parked else forget(engine)


def forget(engine: Engine) -> int:
    """Let go of the host copy, whatever it is worth. Returns its bytes. Idempotent."""
    image: _Image | None = vars(engine).pop(IMAGE, None)
    return image.release() if image is not None else 0


def mark_stale(engine: Engine) -> None:
    """The engine's weights were written in a way that torch does not count: the next park copies again."""
    image = _image(engine)
    if image is not None:
        image.stale = True


def _image(engine: Engine) -> _Image | None:
    image: _Image | None = vars(engine).get(IMAGE)
    return image


# --- the hooks -----------------------------------------------------------------------------------------


def announce(engine: Engine) -> int | Declined | None:
    """The answer to ``host_offload_bytes``."""
    image = _image(engine)
    if image is not None and image.parked:
        return image.layout.nbytes
    if getattr(engine, "host_offload", True) is False:
        return Declined("it says host_offload = False")
    planned = _plan(engine, walk(engine))
    if planned is None or isinstance(planned, Declined):
        return planned
    return _uncovered(engine, planned) or planned.nbytes


def offload(engine: Engine, ctx: TransitionContext) -> HostOffload | None:
    """The answer to ``offload_to_host``.

    Raises:
        TransitionError, HostOutOfMemory, TransitionCancelled: nothing was changed.
    """
    image = _image(engine)
    if image is not None and image.parked:
        return HostOffload(image.layout.nbytes)
    found = walk(engine)
    cleared = bool(found.graphs)
    if cleared:
        for graph in found.graphs:
            graph.clear()
        found = walk(engine)
    layout = _plan(engine, found)
    del found
    if layout is None:
        return None
    if isinstance(layout, Declined):
        raise TransitionError(f"the engine can't be parked: {layout.reason}")
    _check_wanted(ctx)
    if image is None or not image.holds(layout):
        declined = _uncovered(engine, layout)
        if declined is not None:
            raise TransitionError(f"the engine can't be parked: {declined.reason}")
        image = _copy_out(engine, image, layout, ctx)
    image.layout = layout
    layout.point_nowhere()
    image.parked = True
    _free_device_memory(layout, collect=cleared)
    return HostOffload(layout.nbytes)


def restore(engine: Engine, ctx: TransitionContext) -> HostResidue | None:
    """The answer to ``restore_from_host``.

    Raises:
        DeviceOutOfMemory, TransitionCancelled: the engine is parked as before.
    """
    image = _image(engine)
    if image is None:
        return None
    if image.parked:
        _check_wanted(ctx)
        _bring_back(image, ctx)
        image.parked = False
        if not isinstance(engine, OffloadsTensors):
            forget(engine)  # nobody could ask it to drop the copy
            return HostResidue()
    return HostResidue(image.layout.nbytes, droppable=True)


def _check_wanted(ctx: TransitionContext) -> None:
    if ctx.cancelled.is_set():
        raise TransitionCancelled("no longer wanted")


def _plan(engine: Engine, found: Found) -> Layout | Declined | None:
    if not found.tensors:
        return None
    devices = [account for account in engine.devices if account.partition(":")[0] != "cpu"]
    if not devices:
        return Declined("its device is the CPU: parking it would free nothing")
    layout = lay_out(found, devices)
    if isinstance(layout, Layout) and not layout.regions:
        return Declined(f"none of its tensors is on {', '.join(devices)}")
    return layout


def _uncovered(engine: Engine, layout: Layout) -> Declined | None:
    """Whether the engine says that it holds much more than what was found."""
    try:
        report = engine.memory().devices
    except NotImplementedError:
        return None
    for account, held in report.items():
        if held is None or account.partition(":")[0] == "cpu":
            continue
        reached = layout.bytes_on(account)
        if reached < _COVERED * held:
            return Declined(
                f"only {format_bytes(reached)} of the {format_bytes(held)} that it holds on {account} can be reached "
                "from its attributes; declare the rest as offload_roots"
            )
    return None


# --- the host copy -------------------------------------------------------------------------------------


@define(eq=False)
class _Image:
    """An engine's tensors in host memory that the core owns."""

    layout: Layout
    view: memoryview
    host: torch.Tensor
    """The same memory, uint8."""
    pin: PinnedRange | None = None
    parked: bool = False
    stale: bool = False

    @classmethod
    def of(cls, layout: Layout, view: memoryview) -> _Image:
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


def _copy_out(engine: Engine, old: _Image | None, layout: Layout, ctx: TransitionContext) -> _Image:
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
        image = _Image.of(layout, ctx.host_buffer(layout.nbytes))
    try:
        storages = layout.storages()
        for region, storage in zip(layout.regions, _by_region(layout, storages), strict=True):
            _check_wanted(ctx)
            _copy(image, region, storage, out=True)
        _synchronise(layout)
    except BaseException:
        if image is not old:
            image.release()
        raise
    image.stale = False
    vars(engine)[IMAGE] = image
    return image


# --- moving bytes --------------------------------------------------------------------------------------


def _by_region(layout: Layout, storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    """A storage in each region: on CUDA the one that is the region."""
    first = {piece.region: storage for piece, storage in zip(layout.pieces, storages, strict=True)}
    return [first[index] for index in range(len(layout.regions))]


def _copy(image: _Image, region: Region, storage: torch.UntypedStorage, *, out: bool) -> None:
    """One region, out to the host or back. ``storage`` is the region on CUDA."""
    if region.device.type == "cpu":
        host = image.host.data_ptr() + region.offset
        target, source = (host, region.address) if out else (region.address, host)
        ctypes.memmove(target, source, region.nbytes)  # without the interpreter's lock
        return
    copy = image.host[region.offset : region.offset + region.nbytes]
    device = torch.empty(0, dtype=torch.uint8, device=region.device).set_(storage)
    if out:
        copy.copy_(device, non_blocking=image.pinned)
    else:
        device.copy_(copy, non_blocking=image.pinned)


def _synchronise(layout: Layout) -> None:
    for device in {region.device for region in layout.regions if region.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def _free_device_memory(layout: Layout, *, collect: bool) -> None:
    for region in layout.regions:
        if region.buffer is not None:
            region.buffer.free()
    if any(region.device.type == "cuda" for region in layout.regions):
        if collect:
            gc.collect()  # what graphs recorded is often held in cycles
        torch.cuda.empty_cache()


def _bring_back(image: _Image, ctx: TransitionContext) -> None:
    """Take device memory, fill it, and let the tensors look into it. Raises DeviceOutOfMemory, with nothing taken."""
    layout = image.layout
    regions: list[Region] = []
    storages: list[torch.UntypedStorage] = []
    try:
        for region in layout.regions:
            regions.append(_allocate(region, ctx, storages))
        pieces = _pieces(layout, regions, storages)
        for region, storage in zip(regions, storages, strict=True):
            _copy(image, region, storage, out=False)
        _synchronise(layout)
    except BaseException:
        storages.clear()
        _free_device_memory(evolve(layout, regions=regions), collect=False)
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
    return evolve(region, address=storage.data_ptr(), buffer=buffer, slots=())


def _pieces(layout: Layout, regions: list[Region], storages: list[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    pieces = []
    for piece in layout.pieces:
        region = regions[piece.region]
        if piece.nbytes == region.nbytes or region.buffer is None:
            pieces.append(storages[piece.region])
        else:
            pieces.append(bytes_of(region.buffer.view[piece.start : piece.start + piece.nbytes]).untyped_storage())
    return pieces
