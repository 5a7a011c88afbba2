"""Each hook, called through the plugin manager on installed plugins: who is asked, in which order, and what counts."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
from sie_core import (
    AdmissionReserve,
    Declined,
    DeviceNeed,
    DeviceOutOfMemory,
    Engine,
    HostOffload,
    HostOutOfMemory,
    HostResidue,
    ModelSpec,
    PluginBroken,
    Residency,
    ResidencyChanged,
    TransitionContext,
    VictimCandidate,
)
from sie_core.plugins import Plugins

from .conftest import Site

EVENT = ResidencyChanged("m", Residency.UNLOADED, Residency.LOADING, reason="asked for", epoch=1, at=0.0)


def hooks(*sources: str) -> str:
    """Source of a plugin with these hooks; each notes its call in ``heard``."""
    marked = "\n".join(f"@hookimpl\n{source}" for source in sources)
    return f"from sie_core import *\nsie_api = 1\nheard = []\n{marked}\n"


def heard(module: str) -> list[Any]:
    calls: list[Any] = sys.modules[module].heard
    return calls


# --- start-up ---


def test_register_adapters_is_called_once_at_start(site: Site) -> None:
    source = "def register_adapters(registrar):\n    heard.append(registrar)\n    registrar.add('mine', Adapter)"
    module = site.install("one", hooks(source))
    plugins = site.load()
    assert len(heard(module)) == 1
    assert plugins.adapters["mine"].plugin == "one"
    with pytest.raises(TypeError):
        plugins.adapters["other"] = plugins.adapters["mine"]  # type: ignore[index]


DEVICE = """
    def probe_devices():
        class Mine:
            name, kind, description = {name!r}, "cuda", {description!r}
        return [Mine()]
"""


def test_probe_devices_joins_the_lists_of_all_plugins(site: Site) -> None:
    site.install("a", hooks(DEVICE.format(name="a:0", description="first").replace("\n    ", "\n")))
    site.install("b", hooks(DEVICE.format(name="b:0", description="second").replace("\n    ", "\n")))
    site.install("c", hooks(DEVICE.format(name="a:0", description="a twin").replace("\n    ", "\n")))
    found = {device.name: device.description for device in site.load().probe_devices()}
    assert found["a:0"] == "first"
    assert found["b:0"] == "second"
    assert any(name.startswith(("cpu", "cuda")) for name in found), "the built-in plugin finds this machine's devices"


def test_probe_devices_hears_which_device_is_to_be_emulated(site: Site) -> None:
    module = site.install("a", hooks("def probe_devices(emulate):\n    heard.append(emulate)\n    return []"))
    names = [device.name for device in site.load().probe_devices(emulate=1 << 20)]
    assert heard(module) == [1 << 20]
    assert "emulated:0" in names


def test_probe_devices_tells_the_operator_of_an_emulated_device_that_does_not_fit(site: Site) -> None:
    plugins = site.load()
    with pytest.raises(HostOutOfMemory):
        plugins.probe_devices(emulate=1 << 60)
    assert site.info("core", plugins).state == "loaded"


@pytest.mark.parametrize(
    ("hook", "call"),
    [("probe_devices", "probe_devices"), ("register_routes", "routes"), ("register_commands", "commands")],
)
def test_a_plugin_that_fails_in_a_start_up_hook_is_left_out(site: Site, hook: str, call: str) -> None:
    adds = "def register_adapters(registrar):\n    registrar.add('mine', Adapter)"
    tells = "def on_shutdown():\n    heard.append('called')"
    module = site.install("bad", hooks(f"def {hook}():\n    raise OSError('no such disk')", adds, tells))
    plugins = site.load()
    getattr(plugins, call)()
    bad = site.info("bad", plugins)
    assert (bad.state, bad.adapters) == ("broken", ())
    assert f"{hook} failed: OSError: no such disk" in bad.reason
    assert "no such disk" in bad.traceback
    assert "mine" not in plugins.adapters
    plugins.shutdown()
    assert heard(module) == []
    with pytest.raises(PluginBroken):
        getattr(site.load(strict=True), call)()


def test_register_routes_gives_the_routes_in_the_order_of_the_plugins(site: Site) -> None:
    site.install("b", hooks("def register_routes():\n    return ['/b']"))
    site.install("a", hooks("def register_routes():\n    return ['/a1', '/a2']"))
    site.install("c", hooks("def register_routes():\n    return None"))
    routes = site.load().routes()
    assert [route for route in routes if isinstance(route, str)] == ["/a1", "/a2", "/b"]


COMMAND = "def register_commands():\n    return [Command({name!r}, 'Help.', 'not_there:at_all')]"


def test_register_commands_imports_no_target(site: Site) -> None:
    site.install("a", hooks(COMMAND.format(name="hello")))
    (command,) = [each for each in Plugins.load(adapters=False).commands() if each.name == "hello"]
    assert (command.help, command.target) == ("Help.", "not_there:at_all")
    assert "not_there" not in sys.modules


def test_register_commands_of_two_plugins_with_one_name_are_a_conflict(site: Site) -> None:
    site.install("a", hooks(COMMAND.format(name="hello")))
    site.install("b", hooks(COMMAND.format(name="hello")))
    site.install("c", hooks("def register_commands():\n    return ['hello']"))
    plugins = site.load()
    assert [each.name for each in plugins.commands()].count("hello") == 1
    assert [site.info(name, plugins).state for name in "abc"] == ["loaded", "conflict", "broken"]


# --- pure ---


def test_choose_victims_takes_the_first_opinion(site: Site) -> None:
    site.install("a", hooks("def choose_victims(candidates):\n    return None"))
    site.install("b", hooks("def choose_victims(candidates, needed):\n    return [c.model for c in candidates][::-1]"))
    site.install("c", hooks("def choose_victims(candidates):\n    raise AssertionError"))
    candidates = [VictimCandidate(name, {}, 0, 1.0, None, False) for name in ("x", "y")]
    plugins = site.load()
    assert plugins.implements("choose_victims")
    assert plugins.rank(candidates, {"cpu": 1}) == ["y", "x"]
    assert plugins.hook.choose_victims(candidates=candidates, needed={"cpu": 1}) == ["y", "x"]


def test_on_residency_changed_reaches_everybody_whatever_one_of_them_raises(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("a", hooks("def on_residency_changed(event):\n    raise SystemExit('out of order')"))
    module = site.install("b", hooks("def on_residency_changed(event):\n    heard.append(event)"))
    with caplog.at_level(logging.ERROR):
        site.load().notify(EVENT)
    assert heard(module) == [EVENT]
    assert "on_residency_changed of plugin 'a' failed" in caplog.text
    assert "out of order" in caplog.text


def test_on_shutdown_reaches_everybody_whatever_one_of_them_raises(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.install("a", hooks("def on_shutdown():\n    raise OSError('out of order')"))
    module = site.install("b", hooks("def on_shutdown():\n    heard.append('bye')"))
    site.load().shutdown()
    assert heard(module) == ["bye"]
    assert "on_shutdown of plugin 'a' failed" in caplog.text


# --- blocking ---

MODEL = ModelSpec("m", "mine")


def test_admission_reserve_asks_the_owner_first_and_then_the_others_in_order(site: Site) -> None:
    names = ("a", "b", "c")
    notes = "def admission_reserve(model, devices):\n    heard.append((model, devices))\n"
    answer = "    return AdmissionReserve(ranks=(DeviceNeed({size}),)) if model.name != 'a stranger' else None"
    modules = {name: site.install(name, hooks(notes + answer.format(size=size))) for size, name in enumerate(names, 1)}
    plugins = site.load()

    def ask(owner: str | None, model: ModelSpec) -> Any:
        for module in modules.values():
            heard(module).clear()
        return plugins.ask("admission_reserve", owner=owner, model=model, devices=("d",))

    for owner, size in (("b", 2), ("c", 3), ("a", 1), (None, 1), ("not installed", 1)):
        assert ask(owner, MODEL) == AdmissionReserve(ranks=(DeviceNeed(size),))
        assert sum(len(heard(module)) for module in modules.values()) == 1
    assert ask("b", ModelSpec("a stranger", "theirs")) is None
    assert all(len(heard(module)) == 1 for module in modules.values())
    assert heard(modules["c"]) == [(ModelSpec("a stranger", "theirs"), ("d",))]


def test_host_offload_bytes_ends_with_whoever_declines(site: Site) -> None:
    site.install("mine", hooks("def host_offload_bytes(engine):\n    return Declined('it has graphs')"))
    site.install("theirs", hooks("def host_offload_bytes(engine):\n    return 7"))
    plugins = site.load()
    assert plugins.ask("host_offload_bytes", owner="mine", engine=Engine()) == Declined("it has graphs")
    assert plugins.ask("host_offload_bytes", owner="theirs", engine=Engine()) == 7


def test_host_offload_bytes_of_nothing_is_an_answer(site: Site) -> None:
    site.install("a", hooks("def host_offload_bytes(engine):\n    return 0"))
    site.install("b", hooks("def host_offload_bytes(engine):\n    return 7"))
    assert site.load().ask("host_offload_bytes", owner="a", engine=Engine()) == 0


def test_offload_to_host_lets_another_plugin_park_an_engine(site: Site) -> None:
    site.install("author", hooks("def offload_to_host(engine):\n    return None"))
    site.install("torch-like", hooks("def offload_to_host(ctx, engine):\n    return HostOffload(3, {'cuda:0': 1})"))
    answer = site.load().ask("offload_to_host", owner="author", engine=Engine(), ctx=TransitionContext())
    assert answer == HostOffload(host_bytes=3, retained={"cuda:0": 1})


def test_restore_from_host_raises_what_the_plugin_raises(site: Site) -> None:
    source = (
        "def restore_from_host(engine, ctx):\n    raise DeviceOutOfMemory('full', account='cuda:0', needed=2, free=1)"
    )
    site.install("author", hooks(source))
    site.install("other", hooks("def restore_from_host(engine, ctx):\n    return HostResidue(5, droppable=True)"))
    plugins = site.load()
    with pytest.raises(DeviceOutOfMemory) as caught:
        plugins.ask("restore_from_host", owner="author", engine=Engine(), ctx=TransitionContext())
    assert (caught.value.account, caught.value.needed, caught.value.free) == ("cuda:0", 2, 1)
    answer = plugins.ask("restore_from_host", owner="other", engine=Engine(), ctx=TransitionContext())
    assert answer == HostResidue(host_bytes=5, droppable=True)


def test_asking_for_a_hook_that_is_none_is_a_bug_of_the_caller(site: Site) -> None:
    plugins = site.load()
    with pytest.raises(AttributeError):
        plugins.ask("make_coffee", owner=None)
    with pytest.raises(AttributeError):
        plugins.implements("make_coffee")


def test_asking_costs_microseconds(site: Site) -> None:
    import timeit

    site.install("a", hooks("def host_offload_bytes(engine):\n    return 1"))
    plugins, engine = site.load(), Engine()
    best = min(timeit.repeat(lambda: plugins.ask("host_offload_bytes", owner="a", engine=engine), number=200, repeat=5))
    assert best / 200 < 20e-6
