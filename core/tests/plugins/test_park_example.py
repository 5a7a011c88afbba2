"""The examples of the hook reference that park and wake, put together: they run in turns and lose nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sie_core import Grant, HostOffload, HostResidue, TransitionContext
from sie_core.memory.arena import Arena
from sie_core.memory.emulated import EmulatedDevice
from sie_core.residency.tier import HostCopy

from .conftest import Site

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "hooks.md"
HOOKS = ("host_offload_bytes", "offload_to_host", "restore_from_host")
SIZE = 4 * 2**20


def test_the_examples_park_and_wake_in_turns_and_no_byte_is_lost(site: Site) -> None:
    """D3: twenty cycles, with the device and the host buffers that the core hands out."""
    text = PAGE.read_text(encoding="utf-8")
    classes: list[type] = []
    for hook in HOOKS:
        example = re.search(rf"^## `{hook}`\n.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        assert example
        module = site.install(hook.replace("_", "-"), example[1])
        site.load(strict=True)
        classes.append(sys.modules[module].EchoEngine)
    engine: Any = type("EchoEngine", tuple(classes), {})()
    plugins, arena, device = site.load(strict=True), Arena(), EmulatedDevice("emulated:0", 2 * SIZE)
    engine.devices, engine.nbytes = ("emulated:0",), SIZE
    engine.weights = device.allocate(SIZE)
    engine.weights.view[:] = bytes(range(256)) * (SIZE // 256)

    for _ in range(20):
        announced = plugins.ask("host_offload_bytes", owner=None, engine=engine)
        copy = HostCopy("echo", announced, arena)
        ctx = TransitionContext(Grant(), host_buffer=copy.buffer, device_buffer=lambda _, size: device.allocate(size))
        for _ in range(2):
            assert plugins.ask("offload_to_host", owner=None, engine=engine, ctx=ctx) == HostOffload(SIZE)
        assert device.used() == 0
        for _ in range(2):
            assert plugins.ask("restore_from_host", owner=None, engine=engine, ctx=ctx) == HostResidue()
        copy.free()
        assert arena.idle == SIZE, "nobody looks into the copy any more"
        assert device.used() == SIZE
    assert bytes(engine.weights.view) == bytes(range(256)) * (SIZE // 256)
    del engine.weights
    assert device.used() == 0
    device.close()
