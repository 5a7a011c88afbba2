"""LoRA adapters of a running engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sie_adapters_sglang import plugin
from sie_core import (
    GenerateRequest,
    InvalidInput,
    LoraEngine,
    ModelSourceInvalid,
    ModelSourceNotFound,
    TransitionContext,
    TransitionError,
)


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    def make(name: str, rank: Any = 8, weights: bool = True) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        if weights:
            (folder / "weights").touch()
        return f"path:{folder}"

    return make


def request(lora: str | None) -> GenerateRequest:
    return GenerateRequest("chat", {"messages": []}, lora=lora)


async def test_load_select_and_unload(home: Any, start: Any, helpers: Any, adapter: Any) -> None:
    engine = start(home.model(max_loras=2))
    assert isinstance(engine, LoraEngine)
    assert engine.max_loras == 2
    source, ctx = adapter("style"), TransitionContext()
    assert engine.lora_reserve("style", source).min_bytes == 0
    with pytest.raises(InvalidInput, match="not loaded"):
        await engine.generate(request("style"))
    await asyncio.to_thread(engine.lora_load, "style", source, ctx)
    assert (await engine.generate(request("style")))["choices"]
    assert (await engine.generate(request(None)))["choices"]
    other = adapter("other")
    await asyncio.to_thread(engine.lora_load, "style", other, ctx)
    assert helpers.told(engine)["loras"]["style"].endswith("other")
    for _ in range(2):
        await asyncio.to_thread(engine.lora_unload, "style", ctx)
    assert helpers.told(engine)["loras"] == {}


def test_what_can_not_be_loaded(home: Any, start: Any, helpers: Any, adapter: Any, tmp_path: Path) -> None:
    engine = start(home.model(max_loras=1, max_lora_rank=16))
    ctx = TransitionContext()
    for source, error, why in (
        (adapter("large", rank=32), ModelSourceInvalid, "max_lora_rank"),
        (adapter("odd", rank="x"), ModelSourceInvalid, "no LoRA adapter"),
        (f"path:{tmp_path / 'gone'}", ModelSourceNotFound, "gone"),
        ("nonsense", ModelSourceInvalid, "not a model source"),
    ):
        with pytest.raises(error, match=why):
            engine.lora_reserve("a", source)
    with pytest.raises(ModelSourceInvalid, match="no good weights"):
        engine.lora_load("a", adapter("empty", weights=False), ctx)
    assert helpers.told(engine)["loras"] == {}


async def test_adapters_outlast_a_park_and_do_not_change_in_it(home: Any, start: Any, adapter: Any) -> None:
    engine = start(home.model(max_loras=2))
    ctx = TransitionContext()
    await asyncio.to_thread(engine.lora_load, "style", adapter("style"), ctx)
    await asyncio.to_thread(plugin.offload_to_host, engine, ctx)
    for call in (
        lambda: engine.lora_load("other", adapter("other"), ctx),
        lambda: engine.lora_unload("style", ctx),
    ):
        with pytest.raises(TransitionError, match="parked"):
            await asyncio.to_thread(call)
    await asyncio.to_thread(plugin.restore_from_host, engine, ctx)
    assert (await engine.generate(request("style")))["choices"]
