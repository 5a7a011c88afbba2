"""Where an engine's device bytes lie, and where each of them goes in the host copy.

A *region* is memory that is copied in one go: a buffer of an emulated device, or a storage on CUDA. A *piece* is a
storage in a region. A *place* is how a tensor looks into a piece. Tensors that share a storage share its piece, so what
is aliased is copied once and comes back aliased.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from sie_core import Declined, DeviceBuffer

from sie_adapters_torch._walk import Found, Slot

__all__ = ["UNTRACKED", "Layout", "Piece", "Region", "lay_out"]

_ALIGN = 64
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
UNTRACKED = -1
"""The version of an inference tensor, which counts none."""


@frozen(eq=False)
class Region:
    """``nbytes`` at ``address``, copied to ``offset`` of the host copy. ``slots``: where the engine keeps its
    ``buffer``, on an emulated device."""

    account: str
    device: torch.device
    address: int
    nbytes: int
    offset: int
    buffer: DeviceBuffer | None = None
    slots: tuple[Slot, ...] = ()


@frozen(eq=False)
class Piece:
    """A storage: ``nbytes`` from ``start`` of a region."""

    region: int
    start: int
    nbytes: int


# What has to be the same for a tensor to be the one that was copied: its identity, piece, storage offset, shape,
# stride, dtype, and whether it is an inference tensor.
_Place = tuple[int, int, int, torch.Size, tuple[int, ...], torch.dtype, bool]


@define(eq=False)
class Layout:
    """The plan of a park and of the wake after it. It keeps no tensor alive."""

    regions: list[Region] = field(factory=list)
    pieces: list[Piece] = field(factory=list)
    places: list[_Place] = field(factory=list)
    tensors: list[weakref.ref[torch.Tensor]] = field(factory=list)
    versions: list[int] = field(factory=list)
    addresses: list[int] = field(factory=list)
    """Of the pieces, while they are on the device."""
    nbytes: int = 0
    """Bytes of the host copy."""
    _witnesses: list[int] | None = None

    def is_still(self, other: Layout) -> bool:
        """Whether ``other``, made later, has the same tensors in the same places, unwritten as far as they tell."""
        return (
            self.places == other.places
            and self.addresses == other.addresses
            and self.versions == other.versions
            and all(mine() is theirs() for mine, theirs in zip(self.tensors, other.tensors, strict=True))
        )

    def is_untouched(self) -> bool:
        """Whether its tensors are in their places, unwritten as far as they tell. Says nothing of other tensors."""
        for ref, place, version in zip(self.tensors, self.places, self.versions, strict=True):
            tensor = ref()
            if tensor is None or version not in (UNTRACKED, tensor._version):
                return False
            _, piece, offset, shape, stride, dtype, _ = place
            if tensor.untyped_storage().data_ptr() != self.addresses[piece] or tensor.storage_offset() != offset:
                return False
            if tensor.shape != shape or tensor.stride() != stride or tensor.dtype != dtype:
                return False
        return True

    def witnesses(self) -> list[int]:
        """Of each device a tensor that looks into its largest piece."""
        if self._witnesses is None:
            largest: dict[torch.device, tuple[int, int]] = {}
            for index, (_, piece, *_) in enumerate(self.places):
                device, nbytes = self.regions[self.pieces[piece].region].device, self.pieces[piece].nbytes
                if nbytes > largest.get(device, (0, 0))[0]:
                    largest[device] = nbytes, index
            self._witnesses = [index for _, index in largest.values()]
        return self._witnesses

    def bytes_on(self, account: str) -> int:
        """Bytes of the regions on one device; an emulated one gives out whole pages."""
        sizes = [(each.nbytes, each.buffer is not None) for each in self.regions if each.account == account]
        return sum(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE if pages else nbytes for nbytes, pages in sizes)

    def storages(self) -> list[torch.UntypedStorage]:
        """Of the pieces, as the tensors have them now."""
        found: dict[int, torch.UntypedStorage] = {}
        for ref, place in zip(self.tensors, self.places, strict=True):
            tensor = ref()
            if place[1] not in found and tensor is not None:
                found[place[1]] = tensor.untyped_storage()
        return [found[piece] for piece in range(len(self.pieces))]

    def point_at(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Let every tensor look into these storages, one a piece, as it did into its own."""
        with torch.no_grad():
            for ref, (_, piece, offset, shape, stride, dtype, inference) in zip(self.tensors, self.places, strict=True):
                tensor = ref()
                if tensor is None:
                    continue  # the engine has let go of it since
                with torch.inference_mode(inference):
                    storage: Any = storages[piece]
                    data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
                tensor.data = data

    def point_nowhere(self) -> None:
        """Leave every tensor empty, so that whoever uses one fails at once."""
        empties: dict[tuple[torch.dtype, int, bool], torch.Tensor] = {}
        for ref, (_, piece, _, _, _, dtype, inference) in zip(self.tensors, self.places, strict=True):
            tensor = ref()
            if tensor is None:
                continue
            region = self.pieces[piece].region
            empty = empties.get((dtype, region, inference))
            if empty is None:
                with torch.inference_mode(inference):
                    empty = torch.empty(0, dtype=dtype, device=self.regions[region].device)
                empties[dtype, region, inference] = empty
            tensor.data = empty


def lay_out(found: Found, devices: Sequence[str]) -> Layout | Declined:
    """Plan the copy of what was found on these accounts."""
    if found.problem is not None:
        return Declined(found.problem)
    emulated = [account for account in devices if account.startswith("emulated")]
    builder = _Builder(found, emulated)
    if builder.ranges and len(emulated) > 1:
        return Declined("its buffers lie on several emulated devices, and none says on which")
    for tensor in found.tensors:
        problem = builder.add(tensor)
        if problem is not None:
            return Declined(problem)
    problem = builder.shared_unseen() or builder.overlapping()
    return builder.layout if problem is None else Declined(problem)


class _Builder:
    def __init__(self, found: Found, emulated: Sequence[str]) -> None:
        self.layout = Layout()
        self._found = found
        self._account = emulated[0] if emulated else ""
        self.ranges = [(*_range(buffer), buffer) for buffer in found.buffers] if emulated else []
        self._piece_of: dict[int, int] = {}
        self._region_of: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._holders: list[int] = []

    def add(self, tensor: torch.Tensor) -> str | None:
        """Give a tensor its place, if it is on a device. Returns why it can't be moved."""
        kind = type(tensor)
        if kind not in _ORDINARY:
            return f"a weight is a {kind.__name__}, whose parts can't be moved one by one (quantized?)"
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return "a tensor is sparse or quantized"
        device = tensor.device
        if device.type == "meta":
            return "a tensor is on the meta device: its weights are elsewhere"
        storage = tensor.untyped_storage()
        piece = self._piece_of.get(storage._cdata)
        if piece is None:
            nbytes = storage.nbytes()
            if not nbytes or (device.type == "cpu" and not self.ranges):
                return None
            piece = self._new_piece(storage, device, nbytes)
            if piece is None:
                return None  # in ordinary memory
        return self._place(tensor, piece)

    def _place(self, tensor: torch.Tensor, piece: int) -> str | None:
        if id(tensor) in self._found.tupled:
            return f"a device tensor sits in an immutable container: {self._found.tupled[id(tensor)]}"
        if tensor.grad_fn is not None or tensor._backward_hooks:
            return "a tensor is part of an autograd graph, or has hooks"
        if tensor.is_conj() or tensor.is_neg():
            return "a tensor is a lazy conjugate"
        layout, inference = self.layout, tensor.is_inference()
        self._holders[piece] += 1
        layout.tensors.append(weakref.ref(tensor))
        layout.versions.append(UNTRACKED if inference else tensor._version)
        layout.places.append(
            (id(tensor), piece, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype, inference)
        )
        return None

    def _new_piece(self, storage: torch.UntypedStorage, device: torch.device, nbytes: int) -> int | None:
        address = storage.data_ptr()
        if device.type == "cpu":
            inside = next((each for each in self.ranges if each[0] <= address < each[1]), None)
            if inside is None:
                return None
            region = self._region(inside[0], inside[1] - inside[0], self._account, device, inside[2])
            start = address - inside[0]
        else:
            region, start = self._region(address, nbytes, str(device), device, None), 0
        self.layout.pieces.append(Piece(region, start, nbytes))
        self.layout.addresses.append(address)
        self._storages.append(storage)
        self._holders.append(0)
        piece = self._piece_of[storage._cdata] = len(self.layout.pieces) - 1
        return piece

    def _region(
        self, address: int, nbytes: int, account: str, device: torch.device, buffer: DeviceBuffer | None
    ) -> int:
        if buffer is not None and id(buffer) in self._region_of:
            return self._region_of[id(buffer)]
        layout = self.layout
        slots = tuple(self._found.slots[id(buffer)]) if buffer is not None else ()
        offset = -(-layout.nbytes // _ALIGN) * _ALIGN
        layout.regions.append(Region(account, device, address, nbytes, offset, buffer, slots))
        layout.nbytes = offset + nbytes
        if buffer is not None:
            self._region_of[id(buffer)] = len(layout.regions) - 1
        return len(layout.regions) - 1

    def shared_unseen(self) -> str | None:
        """Tensors that the walk did not reach, and that look into the same memory: they would be left behind."""
        count = getattr(torch._C, "_storage_Use_Count", None)
        if count is None:
            return None
        unseen = sum(
            max(0, count(storage._cdata) - 1 - known)
            for storage, known in zip(self._storages, self._holders, strict=True)
        )
        if unseen:
            return f"{unseen} tensors share its memory and can't be reached from it; declare them as offload_roots"
        return None

    def overlapping(self) -> str | None:
        """Two storages over the same memory of a GPU can't be made again."""
        end: dict[str, int] = {}
        for region in sorted(self.layout.regions, key=lambda region: region.address):
            if region.address < end.get(region.account, 0):
                return "two storages lie over each other"
            end[region.account] = region.address + region.nbytes
        return None


def _range(buffer: DeviceBuffer) -> tuple[int, int]:
    """Addresses of a device buffer; an empty range if it is freed."""
    try:
        array = np.asarray(buffer.view)
    except ValueError:
        return 0, 0
    address: int = array.__array_interface__["data"][0]
    return address, address + array.nbytes
