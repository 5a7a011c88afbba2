"""From a model's first launch to the next ones, with encoders on the same device, as clients and operators see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from attrs import evolve
from sie_adapters_sglang import _engine, _plan
from sie_core import DeviceGrant, DeviceOutOfMemory, Grant, ModelSpec, Residency, TransitionContext
from sie_core.memory.emulated import EmulatedDevice
from sie_testing import FakeOptions

MIB = 1 << 20
SMALL = {"weights_gb": 1 / 64, "kv_gb": 1 / 32}
GREEDY = {"kv_gb": 1 / 16, "tokens": 1024}
"""Takes eight times as much for a token as its files say: 80 MiB in all, where 24 were promised."""


def encoder(name: str = "encoder", size: int = 8 * MIB, **more: Any) -> ModelSpec:
    return ModelSpec(name, "fake", options=FakeOptions(weights_bytes=size, allocate=True), **more)


async def encode(server: Any, name: str = "encoder") -> Any:
    return await server.http.post(f"/v1/encode/{name}", json={"items": [{"text": "hello"}]})


@pytest.fixture
def chat(home: Any, helpers: Any) -> Callable[..., ModelSpec]:
    """A model with 16 MiB of weights and 8 KiB a token: 48 MiB with 4,096 of them, as the stand-in says, too."""
    helpers.save_model(home.model_folder, width=2048, rows=4096)

    def make(how: Any = None, **options: Any) -> ModelSpec:
        model: ModelSpec = home.model(how=SMALL | (how or {}), **{"max_total_tokens": 4096} | options)
        return model

    return make


async def comes_beside_a_launch(server: Any, ready: Path, expected: bool) -> bool:
    """Whether the encoder comes and answers while the engine starts. What is ``expected`` is waited for longer."""
    ready.unlink(missing_ok=True)
    talk = asyncio.create_task(server.chat())
    await server.until(Residency.LOADING)
    ask = asyncio.create_task(encode(server))
    done, _ = await asyncio.wait({ask}, timeout=30.0 if expected else 0.5)
    assert server.registry.status("tiny").residency is Residency.LOADING
    ready.touch()
    for answer in (await ask, await talk):
        assert answer.status_code == 200, answer.text
    return bool(done)


async def test_encoders_wake_while_it_starts_once_it_was_measured(
    chat: Callable[..., ModelSpec], front: Any, tmp_path: Path
) -> None:
    """The first launch is alone on its device. What it showed is kept on disk: the next server's first is not alone."""
    ready = tmp_path / "ready"
    for beside in (False, True):
        async with front(chat({"wait_for": str(ready)}), encoder()) as server:
            assert (await encode(server)).status_code == 200
            assert (await server.act("park", "encoder")).status_code == 200
            assert await comes_beside_a_launch(server, ready, beside) is beside
            told = [one.action for one in server.registry.decisions() if one.model == "encoder"]
            assert told == ["park"], "it woke, and nothing else ever happened to it"
            assert server.registry.status("encoder").wake_s is not None
        _plan.cost_cache.cache_clear()  # another process would read the file


async def test_more_than_was_promised_is_booked_where_it_is_free(
    chat: Callable[..., ModelSpec], front: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(chat(GREEDY, max_total_tokens=1024)) as server:
        assert (await server.chat()).status_code == 200
        assert server.booked()["emulated:0"] >= 80 * MIB
        assert (await server.row())["overrun_bytes"] == 0
        grown = [one for one in server.registry.decisions() if one.action == "growth"]
        assert [one.needed_bytes // MIB for one in grown] == [55]
        assert "the rest was free, and is booked too" in caplog.text
        # From now on that much is asked for.
        await server.act("unload")
        assert (await server.chat()).status_code == 200
        assert len([one for one in server.registry.decisions() if one.action == "growth"]) == 1


def engines() -> set[psutil.Process]:
    """Processes of engines that are there; a real one may be, which other tests share."""
    return {each for each in psutil.Process().children(recursive=True) if "sglang" in " ".join(each.cmdline())}


async def test_more_than_was_promised_ends_it_where_it_is_somebody_elses(
    chat: Callable[..., ModelSpec], front: Any
) -> None:
    """The encoder's bytes are the encoder's: the engine is told to go, whatever it has taken already."""
    others = engines()
    model = chat(GREEDY, max_total_tokens=1024)
    async with front(model, encoder(size=60 * MIB, pinned=True)) as server:
        assert (await encode(server)).status_code == 200
        answer = await server.chat()
        assert answer.status_code in (502, 503)
        assert server.booked() == {"emulated:0": 60 * MIB}
        decisions = [one for one in server.registry.decisions() if one.model == "tiny"]
        assert [one.action for one in decisions][:2] == ["growth refused", "load"]
        assert "took 80.0 MiB on emulated:0 and was promised" in decisions[1].reason
        assert engines() <= others
        assert (await encode(server)).status_code == 200


async def test_more_than_was_promised_gets_its_room_at_the_next_try(chat: Callable[..., ModelSpec], front: Any) -> None:
    """What the launch showed is what the second try asks for, and an encoder that is not in use parks for it."""
    model = chat(GREEDY, max_total_tokens=1024)
    async with front(model, encoder(size=60 * MIB)) as server:
        assert (await encode(server)).status_code == 200
        answer = await server.chat()
        assert answer.status_code == 200, answer.text
        assert await server.residency("encoder") == "parked"
        assert (await server.row())["overrun_bytes"] == 0
        assert server.booked()["emulated:0"] >= 80 * MIB


async def test_what_was_measured_with_other_options_does_not_count(
    chat: Callable[..., ModelSpec], front: Any, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    for options, beside in (({}, False), ({"context_length": 100}, False), ({}, True)):
        async with front(chat({"wait_for": str(ready)}, **options), encoder()) as server:
            assert (await encode(server)).status_code == 200
            assert (await server.act("park", "encoder")).status_code == 200
            assert await comes_beside_a_launch(server, ready, beside) is beside


async def test_a_model_that_is_measured_shows_what_it_was_given(chat: Callable[..., ModelSpec], front: Any) -> None:
    model = evolve(chat(), name="measured")
    async with front(model) as server:
        assert (await server.row("measured"))["figures"] == {}
        answer = await server.chat("measured")
        assert answer.status_code == 200, answer.text
        figures = (await server.row("measured"))["figures"]
        assert figures["weights_bytes"] == 16 * MIB
        assert figures["kv_cache_bytes"] == 32 * MIB
        assert (figures["kv_cache_tokens"], figures["ranks"]) == (4096, 1)
        assert 0 < figures["mem_fraction_static"] < 1
        await server.act("park", "measured")
        assert (await server.row("measured"))["figures"] == figures, "a parked engine is the same engine"


GIB = 1 << 30
CASES = [
    # promised beside 1 GiB of context; what the driver says of its processes; whether that is too much
    (1.5, None, True),
    (2.1, None, False),  # a context that nobody sees is not held against it
    (2.5, 3.2, False),  # a small context leaves more to the cache
    (2.5, 4.5, True),
    (3.0, 4.5, False),  # activations that it has made already
    (3.0, 7.0, False),
    (3.0, 9.5, True),
]


@pytest.mark.parametrize(("static", "whole", "over"), CASES)
def test_what_counts_as_more_on_a_card(
    home: Any, start: Any, monkeypatch: pytest.MonkeyPatch, static: float, whole: float | None, over: bool
) -> None:
    """The stand-in says 1 GiB of weights and 2 of cache."""
    others = engines()
    held = None if whole is None else int(whole * GIB)
    monkeypatch.setattr(_engine, "held_on", lambda index, pids: held)
    grant = DeviceGrant(static_bytes=int(static * GIB), free_bytes=20 * GIB)
    ctx = TransitionContext(grant=Grant({"cuda:0": grant}))
    if not over:
        assert start(home.model(), ctx=ctx).memory().devices == {"cuda:0": held}
        return
    with pytest.raises(DeviceOutOfMemory, match=r"took .* on cuda:0 and was promised"):
        start(home.model(), ctx=ctx)
    assert engines() <= others


async def test_models_on_one_folder_that_come_together_all_answer(chat: Callable[..., ModelSpec], front: Any) -> None:
    """B12: six of them. The first shows what all take: 20 MiB of weights and 64 MiB of cache, where the files say 16
    and 32; the others were let in by the files, and are let in again."""
    more = {"weights_gb": 20 / 1024, "kv_gb": 1 / 16}
    models = [evolve(chat(more), name=f"chat{number}") for number in range(6)]
    async with front(*models, devices=[EmulatedDevice("emulated:0", 1024 * MIB)], tier=0) as server:
        answers = await asyncio.gather(*(server.chat(model.name) for model in models))
        assert [answer.status_code for answer in answers] == [200] * 6, [answer.text for answer in answers]
        for model in models:
            assert server.ledger.holding(model.name)["emulated:0"] >= 84 * MIB
        # It tells weights, cache and graphs in hundredths of a GiB: each may be half of one more. 1 MiB is F's.
        assert server.booked()["emulated:0"] <= 6 * (84 + 3 * 5.2 + 1.1) * MIB
