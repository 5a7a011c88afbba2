"""What only a real device does: run out of memory while an engine comes back, and answer like before afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sie_adapters_torch import plugin
from sie_adapters_torch.offload import OffloadsTensors, forget
from sie_core import DeviceOutOfMemory, HostOffload, HostResidue, MemoryReport, TransitionContext
from sie_core.memory.arena import Arena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

MIB = 1024 * 1024
LAYERS, WIDTH = 16, 2048
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


class Stack(OffloadsTensors):
    """256 MiB of layers."""

    devices = ("cuda:0",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.net = torch.nn.Sequential(*layers).requires_grad_(False).to("cuda:0")
        self.input = torch.ones(4, WIDTH, device="cuda:0")

    def memory(self) -> MemoryReport:
        return MemoryReport({"cuda:0": sum(each.nbytes for each in self.net.parameters())})

    def answer(self) -> torch.Tensor:
        return self.net(self.input).cpu()


@pytest.fixture
def stack() -> Iterator[Stack]:
    torch.cuda.empty_cache()
    engine = Stack()
    yield engine
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    forget(engine)
    del engine
    torch.cuda.empty_cache()


def parked(engine: Stack) -> TransitionContext:
    arena = Arena()
    ctx = TransitionContext(host_buffer=lambda nbytes: arena.take(nbytes).view)
    assert isinstance(plugin.offload_to_host(engine, ctx), HostOffload)
    assert engine.parked
    return ctx


def test_a_wake_that_finds_no_room_leaves_the_copy_whole(stack: Stack) -> None:
    before = stack.answer()
    ctx = parked(stack)
    total = torch.cuda.get_device_properties(0).total_memory
    held = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + WEIGHTS // 2) / total), 0)
    with pytest.raises(DeviceOutOfMemory):
        plugin.restore_from_host(stack, ctx)
    assert stack.parked
    assert torch.cuda.memory_reserved() <= held + 2 * MIB  # what it had taken by then is back
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert isinstance(plugin.restore_from_host(stack, ctx), HostResidue)
    assert torch.equal(stack.answer(), before)


def test_weights_that_were_written_are_copied_again(stack: Stack) -> None:
    ctx = parked(stack)
    plugin.restore_from_host(stack, ctx)
    stack.net[0].weight.mul_(2)
    written = stack.answer()
    plugin.offload_to_host(stack, ctx)
    plugin.restore_from_host(stack, ctx)
    assert torch.equal(stack.answer(), written)
