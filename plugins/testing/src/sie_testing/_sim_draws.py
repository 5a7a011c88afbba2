"""What a seed makes of a run: the machine, its settings, the models."""

from __future__ import annotations

import random

from attrs import frozen
from sie_core import ModelSpec
from sie_core.residency import RegistrySettings
from sie_core.types import WakeCheck

from sie_testing._sim_world import KIB, WorldSettings
from sie_testing.fake import FakeOptions

__all__ = ["Plot", "draw", "draw_model"]


@frozen
class Plot:
    """One run. ``honest``: no engine lies about its size and no foreign memory rises."""

    machine: WorldSettings
    models: tuple[ModelSpec, ...]
    honest: bool
    faulty: bool
    hanging: bool
    tearing: bool
    """Transitions are cancelled from outside."""
    activations: bool
    long: bool
    """Some requests take up to 40 s."""
    slow: bool
    """Some loads take longer than requests wait, and clients come back when they are told to."""
    sizing: bool
    """Many engines size themselves when they are launched."""
    starved: bool
    """Later parks, and then a host that is short for long."""


def draw(order: random.Random) -> Plot:
    """The plot of a run."""
    names = ["emulated:0", "emulated:1", "emulated:2"][: order.choice([1, 1, 1, 2, 2, 3])]
    devices = {name: order.choice([100, 128, 128, 250]) * KIB for name in names}
    honest = order.random() < 0.5
    watch_host = order.random() < 0.4
    tier = order.choice([0, 40, 60, 100, 150, 300, 2000])
    settings = RegistrySettings(
        load_wait_s=order.choice([3.0, 30.0]),
        wake_wait_s=order.choice([1.0, 15.0]),
        load_timeout_s=15.0,
        close_timeout_s=4.0,
        reserve_timeout_s=4.0,
        offload_timeout_s=6.0,
        drain_s=order.choice([0.5, 3.0, 30.0]),
        drain_exempt_s=order.choice([1.0, 60.0]),
        turn_s=order.choice([0.1, 2.0]),
        run_permits=order.choice([1, 1, 2]),
        load_retries=order.choice([1, 3]),
        host_cache_bytes=tier * KIB,
        sample_s=order.choice([0.3, 1.0]),
    )
    host = order.choice([80, 200, 500]) * KIB if watch_host or order.random() < 0.3 else 1 << 40
    blind = tuple(name for name in names if order.random() < 0.06)
    machine = WorldSettings(devices, host, settings, watch_host, blind)
    slow, sizing = order.random() < 0.3, order.random() < 0.2
    models = tuple(
        draw_model(f"m{number}", order, len(names), honest, slow=slow, sizing=sizing)
        for number in range(order.randint(3, 7))
    )
    return Plot(
        machine,
        models,
        honest,
        faulty=order.random() < 0.7,
        tearing=order.random() < 0.25,
        hanging=order.random() < 0.25,
        activations=order.random() < 0.4,
        long=order.random() < 0.25,
        slow=slow,
        sizing=sizing,
        starved=watch_host and order.random() < 0.3,
    )


def draw_model(name: str, order: random.Random, devices: int, honest: bool, *, slow: bool, sizing: bool) -> ModelSpec:
    """One model of it."""
    pick = order.choice
    size = pick([10, 20, 30, 45, 60, 90, 90, 300] if order.random() < 0.15 else [10, 20, 30, 45, 60, 90])
    options = FakeOptions(
        weights_bytes=size * KIB,
        want_bytes=pick([0, 0, 0, 2 * size * KIB]),
        context_bytes=pick([0, 0, 3]) * KIB,
        headroom_bytes=pick([0, 5, 20]) * KIB,
        host_bytes=pick([0, 0, 0, 4]) * KIB,
        host_load_bytes=pick([0, 0, 0, 10]) * KIB,
        ranks=2 if devices > 1 and order.random() < 0.2 else 1,
        pool=pick([None, "p", "p"]),
        self_sizing=order.random() < (0.4 if sizing else 0.1),
        allocate=True,
        load_s=pick([0.0, 0.3, 2.0] if not slow else [0.3, 5.0, 8.0]),
        offload_s=pick([0.0, 0.02, 0.7]),
        restore_s=pick([0.0, 0.02, 0.7]),
        close_s=pick([0.0, 0.1, 1.0]),
        max_loras=pick([0, 1, 2]),
        lora_bytes=pick([1, 4, 40]) * KIB,
        lora_s=pick([0.0, 0.2]),
        oom_at_lora=pick([0, 0, 0, 1, 2]),
        dims=2,
        oom_at_load=pick([0, 0, 0, 0, 1, 2]),
        fail_load=pick([None] * 9 + ["EngineStartError", "ValueError"]),
        fail_load_times=1,
        malformed=pick(["memory", "devices"]) if order.random() < 0.02 else None,
        backup=order.random() < 0.35,
        decline=pick([None, None, None, None, None, "it does not want to"]),
        corrupt_restore=order.random() < 0.07,
        realised=pick([1.0, 1.0, 0.9, None]) if honest else pick([1.0, 0.7, None, 1.2, 1.6]),
        freed=1.0 if honest else pick([1.0, 1.0, 0.5, 0.0]),
    )
    return ModelSpec(
        name=name,
        adapter="missing" if order.random() < 0.01 else "fake",
        options=options,
        device=f"emulated:{order.randrange(devices)}" if options.ranks == 1 and order.random() < 0.15 else None,
        runtime_headroom=pick([None, None, None, 8 * KIB]),
        host_offload=order.random() > 0.05,
        wake_check=pick([WakeCheck.AUTO, WakeCheck.ALWAYS, WakeCheck.NEVER]),
        pinned=order.random() < 0.06,
        idle_evict_s=pick([None, None, 0.0, 0.4, 2.0]),
        min_resident_s=pick([0.0, 0.0, 1.0]),
        lora={name: f"path:/{name}" for name in ("one", "two", "missing")[: pick([0, 2, 3])]},
    )
