"""The edge to torch: errors translated by type, threads, devices, and where tensors' bytes are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from sie_core import DeviceBuffer, DeviceOutOfMemory, HostOutOfMemory

__all__ = [
    "DTYPES",
    "MAKING",
    "Tensors",
    "bytes_of",
    "computes",
    "free_all",
    "out_of_memory",
    "place_in_buffer",
    "realised_bytes",
    "torch_device",
]

MAKING = threading.Lock()
"""Held while transformers makes a model: it patches its classes and torch's default dtype meanwhile, for all threads.

Two at a time, a head that shares its weights with the embeddings is reported as missing, or left random.
"""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SLOT = 64  # a cache line: kernels read aligned weights faster


def torch_device(account: str) -> torch.device:
    """The torch device behind an account. Tensors of an emulated device are in RAM."""
    return torch.device("cpu" if account.startswith("emulated") else account)


def computes(accounts: Iterable[str]) -> bool:
    """Whether each device adds up right, waited for. Raises what torch raises where one is broken."""
    sums = [torch.ones(4, device=device).sum() for device in {torch_device(account) for account in accounts}]
    return all(each.item() == 4.0 for each in sums)


@contextmanager
def out_of_memory(account: str, *, loading: bool = False) -> Iterator[None]:
    """Turn torch's ways of running out of memory into SIE's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(str(error).splitlines()[0], account=account) from error
    except (MemoryError, RuntimeError) as error:
        # The CPU allocator has no type of its own for this.
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        message = f"the host ran out of memory: {str(error).splitlines()[0] if str(error) else 'MemoryError'}"
        if loading:
            raise HostOutOfMemory(message, account="host") from error
        raise DeviceOutOfMemory(message, account=account) from error


# --- where the bytes are ---------------------------------------------------------------------------


Tensors = torch.nn.Module | Iterable[torch.Tensor]
"""Tensors, or a module for its parameters and buffers."""


def _tensors(what: Tensors) -> Iterator[torch.Tensor]:
    if isinstance(what, torch.nn.Module):
        yield from what.parameters()
        yield from what.buffers()
    else:
        yield from what


def realised_bytes(what: Tensors) -> int:
    """Bytes of all storages behind the tensors, each storage once however many tensors share it."""
    seen = {}
    for tensor in _tensors(what):
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def place_in_buffer(what: Tensors, allocate: Callable[[int], DeviceBuffer]) -> DeviceBuffer:
    """Move tensors of the CPU into one buffer; those that shared memory still do.

    Raises whatever ``allocate`` raises; the tensors are unchanged then.
    """
    tensors: dict[int, list[torch.Tensor]] = {}
    for tensor in _tensors(what):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            tensors.setdefault(storage.data_ptr(), []).append(tensor)
    places, end = {}, 0
    for address, sharers in tensors.items():
        places[address] = end
        end += -(-sharers[0].untyped_storage().nbytes() // _SLOT) * _SLOT
    buffer = allocate(end)
    arena = bytes_of(buffer.view[:end])
    whole = arena.untyped_storage()
    base = arena.storage_offset()
    for address, sharers in tensors.items():
        size = sharers[0].untyped_storage().nbytes()
        source = torch.empty(0, dtype=torch.uint8).set_(sharers[0].untyped_storage())
        arena[places[address] : places[address] + size].copy_(source)
        for tensor in sharers:
            offset = (base + places[address]) // tensor.element_size() + tensor.storage_offset()
            moved = torch.empty(0, dtype=tensor.dtype).set_(whole, offset, tensor.shape, tensor.stride())
            tensor.data = moved
    return buffer


def bytes_of(view: memoryview) -> torch.Tensor:
    """A tensor over the bytes of a view, uint8.

    By way of numpy, which tells the memory's owner that somebody looks; ``torch.frombuffer`` does not, and the owner
    would give the memory to somebody else under a tensor that was forgotten.
    """
    return torch.from_numpy(np.frombuffer(view, dtype=np.uint8))


def free_all(what: Tensors) -> None:
    """Let go of every tensor's memory, whoever else still holds the tensor."""
    for tensor in _tensors(what):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
