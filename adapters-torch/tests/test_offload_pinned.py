"""Page-locked copies: the calls to CUDA's runtime, with a stand-in for it; and parking on a GPU, where there is one.

The stand-in is needed because the failures (a low memlock limit) can't be brought about at will.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from sie_adapters_torch import plugin
from sie_adapters_torch._pinned import PinnedRange
from sie_adapters_torch.offload import OffloadsTensors
from sie_core import MemoryReport, TransitionContext
from sie_core.memory.arena import Arena

MIB = 1024 * 1024


class Runtime:
    """Answers as ``torch.cuda.cudart()`` does, with an error code."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.code


def test_locked_once_and_unlocked_once() -> None:
    runtime = Runtime()
    pin = PinnedRange(4096, 100, runtime)
    assert pin.pinned
    pin.undo()
    pin.undo()
    assert not pin.pinned
    assert runtime.calls == [("register", 4096), ("unregister", 4096)]


def test_memory_that_cannot_be_locked_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(code=2)
    with caplog.at_level(logging.WARNING):
        pin = PinnedRange(4096, 3 * MIB, runtime)
    assert not pin.pinned
    assert "3.0 MiB of host memory can't be page-locked (CUDA error 2" in caplog.text
    pin.undo()
    assert runtime.calls == [("register", 4096)]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class OnTheGpu(OffloadsTensors):
    devices = ("cuda:0",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(16)))
        self.net.requires_grad_(False).to("cuda:0")
        self.tied = [self.net[0].weight, self.net[0].weight[4:8].t()]
        self.graph: Any = None
        self.input = torch.ones(4, 2048, device="cuda:0")
        self.output: Any = None

    def memory(self) -> MemoryReport:
        return MemoryReport({"cuda:0": sum(each.nbytes for each in self.net.parameters())})

    def record(self) -> None:
        self.net(self.input)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self.net(self.input)

    def clear(self) -> None:
        self.graph = self.output = None


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu() -> None:
    arena, engine = Arena(), OnTheGpu()
    answer = engine.net(engine.input).cpu()
    engine.record()
    announced = plugin.host_offload_bytes(engine)
    assert isinstance(announced, int)
    blocks: list[Any] = []

    def host_buffer(nbytes: int) -> memoryview:
        blocks.append(arena.take(nbytes))
        view: memoryview = blocks[-1].view
        return view

    ctx = TransitionContext(host_buffer=host_buffer)
    for _ in range(3):
        before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        plugin.offload_to_host(engine, ctx)
        assert before - torch.cuda.memory_allocated() >= 256 * MIB
        assert torch.cuda.mem_get_info()[0] - free >= 240 * MIB
        assert engine.graph is None
        plugin.restore_from_host(engine, ctx)
        assert torch.equal(engine.net(engine.input).cpu(), answer)
        assert engine.tied[1].data_ptr() == engine.net[0].weight[4:8].data_ptr()
        engine.record()
        engine.graph.replay()
        assert torch.equal(engine.output.cpu(), answer)
    assert len(blocks) == 1  # later parks copied nothing
    assert engine.drop_backup() >= 256 * MIB
    arena.give_back(blocks.pop())
    assert arena.idle >= 256 * MIB
