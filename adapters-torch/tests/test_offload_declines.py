"""What can't be parked, and that the reason says so."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from sie_adapters_torch import plugin
from sie_core import Declined, MemoryReport


class Quantized(torch.Tensor):
    """A tensor whose bytes are only a part of it."""


def linear(tier: Any, **more: Any) -> Any:
    net = torch.nn.Linear(256, 256).requires_grad_(False)
    return tier.engine(net=net, buffer=tier.put(net), **more)


Pair = namedtuple("Pair", "cos sin")


@pytest.mark.parametrize(
    "hang", [lambda t: (t, None), lambda t: [{"x": (1, t)}], lambda t: Pair(t, t), lambda t: frozenset([t])]
)
@pytest.mark.parametrize("listed", [False, True])
def test_device_tensors_in_tuples(tier: Any, hang: Any, listed: bool) -> None:
    """Also when the same tensor can be reached in another way."""
    buffer, (tensor,) = tier.loose(torch.randn(16))
    engine = tier.engine(buffer=buffer, first=[tensor] if listed else None, thing=hang(tensor))
    assert "immutable container" in tier.declined(engine)


def test_ordinary_tensors_in_tuples_are_nobodys_business(tier: Any) -> None:
    assert isinstance(tier.announce(linear(tier, pair=(torch.ones(3), torch.ones(3)))), int)


def test_tensor_subclasses(tier: Any) -> None:
    engine = linear(tier)
    engine.net.scale = torch.nn.Parameter(torch.randn(4).as_subclass(Quantized), requires_grad=False)
    assert "Quantized" in tier.declined(engine)


def test_quantized_tensors(tier: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give this up
        scales = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    assert "quantized" in tier.declined(linear(tier, scales=scales))


def test_sparse_tensors(tier: Any) -> None:
    assert "sparse" in tier.declined(linear(tier, sparse=torch.eye(3).to_sparse()))


def test_meta_tensors(tier: Any) -> None:
    assert "meta" in tier.declined(linear(tier, later=torch.nn.Linear(3, 3, device="meta")))


def test_weights_that_were_never_made(tier: Any) -> None:
    assert "Uninitialized" in tier.declined(linear(tier, lazy=torch.nn.LazyLinear(3)))


def test_hooks_of_accelerate(tier: Any) -> None:
    engine = linear(tier)
    engine.net._hf_hook = object()
    assert "accelerate" in tier.declined(engine)


def test_real_hooks_of_accelerate(tier: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    engine = linear(tier)
    hooks.add_hook_to_module(engine.net, hooks.ModelHook())
    assert "accelerate" in tier.declined(engine)


def test_tensors_with_hooks_or_a_history(tier: Any) -> None:
    buffer, (tensor,) = tier.loose(torch.randn(16))
    tensor.requires_grad_(True)
    engine = tier.engine(buffer=buffer, tensor=tensor)
    assert isinstance(tier.announce(engine), int)
    handle = tensor.register_hook(lambda gradient: gradient)
    assert "hooks" in tier.declined(engine)
    handle.remove()
    tensor._backward_hooks = None
    engine.view = tensor[2:4]
    assert "autograd" in tier.declined(engine)


def test_lazy_conjugates(tier: Any) -> None:
    buffer, (tensor,) = tier.loose(torch.randn(8, dtype=torch.complex64))
    assert "conjugate" in tier.declined(tier.engine(buffer=buffer, tensor=tensor, other=tensor.conj()))


def test_torchscript(tier: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(torch.nn.Linear(3, 3))
    assert "TorchScript" in tier.declined(linear(tier, script=script))


def test_opting_out(tier: Any) -> None:
    assert "host_offload" in tier.declined(linear(tier, host_offload=False))


def test_a_buffer_in_a_tuple_cannot_be_replaced(tier: Any) -> None:
    engine = linear(tier)
    engine.buffer = (engine.buffer,)
    assert "replaced" in tier.declined(engine)


def test_a_buffer_that_cannot_be_found(tier: Any) -> None:
    engine = linear(tier)
    engine.kept = (lambda buffer: queue.Queue())(engine.buffer)
    buffer = engine.__dict__.pop("buffer")
    assert "none of its tensors" in tier.declined(engine)
    buffer.free()


def test_on_the_cpu_parking_frees_nothing(tier: Any) -> None:
    engine = tier.engine(net=torch.nn.Linear(3, 3))
    engine.devices = ("cpu",)
    assert tier.declined(engine) == "its device is the CPU: parking it would free nothing"


# --- coverage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reached", "parks"), [(0.95, True), (0.85, False)])
def test_most_of_what_it_holds_must_be_found(tier: Any, reached: float, parks: bool) -> None:
    engine = linear(tier)
    engine.held = lambda: int(len(engine.buffer.view) / reached)
    if parks:
        assert isinstance(tier.announce(engine), int)
        return
    assert "can be reached" in tier.declined(engine)


def test_detached_adapters_count(tier: Any) -> None:
    """Weights of LoRA adapters that hang where the walk does not look: not moved, so not parked, unless declared."""
    buffer, (tensor,) = tier.loose(torch.randn(256, 256))
    detached: queue.Queue[Any] = queue.Queue()
    detached.put((buffer, tensor))
    engine = linear(tier, adapters=detached)
    assert "can be reached" in tier.declined(engine)
    engine.offload_roots = [{"weights": [tensor], "buffers": [buffer]}]
    assert isinstance(tier.announce(engine), int)


def test_engines_that_cannot_tell_what_they_hold(tier: Any) -> None:
    engine = linear(tier)
    engine.held = lambda: None
    assert isinstance(tier.announce(engine), int)
    engine.memory = lambda: MemoryReport({})
    assert isinstance(tier.announce(engine), int)


def test_tensors_that_share_memory_out_of_reach(tier: Any) -> None:
    """They would be left with freed memory."""
    engine = linear(tier)
    elsewhere = engine.net.weight.data
    assert "1 tensors share its memory" in tier.declined(engine)
    engine.offload_roots = [elsewhere]
    assert isinstance(tier.announce(engine), int)


class LoraController:
    """Stands in for a controller in an extension module: nothing of it can be seen from here."""

    __slots__ = ()


def test_a_lora_controller_that_cannot_be_looked_into(tier: Any) -> None:
    assert "LoRA" in tier.declined(linear(tier, lora=[LoraController()]))


def test_cuda_graphs_that_nobody_clears(tier: Any) -> None:
    class CUDAGraph:
        """Named as torch names its own, which can't be made without a GPU."""

    CUDAGraph.__module__ = "torch.cuda.graphs"
    assert "CUDA graph" in tier.declined(linear(tier, graphs={8: CUDAGraph()}))

    class Holder:
        graph = None

        def __init__(self) -> None:
            self.graph = CUDAGraph()

        def clear(self) -> None:
            self.graph = None

    assert isinstance(tier.announce(linear(tier, holder=Holder(), held=lambda: 0)), int)


def test_nothing_is_imported_for_engines_of_others() -> None:
    code = """
import json, sys
from sie_adapters_torch import plugin
from sie_core import Engine, TransitionContext
engine, ctx = Engine(), TransitionContext()
answers = [
    plugin.host_offload_bytes(engine), plugin.offload_to_host(engine, ctx), plugin.restore_from_host(engine, ctx)
]
print(json.dumps([answers, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[None, None, None], False]


def test_an_engine_that_cannot_be_looked_at_is_declined(tier: Any) -> None:
    class Odd:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise ZeroDivisionError("no attributes today")

    assert "no attributes today" in tier.declined(linear(tier, odd=Odd()))


def test_declined_is_what_the_plugin_answers(tier: Any) -> None:
    assert isinstance(plugin.host_offload_bytes(linear(tier, host_offload=False)), Declined)
