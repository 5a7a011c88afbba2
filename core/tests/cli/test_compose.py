"""The composition root: what becomes of the settings of the host tier."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sie_core import ConfigError, ModelLoadFailed
from sie_core.cli.compose import Parts, compose
from sie_core.config import load_config
from sie_core.memory.host import HostMemory
from sie_core.plugins import Plugins

GIB, MIB = 2**30, 2**20
TOTAL, AVAILABLE = 16 * GIB, 10 * GIB
FLOOR = 2 * GIB


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB of RAM, 10 of them available, without a container."""
    monkeypatch.setattr(HostMemory, "physical", lambda self: TOTAL)
    monkeypatch.setattr(HostMemory, "limit", lambda self: None)
    monkeypatch.setattr(HostMemory, "available", lambda self: AVAILABLE)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "sie.cli"):
        yield caplog


async def composed(**flags: Any) -> Parts:
    config = load_config(None, flags={f"memory.{key}": str(value) for key, value in flags.items()}, environ={})
    return compose(config, Plugins.load())


def said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "sie.cli"]


async def test_a_load_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    file = tmp_path / "sie.yaml"
    file.write_text("models: [{name: a, adapter: fake, options: {load_s: 1.0}}]")
    config = load_config(file, flags={"requests.load_timeout_s": "0.1"}, environ={})
    parts = compose(config, Plugins.load())
    await parts.registry.start()
    try:
        with pytest.raises(ModelLoadFailed, match=r"load .*0\.1 s"):
            await parts.registry.load("a", wait_s=None)
    finally:
        await parts.registry.shutdown(20.0)


async def test_auto_is_a_quarter_with_an_accelerator_and_an_emulated_one_counts(log: Any) -> None:
    parts = await composed(emulate_device="64MiB")
    assert parts.registry.host_tier().budget == 4 * GIB
    assert said(log) == ["host tier: 4.0 GiB for parked models (a quarter of the host's memory)"]


async def test_auto_is_off_on_a_machine_that_has_only_a_cpu(log: Any) -> None:
    parts = await composed()
    if any(device.kind != "cpu" for device in parts.devices):
        pytest.skip("this machine has an accelerator")
    assert parts.registry.host_tier().budget == 0
    assert said(log) == [
        "host tier: off (no accelerator: a parked model would take the same memory); evicted models unload"
    ]


async def test_zero_is_off(log: Any) -> None:
    parts = await composed(emulate_device="64MiB", host_cache_bytes=0)
    assert parts.registry.host_tier().budget == 0
    assert said(log) == ["host tier: off (memory.host_cache_bytes is 0); evicted models unload"]


async def test_a_size_is_taken_at_its_word(log: Any) -> None:
    parts = await composed(emulate_device="64MiB", host_cache_bytes="512MiB")
    assert parts.registry.host_tier().budget == 512 * MIB
    assert said(log) == ["host tier: 512.0 MiB for parked models (memory.host_cache_bytes)"]


async def test_more_than_the_host_has_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        await composed(emulate_device="64MiB", host_cache_bytes="17GiB")
    (problem,) = caught.value.problems
    assert (problem.path, problem.file) == ("memory.host_cache_bytes", "--host-cache-bytes")
    assert problem.message == "the host has 16.0 GiB in all, and 17.0 GiB are asked for"


async def test_more_than_the_host_can_give_now_is_a_warning(log: Any) -> None:
    parts = await composed(emulate_device="64MiB", host_cache_bytes="12GiB")
    assert parts.registry.host_tier().budget == 12 * GIB
    warning = said(log)[-1]
    assert warning.startswith("the host has 7.9 GiB to give now, memory.host_floor left out")


async def test_a_container_counts_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "limit", lambda self: 8 * GIB)
    assert (await composed(emulate_device="64MiB")).registry.host_tier().budget == 2 * GIB
    with pytest.raises(ConfigError, match=r"the host has 8\.0 GiB in all"):
        await composed(emulate_device="64MiB", host_cache_bytes="9GiB")


async def test_parking_without_an_accelerator_is_said_to_win_nothing(log: Any) -> None:
    parts = await composed(host_cache_bytes="512MiB")
    if any(device.kind != "cpu" for device in parts.devices):
        pytest.skip("this machine has an accelerator")
    assert parts.registry.host_tier().budget == 512 * MIB
    assert "wins nothing" in said(log)[-1]


async def test_the_wait_for_a_load_reaches_the_registry(tmp_path: Path) -> None:
    """A6: also where the caller's readiness time-out bounds it."""
    for environ, seconds in (({}, 30.0), ({"SIE_MODEL_READY_TIMEOUT_S": "10"}, 5.0)):
        config = load_config(None, flags={"memory.emulate_device": "64MiB"}, environ=environ)
        assert compose(config, Plugins.load()).registry._roster.settings.load_wait_s == seconds


async def test_the_wait_for_a_wake_reaches_the_registry(tmp_path: Path) -> None:
    for environ, seconds in (
        ({}, 15.0),
        ({"SIE_WAKE_TIMEOUT_S": "4"}, 4.0),
        ({"SIE_MODEL_READY_TIMEOUT_S": "10"}, 5.0),
        ({"SIE_WAKE_TIMEOUT_S": "4", "SIE_MODEL_READY_TIMEOUT_S": "10"}, 4.0),
    ):
        config = load_config(None, flags={"memory.emulate_device": "64MiB"}, environ=environ)
        parts = compose(config, Plugins.load())
        assert parts.registry._roster.settings.wake_wait_s == seconds
