"""An engine that sizes itself and three encoders on one device, in every order: nobody ever takes what is not there.

The registry and its ledger are the real ones, on the virtual clock. The engine is a stand-in that allocates as SGLang
does: it makes its context, measures what is free, takes ``F × free`` for weights and KV cache, then its graphs, and up
to its headroom while it runs. It is sized by what the package sizes real ones with.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from attrs import define, field, frozen
from sie_adapters_sglang._costs import CostCache, Costs, Measured
from sie_adapters_sglang._sizing import Demand, claim_overrun, reserve, size_launch
from sie_core import (
    Adapter,
    AdmissionReserve,
    BatchEngine,
    DeviceNeed,
    DeviceOutOfMemory,
    DeviceView,
    Engine,
    EngineEvents,
    MemoryReport,
    ModelSpec,
    NeverFits,
    Prepared,
    Residency,
    ResourceExhausted,
    TransitionContext,
    hookimpl,
)
from sie_core.plugins import Plugins
from sie_core.residency import RegistrySettings
from sie_testing import pause
from sie_testing.house import House, close, house, play

MIB, GIB = 2**20, 2**30
CARD = 24 * GIB
NAMES = ("chat", "red", "green", "blue")


@define(eq=False)
class Card:
    """The device's real memory, by holder. Nothing stops a holder from taking too much, but it is noticed."""

    held: dict[str, int] = field(factory=dict)
    over: list[str] = field(factory=list)
    peak: int = 0

    @property
    def used(self) -> int:
        return sum(self.held.values())

    def take(self, who: str, nbytes: int) -> None:
        self.held[who] = self.held.get(who, 0) + nbytes
        self.peak = max(self.peak, self.used)
        if self.used > CARD:
            self.over.append(f"{who} took {nbytes / GIB:.2f} GiB: {self.used / GIB:.3f} GiB are in use")

    def give(self, who: str, nbytes: int | None = None) -> None:
        self.held[who] -= self.held[who] if nbytes is None else nbytes


ASSUMED = Costs(context=GIB, graphs=GIB, activations=0)
card: Card
cache: CostCache
plugins: Plugins
"""Loaded once: to look for plugins takes longer than a scene."""


@frozen
class EncoderOptions:
    weights: int = 2 * GIB
    headroom: int = GIB
    pool: str | None = None


@frozen
class ChatOptions:
    weights: int = 6 * GIB
    context: int = 400 * MIB
    graphs: int = 900 * MIB
    fraction: float | None = None
    naive: str | None = None
    """How it is sized instead, to see that the check sees it."""


class Running(BatchEngine):
    """What both have: bytes for good, and headroom while it runs."""

    def __init__(self, model: ModelSpec, account: str, headroom: int, pool: str | None) -> None:
        self.model, self.devices, self.headroom, self.headroom_pool = model, (account,), headroom, pool
        self.settled = card.held.get(model.name, 0)

    def memory(self) -> MemoryReport:
        return MemoryReport({self.devices[0]: self.settled})

    def run(self, batch: Sequence[Prepared]) -> Sequence[Any]:
        for part in (self.headroom // 2, self.headroom - self.headroom // 2):
            card.take(self.model.name, part)
            pause(0.1)
        card.give(self.model.name, self.headroom)
        return ()

    def close(self, ctx: TransitionContext) -> None:
        if self.settled:
            pause(0.2)
            card.give(self.model.name)
            self.settled = 0


class EncoderAdapter(Adapter):
    options: ClassVar[type] = EncoderOptions

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        for _ in range(2):
            pause(0.4)
            card.take(model.name, model.options.weights // 2)
        return Running(model, next(iter(ctx.grant.devices)), model.options.headroom, model.options.pool)


class ChatAdapter(Adapter):
    options: ClassVar[type] = ChatOptions

    def load(self, model: ModelSpec, ctx: TransitionContext, events: EngineEvents) -> Engine:
        options: ChatOptions = model.options
        (account,) = ctx.grant.devices
        costs = costs_of(model)
        launch = size_launch(demand_of(model), costs, ctx.grant.devices)
        fraction, tokens = launch.fraction, launch.max_total_tokens
        if options.naive is not None:
            fraction, tokens = (
                _naively(options, model.runtime_headroom or 0, ctx.grant.devices[account].free_bytes),
                None,
            )
        pause(1.0)
        card.take(model.name, options.context)
        pause(0.5)
        pre = CARD - card.used
        for _ in range(4):
            pause(0.5)
            card.take(model.name, options.weights // 4)
        cache_bytes = (CARD - card.used) - int(pre * (1 - fraction))
        if tokens is not None:
            cache_bytes = min(cache_bytes, tokens * 128 * 1024)
        if cache_bytes <= 0:
            card.give(model.name)
            raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
        pause(0.5)
        card.take(model.name, cache_bytes)
        pause(0.5)
        card.take(model.name, options.graphs)
        if options.naive is None:
            # In lockstep the loop stands still while this thread runs: it can't answer, and needs not.
            line: Any = events
            grow = lambda account, nbytes: line.lifecycle.grow(line.record, line.worker, account, nbytes)  # noqa: E731
            taken = {account: options.context + options.weights + cache_bytes}
            try:
                claim_overrun(model.name, costs, ctx.grant.devices, taken, grow)
            except DeviceOutOfMemory:
                card.give(model.name)
                raise
        seen = Measured(options.context, options.graphs, 0, options.weights, 128 * 1024)
        cache.record(model.name, seen)
        return Running(model, account, model.runtime_headroom or 0, None)


def _naively(options: ChatOptions, headroom: int, free: int) -> float:
    return 0.85 if options.naive == "as the profile says" else 1 - headroom / free


def costs_of(model: ModelSpec) -> Costs:
    return ASSUMED.with_measured(cache.get(model.name))


def demand_of(model: ModelSpec) -> Demand:
    return Demand(
        name=model.name,
        weights_bytes=model.options.weights,
        kv_bytes_per_token=128 * 1024,
        headroom_bytes=model.runtime_headroom or 0,
        mem_fraction_static=model.options.fraction,
    )


class _Hooks:
    """The stand-ins' plugin, as a module would be."""

    @staticmethod
    @hookimpl
    def register_adapters(registrar: Any) -> None:
        registrar.add("stand-in-chat", ChatAdapter)
        registrar.add("stand-in-encoder", EncoderAdapter)

    @staticmethod
    @hookimpl
    def admission_reserve(model: ModelSpec, devices: Sequence[DeviceView]) -> AdmissionReserve | None:
        options = model.options
        if isinstance(options, ChatOptions):
            return reserve(demand_of(model), costs_of(model), devices)
        if isinstance(options, EncoderOptions):
            need = DeviceNeed(min_bytes=options.weights, want_bytes=options.weights, headroom_bytes=options.headroom)
            return AdmissionReserve((need,), headroom_pool=options.pool)
        return None


@pytest.fixture(scope="module", autouse=True)
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the stand-ins as a plugin, for as long as these tests run."""
    global plugins
    folder = tmp_path_factory.mktemp("plugin")
    info = folder / "sie_stand_ins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sie-stand-ins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sie]\nstand-ins = sie_stand_ins_of_arrivals\n")
    module = ModuleType("sie_stand_ins_of_arrivals")
    vars(module).update(
        sie_api=1, register_adapters=_Hooks.register_adapters, admission_reserve=_Hooks.admission_reserve
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.syspath_prepend(str(folder))
        plugins = Plugins.load()
        yield


def fresh(folder: Path) -> None:
    """An empty device, and nothing measured yet."""
    global card, cache
    card, cache = Card(), CostCache(folder / "costs.json")


@pytest.fixture(autouse=True)
def new_card(tmp_path: Path) -> None:
    fresh(tmp_path)


def models(pool: str | None = None, pinned: str = "", **chat: Any) -> list[ModelSpec]:
    return [
        ModelSpec(
            "chat", "stand-in-chat", options=ChatOptions(**chat), runtime_headroom=4 * GIB, pinned=pinned == "chat"
        ),
        ModelSpec("red", "stand-in-encoder", options=EncoderOptions(2 * GIB, GIB, pool)),
        ModelSpec("green", "stand-in-encoder", options=EncoderOptions(1500 * MIB, 500 * MIB, pool)),
        ModelSpec("blue", "stand-in-encoder", options=EncoderOptions(3 * GIB, 1600 * MIB, pool)),
    ]


def build(specs: Sequence[ModelSpec]) -> House:
    built = house(*specs, devices={"cuda:0": CARD}, plugins=plugins, settings=PATIENT)
    built.devices["cuda:0"].measured = lambda: card.used
    return built


async def use(built: House, name: str, *, strict: bool = True) -> None:
    """One request: load if need be, run with all of the headroom."""
    try:
        lease = await built.registry.acquire(name, wait_s=500.0)
    except ResourceExhausted:
        if strict:
            raise
        return
    with lease:
        async with lease.permit:
            engine: Any = lease.engine
            await lease.worker.call(engine.run, (), hook="run", timeout=60.0)


async def end(built: House) -> None:
    """Everybody who is resident runs at once, as far as the permits go; then nothing may be left."""
    there = [name for name in NAMES if built.state(name) is Residency.RESIDENT]
    assert there
    await asyncio.gather(*(use(built, name) for name in there))
    assert card.over == []
    await close(built)
    assert card.used == 0


PATIENT = RegistrySettings(load_wait_s=1000.0)
ORDERS = list(itertools.permutations(NAMES))
PROFILES: list[Mapping[str, Any]] = [{}, {"fraction": 0.85}, {"fraction": 0.5}, {"weights": 12 * GIB}]


@pytest.mark.parametrize("chat", PROFILES, ids=lambda chat: ",".join(map(str, chat)) or "all")
@pytest.mark.parametrize("pool", [None, "encoders"])
@pytest.mark.parametrize("apart", [500.0, 0.7, 0.0])
@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
def test_every_order_of_arrival(
    tmp_path: Path, known: bool, chat: Mapping[str, Any], pool: str | None, apart: float
) -> None:
    """One after the other, while the one before still loads, and all at once; a first launch, and a later one."""
    for number, order in enumerate(ORDERS):
        fresh(tmp_path / str(number))
        if known:
            options = ChatOptions(**chat)
            cache.record("chat", Measured(options.context, options.graphs, 0, options.weights, 128 * 1024))

        async def scene(order: Sequence[str] = order) -> None:
            built = build(models(pool, **chat))
            tasks = []
            for name in order:
                tasks.append(asyncio.create_task(use(built, name)))
                await asyncio.sleep(apart)
            await asyncio.gather(*tasks)
            await end(built)

        play(scene)
        assert card.peak <= CARD, order


@pytest.mark.parametrize("seed", range(60))
def test_any_interleaving(seed: int) -> None:
    draw = random.Random(seed)
    chat = draw.choice(PROFILES)

    async def scene() -> None:
        built = build(models(draw.choice([None, "encoders"]), **chat))
        tasks: list[asyncio.Task[None]] = []
        for _ in range(40):
            tasks.append(asyncio.create_task(use(built, draw.choice(NAMES), strict=False)))
            await asyncio.sleep(draw.choice([0.0, 0.1, 1.0, 8.0]) * draw.random())
            name = draw.choice(NAMES)
            if draw.random() < 0.1 and built.state(name) is Residency.RESIDENT:
                tasks.append(asyncio.create_task(built.registry.unload(name)))
        await asyncio.gather(*tasks)
        await end(built)

    play(scene, seed=seed)
    assert 10 * GIB < card.peak <= CARD


@pytest.mark.parametrize("naive", ["as the profile says", "free less headroom"])
def test_a_naive_share_is_caught(naive: str) -> None:
    """The same check sees an engine whose F is the profile's own, or 1 - h / free: over the device once all run."""

    async def scene() -> None:
        built = build(models(naive=naive, graphs=1100 * MIB))
        await use(built, "red")
        await use(built, "chat")
        await close(built)

    play(scene)
    assert card.over


def test_the_engine_first_and_encoders_later_evicts_it() -> None:
    async def scene() -> None:
        built = build(models())
        await use(built, "chat")
        promised = built.ledger.available("cuda:0")
        assert promised < 100 * MIB, "all of it is promised, the headroom that it has not taken too"
        assert CARD - card.used > 4 * GIB, "which the device alone would not tell"
        await use(built, "red")
        assert built.state("chat") is Residency.UNLOADED
        assert any(one.victims == ("chat",) and one.model == "red" for one in built.registry.decisions())
        await end(built)

    play(scene)


def test_the_engine_first_and_pinned_refuses_them() -> None:
    async def scene() -> None:
        built = build(models(pinned="chat"))
        await use(built, "chat")
        for name in ("red", "green", "blue"):
            with pytest.raises(ResourceExhausted, match=r"pinned models \(chat\)"):
                await use(built, name)
        await end(built)

    play(scene)


def test_an_engine_that_leaves_room_has_company() -> None:
    async def scene() -> None:
        built = build(models(fraction=0.33))
        for name in NAMES:
            await use(built, name)
        assert set(built.states().values()) == {"resident"}
        await end(built)

    play(scene)


def test_it_gets_what_its_victims_leave_and_not_only_the_least() -> None:
    """Two engines that size themselves, at once: one after the other, each as large as if alone."""
    taken: dict[str, int] = {}

    async def scene() -> None:
        both = [
            ModelSpec(name, "stand-in-chat", options=ChatOptions(), runtime_headroom=4 * GIB) for name in ("one", "two")
        ]
        built = build(both)

        async def ask(name: str) -> None:
            with await built.registry.acquire(name, wait_s=500.0):
                taken[name] = card.held[name]
                await asyncio.sleep(1.0)

        await asyncio.gather(ask("one"), ask("two"))
        await close(built)

    play(scene)
    assert card.over == []
    assert taken["one"] == pytest.approx(taken["two"], rel=0.002)
    assert taken["one"] > 17 * GIB


def test_a_later_launch_needs_no_window() -> None:
    """Its token cap bounds it: an encoder loads beside it. The first launch is alone."""
    beside: dict[str, bool] = {}

    async def scene() -> None:
        built = build(models(fraction=0.4))
        for launch in ("first", "later"):
            tasks = [asyncio.create_task(use(built, "chat"))]
            await built.until(lambda: built.state("chat") is Residency.LOADING)
            tasks.append(asyncio.create_task(use(built, "red")))
            await asyncio.sleep(0.3)
            beside[launch] = built.state("red") is Residency.LOADING
            await asyncio.gather(*tasks)
            for name in ("chat", "red"):
                await built.registry.unload(name)
        await close(built)

    play(scene)
    assert card.over == []
    assert beside == {"first": False, "later": True}


def test_what_can_never_fit_evicts_nobody() -> None:
    async def scene() -> None:
        built = build(models(weights=20 * GIB))
        await use(built, "red")
        with pytest.raises(Exception, match="needs") as caught:
            await use(built, "chat")
        assert NeverFits.__name__ in str(vars(caught.value))
        assert built.state("red") is Residency.RESIDENT
        await end(built)

    play(scene)
