"""What becomes of the adapters that plugins register, and of strict mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sie_core import PluginBroken, PluginConflict, PluginError, PluginIncompatible
from sie_core.plugins import Plugins

from .conftest import Site

HALF = """
    from sie_core import Adapter, hookimpl
    sie_api = 1

    class Mine(Adapter):
        options = object

    @hookimpl
    def register_adapters(registrar):
        registrar.add("half", Mine)
        {then}

    @hookimpl
    def on_shutdown():
        raise AssertionError("a plugin that was left out was called")
"""


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("raise OSError('no such disk')", "register_adapters failed: OSError: no such disk"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("registrar.add('other', 'torch.nn')", "pass a subclass of sie_core.Adapter"),
        ("registrar.add('other', Mine())", "pass a subclass of sie_core.Adapter"),
        ("registrar.add('', Mine)", "an adapter's name is a text"),
        ("registrar.add_catalogue('models')", "a catalogue is a folder, given as a pathlib.Path, not 'models'"),
    ],
)
def test_a_plugin_whose_register_adapters_raises_is_left_out_with_all_its_adapters(
    site: Site, adapter_source: Callable, then: str, told: str
) -> None:
    site.install("bad", HALF.format(then=then))
    site.install("good", adapter_source("good-adapter"))
    plugins = site.load()
    bad = site.info("bad", plugins)
    assert (bad.state, bad.adapters) == ("broken", ())
    assert told in bad.reason
    assert "register_adapters" in bad.traceback
    assert "half" not in plugins.adapters
    assert plugins.adapters["good-adapter"].plugin == "good"
    plugins.shutdown()


def test_an_adapter_that_two_plugins_offer_is_an_error_that_names_both(site: Site, adapter_source: Callable) -> None:
    both = adapter_source("contested").replace("registrar.add", "registrar.add('of-one', Mine); registrar.add", 1)
    site.install("one", both)
    site.install("two", adapter_source("contested"))
    plugins = site.load()
    assert "contested" not in plugins.adapters
    two, one = site.info("two", plugins), site.info("one", plugins)
    assert two.state == "conflict"
    assert "'one' and 'two' both offer the adapter 'contested'" in two.reason
    assert (one.state, one.adapters) == ("loaded", ("of-one",))
    assert "'contested'" in one.reason
    assert plugins.adapters["of-one"].plugin == "one"


def test_a_third_offer_of_a_contested_adapter_does_not_slip_in(site: Site, adapter_source: Callable) -> None:
    for name in ("one", "three", "two"):
        site.install(name, adapter_source("contested"))
    plugins = site.load()
    assert "contested" not in plugins.adapters
    assert [site.info(name, plugins).state for name in ("one", "three", "two")] == ["loaded", "conflict", "conflict"]


def test_a_conflict_that_the_plugin_swallows_still_counts(site: Site, adapter_source: Callable) -> None:
    site.install("one", adapter_source("contested"))
    source = (
        adapter_source("contested").replace("registrar.add('contested', Mine)", "pass")
        + """
        try:
            registrar.add("contested", Mine)
        except Exception:
            pass
"""
    )
    site.install("two", source)
    assert site.info("two").state == "conflict"


def test_a_plugin_that_offers_a_name_twice_is_in_conflict_with_itself(site: Site) -> None:
    site.install("bad", HALF.format(then="registrar.add('half', Mine)"))
    info = site.info("bad")
    assert info.state == "conflict"
    assert "'bad' offers twice" in info.reason


def test_adapters_are_not_asked_for_by_who_needs_commands_only(site: Site) -> None:
    site.install("bad", HALF.format(then="raise OSError"))
    plugins = Plugins.load(adapters=False)
    assert site.info("bad", plugins).state == "loaded"
    assert plugins.adapters == {}


# --- catalogues ---

CATALOGUE = """
    from pathlib import Path
    from sie_core import hookimpl
    sie_api = 1

    @hookimpl
    def register_adapters(registrar):
        registrar.add_catalogue(Path(__file__).with_name({folder!r}))
        {then}
"""


def _announced(plugins: Plugins, *names: str) -> list[tuple[str, str]]:
    return [(each.plugin, each.folder.name) for each in plugins.catalogues if each.plugin in names]


def test_catalogues_are_announced_with_their_plugin_and_not_read(site: Site) -> None:
    for name in ("two", "one"):
        site.install(name, CATALOGUE.format(folder=f"models-of-{name}", then=""))
    assert _announced(site.load(), "one", "two") == [("one", "models-of-one"), ("two", "models-of-two")]


def test_the_catalogue_of_a_plugin_that_is_left_out_goes_with_it(site: Site) -> None:
    site.install("bad", CATALOGUE.format(folder="models", then="raise OSError"))
    late = """
    @hookimpl
    def probe_devices(emulate):
        raise OSError
    """
    site.install("late", CATALOGUE.format(folder="models", then="") + late)
    plugins = site.load()
    assert _announced(plugins, "bad", "late") == [("late", "models")]
    plugins.probe_devices()
    assert site.info("late", plugins).state == "broken"
    assert _announced(plugins, "bad", "late") == []


# --- strict mode ---


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import a_package_that_is_not_there", PluginBroken),
        ("from sie_core import hookimpl\nsie_api = 1\n@hookimpl\ndef make_coffee(): pass", PluginBroken),
        ("from sie_core import hookimpl\nsie_api = 1\n@hookimpl\ndef on_shutdown(reason): pass", PluginBroken),
        ("sie_api = 2", PluginIncompatible),
        ("", PluginIncompatible),
        (HALF.format(then="raise OSError"), PluginBroken),
        (HALF.format(then="registrar.add('half', Mine)"), PluginConflict),
    ],
)
def test_strict_mode_makes_each_of_these_a_start_failure(site: Site, source: str, error: type[PluginError]) -> None:
    site.install("bad", source)
    with pytest.raises(error) as caught:
        site.load(strict=True)
    assert type(caught.value) is error
    assert caught.value.plugin == "bad"
    assert site.load(strict=False)


def test_strict_mode_refuses_conflicts(site: Site) -> None:
    for distribution in ("first-dist", "second-dist"):
        site.install("contested", "", distribution=distribution)
    with pytest.raises(PluginConflict, match=r"first-dist.*second-dist"):
        site.load(strict=True)


def test_strict_mode_keeps_the_cause_and_tells_of_all_problems(site: Site) -> None:
    site.install("bad", "raise OSError('no such disk')")
    site.install("stale", "sie_api = 2")
    with pytest.raises(PluginBroken) as caught:
        site.load(strict=True)
    assert isinstance(caught.value.__cause__, OSError)
    assert any("version 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_environment_decides_when_nobody_else_does(
    site: Site, monkeypatch: pytest.MonkeyPatch, value: str, strict: bool
) -> None:
    site.install("stale", "sie_api = 2")
    monkeypatch.setenv("SIE_STRICT_PLUGINS", value)
    if strict:
        with pytest.raises(PluginIncompatible):
            Plugins.load()
    else:
        Plugins.load()
    Plugins.load(strict=False)


def test_a_value_that_is_neither_yes_nor_no_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIE_STRICT_PLUGINS", "perhaps")
    with pytest.raises(PluginError, match="perhaps"):
        Plugins.load()


def test_plugins_that_are_fine_load_in_strict_mode(site: Site, adapter_source: Callable) -> None:
    site.install("good", adapter_source("good-adapter"))
    assert "good-adapter" in site.load(strict=True).adapters
