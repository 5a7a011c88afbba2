"""Parking engines that other authors wrote: whatever their tensors hang on comes back as it was."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from sie_adapters_torch import plugin
from sie_adapters_torch.offload import OffloadsTensors, forget, mark_stale
from sie_core import (
    Declined,
    DeviceOutOfMemory,
    Engine,
    HostOutOfMemory,
    HostResidue,
    MemoryReport,
    TransitionCancelled,
    TransitionError,
)

MIB = 1024 * 1024


class Net(torch.nn.Module):
    """Parameters (two of them tied), buffers, an attribute that is a plain tensor, and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("table", torch.arange(40, dtype=torch.int64), persistent=False)
        self.eval().requires_grad_(False)

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.embed(ids)))


class Keeper(OffloadsTensors):
    """An engine that keeps its host copy after a wake."""

    def __init__(self, tier: Any, module: torch.nn.Module) -> None:
        self.devices = ("emulated:0",)
        self.module, self.buffer = module, tier.put(module)

    def memory(self) -> MemoryReport:
        return MemoryReport({"emulated:0": len(self.buffer.view)} if not self.parked else {"emulated:0": 0})


IDS = torch.tensor([3, 7, 49, 0])


def look(*tensors: torch.Tensor) -> list[Any]:
    """What has to come back: bytes, place in the storage, and who shares whose storage."""
    first: dict[int, int] = {}
    shared = [first.setdefault(tensor.untyped_storage()._cdata, index) for index, tensor in enumerate(tensors)]
    return [
        (t.tolist(), t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.is_inference(),
         t.untyped_storage().nbytes(), sharer)
        for t, sharer in zip(tensors, shared, strict=True)
    ]  # fmt: skip


def there_and_back(tier: Any, engine: Engine, *tensors: torch.Tensor) -> None:
    """Park and wake: the device is empty in between, every tensor too, and all of it comes back."""
    before, held = look(*tensors), tier.device.used()
    assert held > 0
    for _ in range(2):
        tier.park(engine)
        assert tier.device.used() == 0
        assert all(tensor.numel() == 0 for tensor in tensors)
        assert tier.wake(engine) == HostResidue()
        assert tier.device.used() == held
        assert look(*tensors) == before


# --- where tensors hang --------------------------------------------------------------------------------


def test_a_module_with_tied_weights_and_buffers(tier: Any) -> None:
    net = Net()
    buffer = tier.put(net)
    engine = tier.engine(net=net, buffer=buffer)
    answer, parameters = net(IDS).clone(), list(net.parameters())
    there_and_back(tier, engine, *net.parameters(), *net.buffers())
    assert engine.buffer is not buffer
    assert all(new is old for new, old in zip(net.parameters(), parameters, strict=True))
    assert net.head.weight is net.embed.weight
    assert torch.equal(net(IDS), answer)


@attrs.define
class Slotted:
    tensor: Any = None
    unset: Any = attrs.field(init=False)


class Pipeline:
    """A wrapper around a model, as transformers has them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.task = "feature-extraction"


class Cache(dict[str, Any]):
    """A container of a class of its own, with attributes beside its items."""


def _closure(tensor: torch.Tensor) -> Any:
    return lambda: tensor


def _attribute(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Identity()
    object.__setattr__(module, "plain", tensor)
    return module


def _on_a_tensor(tensor: torch.Tensor) -> torch.Tensor:
    outer = torch.zeros(1)
    outer.scale = tensor  # type: ignore[attr-defined]
    return outer


def _cached(tensor: torch.Tensor) -> Cache:
    cache = Cache()
    cache.beside = tensor  # type: ignore[attr-defined]
    return cache


@pytest.mark.parametrize(
    "hang",
    [
        lambda tensor: tensor,
        lambda tensor: {"a": {"b": tensor}},
        lambda tensor: [[1, "two", [tensor]]],
        lambda tensor: {"deep": [OrderedDict(x=deque([tensor]))]},
        lambda tensor: {tensor},
        lambda tensor: Slotted(tensor),
        lambda tensor: SimpleNamespace(inner=SimpleNamespace(tensor=tensor)),
        lambda tensor: Pipeline(torch.nn.ModuleList([_attribute(tensor)])),
        lambda tensor: _attribute(tensor),
        lambda tensor: torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False)]),
        lambda tensor: _closure(tensor),
        lambda tensor: functools.partial(torch.add, other=tensor),
        lambda tensor: Slotted(tensor).__repr__,
        lambda tensor: _on_a_tensor(tensor),
        lambda tensor: _cached(tensor),
        lambda tensor: (Slotted(tensor), {"a": 1}),
    ],
)
def test_every_place_is_found(tier: Any, hang: Any) -> None:
    buffer, (tensor,) = tier.loose(torch.randn(5, 7))
    engine = tier.engine(buffers=[buffer], thing=hang(tensor))
    held = [tensor]
    if isinstance(engine.thing, torch.nn.ParameterList):
        held = list(engine.thing)
        tensor = held[0]
    del held
    there_and_back(tier, engine, tensor)


def test_declared_roots_are_walked(tier: Any) -> None:
    buffer, (a, b) = tier.loose(torch.randn(8), torch.randn(8))
    hidden: Any = weakref.ref(a)  # the walk follows no weak references
    engine = tier.engine(buffer=buffer, hidden=hidden, seen=b)
    engine.held = lambda: 64
    engine.offload_roots = lambda: [hidden()]
    there_and_back(tier, engine, a, b)


def test_the_walk_stops_at_other_engines_and_at_the_core(tier: Any) -> None:
    mine, (a,) = tier.loose(torch.randn(8))
    theirs, (b,) = tier.loose(torch.randn(8))
    neighbour = tier.engine(tensor=b, buffer=theirs)
    engine = tier.engine(tensor=a, buffer=mine, neighbours=[neighbour])
    engine.held = lambda: len(mine.view)
    tier.park(engine)
    assert a.numel() == 0
    assert b.numel() == 8
    tier.wake(engine)


def test_two_buffers_and_ordinary_memory(tier: Any) -> None:
    """Each buffer is copied whole and replaced where it is kept; what is not on the device stays."""
    one, (a, b) = tier.loose(torch.randn(3, 3), torch.arange(5))
    two, (c,) = tier.loose(torch.randn(1000).to(torch.bfloat16))
    ordinary = torch.randn(4)
    engine = tier.engine(weights={"x": a, "y": [b]}, c=c, ordinary=ordinary, buffers={"one": one, "two": [two]})
    again = engine.buffers["two"]
    before = ordinary.data_ptr()
    there_and_back(tier, engine, a, b, c)
    assert engine.buffers["one"] is not one
    assert again[0] is not two
    assert ordinary.data_ptr() == before
    engine.buffers["one"].free()
    again[0].free()
    assert tier.device.used() == 0


# --- aliases -------------------------------------------------------------------------------------------


def test_views_come_back_as_views(tier: Any) -> None:
    buffer, (base,) = tier.loose(torch.arange(60, dtype=torch.float32))
    grid = base.view(6, 10)
    views = [grid.t(), grid[1:4, 2:9:3], grid[2], base[7:8], base.view(torch.int32)[3:5], grid.expand(2, 6, 10)]
    engine = tier.engine(base=base, views=views, buffer=buffer, grid=grid)
    assert tier.announce(engine) == 240 + 16  # once, whatever looks into it
    there_and_back(tier, engine, base, grid, *views)
    base[12] = -1.0
    assert grid[1, 2] == -1.0
    assert views[1][0, 0] == -1.0


def test_a_view_whose_base_nobody_else_holds(tier: Any) -> None:
    """A view keeps its base alive, and the base the device memory."""
    buffer, tensors = tier.loose(torch.arange(60.0))
    engine = tier.engine(view=tensors.pop()[10:20].view(2, 5), buffer=buffer)
    there_and_back(tier, engine, engine.view, engine.view._base)


def test_tensors_made_under_inference_mode(tier: Any) -> None:
    with torch.inference_mode():
        buffer, (tensor,) = tier.loose(torch.randn(9))
    assert tensor.is_inference()
    there_and_back(tier, tier.engine(tensor=tensor, buffer=buffer), tensor)


def test_parameters_that_could_be_trained(tier: Any) -> None:
    net = torch.nn.Linear(4, 4)
    engine = tier.engine(net=net, buffer=tier.put(net))
    there_and_back(tier, engine, net.weight, net.bias)
    assert net.weight.requires_grad


def test_one_copy_for_one_buffer(tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20))).requires_grad_(False)
    engine = tier.engine(net=net, buffer=tier.put(net))
    copies: list[int] = []
    real = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, source, n: (copies.append(n), real(to, source, n))[1])
    tier.park(engine)
    tier.wake(engine)
    assert copies == [len(engine.buffer.view)] * 2


# --- graphs --------------------------------------------------------------------------------------------


class Recorder:
    """Stands in for what records CUDA graphs: its graph goes with ``clear`` and comes back on demand."""

    def __init__(self, output: torch.Tensor) -> None:
        self.graph: Any = object()
        self.output: torch.Tensor | None = output

    def clear(self) -> None:
        self.graph = self.output = None


class Recording:
    def __init__(self) -> None:
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1


@pytest.mark.parametrize("hang", [lambda it: it, lambda it: {128: [it]}, lambda it: Pipeline(it)])
def test_graphs_are_cleared_before_anything_moves(tier: Any, hang: Any) -> None:
    buffer, (weight, output) = tier.loose(torch.randn(8), torch.randn(8))
    recorder = Recorder(output)
    del output
    engine = tier.engine(weight=weight, graphs=hang(recorder), buffer=buffer)
    assert isinstance(tier.announce(engine), int)
    assert recorder.graph is not None
    before = weight.tolist()
    tier.park(engine)
    assert recorder.graph is None
    tier.wake(engine)
    assert weight.tolist() == before


def test_a_graph_that_clears_itself(tier: Any) -> None:
    net = torch.nn.Linear(4, 4).requires_grad_(False)
    object.__setattr__(net, "graph", Recording())
    engine = tier.engine(net=net, graph=Recording(), buffer=tier.put(net))
    tier.park(engine)
    assert net.graph.cleared == engine.graph.cleared == 1  # type: ignore[union-attr]


# --- parked --------------------------------------------------------------------------------------------


def test_using_a_parked_tensor_fails(tier: Any) -> None:
    net = Net()
    engine = tier.engine(net=net, buffer=tier.put(net))
    tier.park(engine)
    with pytest.raises(RuntimeError):
        net(IDS)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.ones(2, 16), net.head.weight)


def test_parking_and_waking_again_change_nothing(tier: Any) -> None:
    engine = Keeper(tier, Net())
    answer = engine.module(IDS).clone()
    assert tier.park(engine) == tier.park(engine)
    assert tier.announce(engine) == tier.park(engine).host_bytes
    assert tier.wake(engine) == tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


def test_no_room_on_the_device_leaves_it_parked(tier: Any) -> None:
    one, (a,) = tier.loose(torch.randn(1000))
    two, (b,) = tier.loose(torch.randn(1000))
    engine = tier.engine(a=a, b=b, buffers=[one, two])
    before = look(a, b)
    tier.park(engine)
    intruder = tier.device.allocate(tier.device.total() - 5000)  # room for one of the two
    used = tier.device.used()
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory):
            tier.wake(engine)
        assert tier.device.used() == used
        assert a.numel() == b.numel() == 0
    intruder.free()
    tier.wake(engine)
    assert look(a, b) == before


def test_cancelled_before_anything_moved(tier: Any) -> None:
    engine = Keeper(tier, Net())
    answer = engine.module(IDS).clone()
    ctx = tier.context(engine)
    ctx.cancelled.set()
    with pytest.raises(TransitionCancelled):
        plugin.offload_to_host(engine, ctx)
    assert torch.equal(engine.module(IDS), answer)
    tier.park(engine)
    with pytest.raises(TransitionCancelled):
        plugin.restore_from_host(engine, ctx)
    assert engine.parked
    tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


def test_a_host_without_memory_leaves_it_on_the_device(tier: Any) -> None:
    engine = Keeper(tier, Net())
    answer = engine.module(IDS).clone()

    def exhausted(nbytes: int) -> memoryview:
        raise HostOutOfMemory("no RAM", account="host", needed=nbytes)

    ctx = tier.context(engine)
    ctx.host_buffer = exhausted
    with pytest.raises(HostOutOfMemory):
        plugin.offload_to_host(engine, ctx)
    assert not engine.parked
    assert torch.equal(engine.module(IDS), answer)


def test_a_strangers_parked_copy_goes_with_the_engine(tier: Any) -> None:
    net = Net()
    engine = tier.engine(net=net, buffer=tier.put(net))
    tier.park(engine)
    copy, gone = tier.copies.pop(engine), weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None  # at once, not when somebody collects garbage
    finally:
        gc.enable()
    copy.free()
    assert tier.arena.idle > 0


# --- kept backups --------------------------------------------------------------------------------------


def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    import ctypes

    seen: list[int] = []
    real = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, source, n: (seen.append(n), real(to, source, n))[1])
    return seen


def test_a_kept_backup_makes_the_next_park_a_release(tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Keeper(tier, Net())
    answer = engine.module(IDS).clone()
    tier.park(engine)
    residue = tier.wake(engine)
    assert residue.droppable
    assert residue.host_bytes == tier.announce(engine)
    copied = moves(monkeypatch)
    tier.park(engine)
    assert copied == []
    tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


def _in_place(net: Net) -> None:
    net.embed.weight[7] += 1.0


def _other_data(net: Net) -> None:
    net.embed.weight.data = torch.ones(50, 16)


def _other_parameter(net: Net) -> None:
    weight = net.norm.weight.clone() + 1.0
    net.norm.weight = torch.nn.Parameter(weight, requires_grad=False)


def _other_view(net: Net) -> None:
    net.norm.bias.data = net.norm.weight.data


@pytest.mark.parametrize("write", [_in_place, _other_view])
def test_written_weights_are_copied_again(tier: Any, write: Any) -> None:
    engine = Keeper(tier, Net())
    tier.park(engine)
    tier.wake(engine)
    write(engine.module)
    answer = engine.module(IDS).clone()
    tier.park(engine)
    tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


@pytest.mark.parametrize("write", [_other_data, _other_parameter])
def test_weights_that_were_moved_off_the_device_stay_where_they_are(tier: Any, write: Any) -> None:
    engine = Keeper(tier, Net())
    tier.park(engine)
    tier.wake(engine)
    write(engine.module)
    answer = engine.module(IDS).clone()
    tier.park(engine)
    tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


def test_weights_in_another_buffer_are_copied_again(tier: Any) -> None:
    """Same tensors, same places in the buffer, and no version that changed."""
    engine = Keeper(tier, torch.nn.Linear(8, 8).requires_grad_(False))
    tier.park(engine)
    tier.wake(engine)
    old, engine.buffer = engine.buffer, tier.device.allocate(len(engine.buffer.view))
    weights = [weight.data.clone() + 1.0 for weight in engine.module.parameters()]
    memory = torch.from_numpy(np.asarray(engine.buffer.view)).untyped_storage()
    for weight, value in zip(engine.module.parameters(), weights, strict=True):
        place = weight.storage_offset(), weight.shape, weight.stride()
        weight.data = torch.empty(0).set_(memory, *place)  # type: ignore[call-overload]
        weight.data.copy_(value)
    old.free()
    tier.park(engine)
    tier.wake(engine)
    assert all(torch.equal(a, b) for a, b in zip(engine.module.parameters(), weights, strict=True))


def test_writes_that_torch_does_not_count_are_told(tier: Any) -> None:
    engine = Keeper(tier, Net())
    tier.park(engine)
    tier.wake(engine)
    engine.module.embed.weight.data.add_(1.0)
    engine.mark_stale()
    answer = engine.module(IDS).clone()
    tier.park(engine)
    tier.wake(engine)
    assert torch.equal(engine.module(IDS), answer)


def test_an_engine_that_grew_needs_a_new_copy(tier: Any) -> None:
    engine: Any = Keeper(tier, Net())
    tier.park(engine)
    tier.wake(engine)
    engine.more, (tensor,) = tier.loose(torch.randn(4000))
    engine.tensor = tensor
    before = look(tensor)
    with pytest.raises(HostOutOfMemory, match="grown"):
        tier.park(engine)
    assert look(tensor) == before
    assert engine.drop_backup() > 0
    tier.forget(engine)
    tier.park(engine)
    tier.wake(engine)
    assert look(tensor) == before


def test_dropping_a_backup(tier: Any) -> None:
    engine = Keeper(tier, Net())
    assert engine.drop_backup() == 0
    tier.park(engine)
    assert engine.drop_backup() == 0  # all there is
    residue = tier.wake(engine)
    assert engine.drop_backup() == residue.host_bytes
    assert engine.drop_backup() == 0
    tier.forget(engine)
    mark_stale(engine)
    assert forget(engine) == 0


def test_tensors_that_an_engine_lets_go_of_are_not_kept_alive(tier: Any) -> None:
    buffer, (weight, scratch) = tier.loose(torch.randn(8), torch.randn(8))
    engine: Any = Keeper(tier, torch.nn.Linear(2, 2).requires_grad_(False))
    engine.more, engine.weight, engine.scratch = buffer, weight, [scratch]
    gone = weakref.ref(scratch)
    del scratch
    tier.park(engine)
    tier.wake(engine)
    engine.scratch.clear()
    assert gone() is None
    tier.park(engine)
    tier.wake(engine)


# --- whose engine --------------------------------------------------------------------------------------


def test_engines_without_tensors_are_somebody_elses(tier: Any) -> None:
    engine = tier.engine(numbers=[1, 2], text="x")
    assert tier.announce(engine) is None
    assert plugin.offload_to_host(engine, tier.context(engine)) is None
    assert plugin.restore_from_host(engine, tier.context(engine)) is None


def test_what_cannot_be_parked_is_not_parked_by_force(tier: Any) -> None:
    net = Net()
    engine = tier.engine(net=net, buffer=tier.put(net))
    answer = net(IDS).clone()
    net._hf_hook = object()
    assert isinstance(tier.announce(engine), Declined)
    with pytest.raises(TransitionError, match="accelerate"):
        plugin.offload_to_host(engine, tier.context(engine))
    assert torch.equal(net(IDS), answer)


# --- alive ---------------------------------------------------------------------------------------------


def leave_empty(image: Any, region: Any, storage: Any, *, out: bool) -> None:
    """In place of a copy: memory as it is when it was never filled."""
    storage.fill_(0)


def test_an_engine_is_alive_unless_it_is_parked(tier: Any) -> None:
    """A12: a woken engine was taken at its word."""
    engine = Keeper(tier, Net())
    assert engine.alive()
    for _ in range(2):
        tier.park(engine)
        assert not engine.alive()
        tier.wake(engine)
        assert engine.alive()
    assert engine.drop_backup() > 0
    assert engine.alive()


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("_offload.bring_back", lambda *_: None),
        ("_image._copy", leave_empty),
        ("_layout.Layout.point_at", lambda *_: None),
    ],
)
def test_a_wake_that_restored_nothing_is_noticed(
    tier: Any, monkeypatch: pytest.MonkeyPatch, part: str, instead: Any
) -> None:
    """A12: no device memory, memory without the bytes, and tensors that do not look into it."""
    engine = Keeper(tier, Net())
    tier.park(engine)
    monkeypatch.setattr(f"sie_adapters_torch.{part}", instead)
    tier.wake(engine)
    assert not engine.alive()


def test_weights_that_begin_with_zeros_are_no_proof(tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A12: memory that was never filled has zeros, too."""
    net = torch.nn.Embedding(100, 16).requires_grad_(False)
    net.weight[:60] = 0.0
    engine = Keeper(tier, net)
    tier.park(engine)
    monkeypatch.setattr("sie_adapters_torch._image._copy", leave_empty)
    tier.wake(engine)
    assert not engine.alive()


@pytest.mark.parametrize("counted", [True, False])
def test_weights_that_were_written_since_their_copy_are_no_sign_of_death(tier: Any, counted: bool) -> None:
    """A12: a running engine may change them."""
    engine = Keeper(tier, Net())
    tier.park(engine)
    tier.wake(engine)
    for tensor in [*engine.module.parameters(), *engine.module.buffers()]:
        (tensor if counted else tensor.data).fill_(1)
    if not counted:
        engine.mark_stale()
    assert engine.alive()
