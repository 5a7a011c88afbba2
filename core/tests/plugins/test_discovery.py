"""What discovery does with plugins that are fine, broken, stale, doubled or contested."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sie_core import PluginError, __version__

from .conftest import Site, build_wheel, install_with_uv, unpack

GOOD = """
    from sie_core import hookimpl
    sie_api = 1

    @hookimpl
    def on_shutdown():
        pass
"""


def test_a_plugin_is_found_with_its_name_version_distribution_and_hooks(site: Site, adapter_source: Callable) -> None:
    site.install(
        "good", adapter_source("good-adapter"), distribution="Good.Plugin", version="2.3", installer=install_with_uv
    )
    plugins = site.load()
    info = site.info("good", plugins)
    assert (info.name, info.version, info.distribution, info.state) == ("good", "2.3", "Good.Plugin", "loaded")
    assert (info.hooks, info.adapters, info.reason) == (("register_adapters",), ("good-adapter",), "")
    entry = plugins.adapters["good-adapter"]
    assert (entry.name, entry.plugin, entry.cls.__name__) == ("good-adapter", "good", "Mine")


def test_an_entry_point_may_name_an_object(site: Site) -> None:
    source = """
        from sie_core import hookimpl

        class Plugin:
            sie_api = 1

            @hookimpl
            def on_shutdown(self):
                heard.append(1)

        heard = []
        plugin = Plugin()
    """
    module = site.install("object", source, module="objectmod", entry_points="[sie]\nobject = objectmod:plugin\n")
    plugins = site.load()
    assert site.info("object", plugins).hooks == ("on_shutdown",)
    plugins.shutdown()
    assert sys.modules[module].heard == [1]


# --- the built-in plugin ---


def test_the_built_in_plugin_comes_first_and_once(site: Site) -> None:
    site.install("aaa", GOOD)
    first, second = site.load().info()[:2]
    assert (first.name, first.distribution, first.hooks) == ("core", "sie-core", ("probe_devices",))
    assert second.name == "aaa"


def test_the_built_in_plugin_is_there_without_the_core_s_metadata(site: Site) -> None:
    # -S leaves the installed distributions out, -P keeps none but the path that is given: only the sources are there.
    libraries = Path(sys.modules["pluggy"].__file__ or "").parents[1]
    only = site.folder / "libraries"
    only.mkdir()
    for each in ("pluggy", "attr", "attrs"):
        (only / each).symlink_to(libraries / each)
    code = f"""
        import json, sys
        sys.path.insert(0, {str(only)!r})
        from sie_core.plugins import Plugins
        print(json.dumps([[i.name, i.version, i.distribution, i.state] for i in Plugins.load().info()]))
    """
    assert site.python(code, flags=("-S",)) == [["core", __version__, "sie-core", "loaded"]]


def test_nobody_takes_the_name_of_the_built_in_plugin(site: Site) -> None:
    site.install("core", GOOD, distribution="usurper")
    infos = {each.distribution: each for each in site.load().info() if each.name == "core"}
    assert infos["sie-core"].state == "loaded"
    assert infos["usurper"].state == "conflict"
    assert "sie-core" in infos["usurper"].reason


# --- code that fails ---


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import a_package_that_is_not_there", "ModuleNotFoundError"),
        ("raise RuntimeError('out of order')", "RuntimeError: out of order"),
        ("def broken(:", "SyntaxError"),
        ("import sys; sys.exit('I was run as a program')", "SystemExit: I was run as a program"),
        ("class Odd(BaseException): pass\nraise Odd('no Exception at all')", "Odd: no Exception at all"),
    ],
)
def test_a_plugin_that_fails_to_import_is_left_out_and_the_rest_load(site: Site, source: str, told: str) -> None:
    site.install("bad", source)
    site.install("good", GOOD)
    plugins = site.load()
    bad = site.info("bad", plugins)
    assert bad.state == "broken"
    assert told in bad.reason
    assert told.partition(":")[0] in bad.traceback
    assert "Traceback" in bad.traceback
    assert site.info("good", plugins).state == "loaded"


def test_ctrl_c_during_an_import_is_not_swallowed(site: Site) -> None:
    site.install("interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


@pytest.mark.parametrize("points", ["[sie]\nodd = odd-mod:\n", "[sie]\nodd = oddmod:nothing\n", "[sie]\nodd =\n"])
def test_an_entry_point_that_names_nothing_is_broken(site: Site, points: str) -> None:
    site.install("odd", GOOD, module="oddmod", entry_points=points)
    site.install("good", GOOD)
    plugins = site.load()
    assert site.info("odd", plugins).state == "broken"
    assert site.info("good", plugins).state == "loaded"


def test_damaged_metadata_of_one_distribution_harm_no_other(site: Site) -> None:
    site.install("good", GOOD)
    site.install("odd", GOOD)
    (metadata,) = site.targets[-1].glob("*.dist-info")
    (metadata / "entry_points.txt").write_bytes(b"[sie]\nodd = \xff\xfe\n")
    assert site.info("good").state == "loaded"
    (metadata / "entry_points.txt").write_text("[sie]\nthis is no entry point\n")
    plugins = site.load()
    assert site.info("good", plugins).state == "loaded"
    (odd,) = [each for each in plugins.info() if each.distribution == "dist-odd"]
    assert odd.state == "broken"


# --- hooks that do not fit ---


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        ("def register_adaptors(registrar): pass", ["'register_adaptors'", "did you mean 'register_adapters'?"]),
        ("def make_coffee(): pass", ["'make_coffee'", "the hooks are"]),
        ("def on_shutdown(reason): pass", ["'on_shutdown'", "'reason'", "no arguments"]),
        ("def host_offload_bytes(engine, ctx): pass", ["'ctx'", "takes engine"]),
        ("def register_adapters(registrar=None): pass", ["'registrar'", "default"]),
        ("def offload_to_host(engine, *, ctx): pass", ["keyword-only"]),
        ("async def on_shutdown(): pass", ["async"]),
        ("@hookimpl(wrapper=True)\ndef on_shutdown():\n    return (yield)", ["wrapper"]),
    ],
)
def test_a_hook_that_does_not_fit_leaves_the_plugin_out(site: Site, hook: str, told: list[str]) -> None:
    marked = hook if hook.startswith("@") else f"@hookimpl\n{hook}"
    fine = "@hookimpl\ndef probe_devices():\n    raise AssertionError('a plugin that was left out was called')\n"
    site.install("unfit", f"from sie_core import hookimpl\nsie_api = 1\n{marked}\n{fine}")
    site.install("good", GOOD)
    plugins = site.load()
    unfit = site.info("unfit", plugins)
    assert unfit.state == "broken"
    for words in told:
        assert words in unfit.reason
    plugins.probe_devices()
    plugins.shutdown()
    assert site.info("good", plugins).state == "loaded"


def test_a_hook_may_take_fewer_arguments_and_another_name(site: Site) -> None:
    source = """
        from sie_core import hookimpl
        sie_api = 1
        heard = []

        @hookimpl(specname="on_residency_changed")
        def anything():
            heard.append("changed")

        @hookimpl(optionalhook=True)
        def a_hook_of_a_later_version():
            raise AssertionError
    """
    module = site.install("frugal", source)
    plugins = site.load()
    assert site.info("frugal", plugins).hooks == ("on_residency_changed",)
    plugins.notify(None)  # type: ignore[arg-type]
    assert sys.modules[module].heard == ["changed"]


@pytest.mark.parametrize(
    ("source", "told"),
    [("", "implements no hook"), ("def register_adapters(registrar): pass", "register_adapters lacks the @hookimpl")],
)
def test_a_plugin_without_hooks_is_told_what_it_lacks(site: Site, source: str, told: str) -> None:
    site.install("idle", f"sie_api = 1\n{source}")
    assert told in site.info("idle").reason


# --- API versions ---


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "states no plugin API version"),
        ("sie_api = 2", "built for version 2 of the plugin API and this is version 1: update SIE"),
        ("sie_api = 0", "built for version 0 of the plugin API and this is version 1: update the plugin"),
        ("sie_api = '1'", "must be the integer 1"),
        ("sie_api = True", "must be the integer 1"),
    ],
)
def test_a_plugin_for_another_api_version_is_refused_with_the_reason(site: Site, line: str, told: str) -> None:
    site.install("stale", f"from sie_core import hookimpl\n{line}\n@hookimpl\ndef on_shutdown(): raise AssertionError")
    site.install("good", GOOD)
    plugins = site.load()
    stale = site.info("stale", plugins)
    assert (stale.state, stale.hooks) == ("refused", ())
    assert told in stale.reason
    plugins.shutdown()
    assert site.info("good", plugins).state == "loaded"


def test_a_stale_plugin_that_cannot_even_be_imported_is_refused_for_its_version(site: Site) -> None:
    site.install("stale", "from sie_core import a_name_of_version_2\nsie_api: int = 2\n")
    stale = site.info("stale")
    assert stale.state == "refused"
    assert "built for version 2" in stale.reason
    assert "a_name_of_version_2" in stale.traceback


# --- one name, several offers ---


def test_two_distributions_with_one_name_are_an_error_that_names_both(site: Site) -> None:
    for distribution in ("first-dist", "second-dist"):
        source = "raise AssertionError('a contested plugin was imported')"
        site.install("contested", source, distribution=distribution, installer=install_with_uv)
    site.install("good", GOOD)
    plugins = site.load()
    contested = [each for each in plugins.info() if each.name == "contested"]
    assert [each.distribution for each in contested] == ["first-dist", "second-dist"]
    for each in contested:
        assert each.state == "conflict"
        assert "first-dist" in each.reason
        assert "second-dist" in each.reason
    assert site.info("good", plugins).state == "loaded"


def test_the_same_distribution_twice_on_the_path_counts_once(site: Site) -> None:
    module = site.install("doubled", GOOD, distribution="Doubled_Dist", version="1.0")
    site.install("doubled", GOOD, distribution="doubled-dist", version="2.0", module=module, installer=install_with_uv)
    info = site.info("doubled")
    assert (info.state, info.version) == ("loaded", "2.0")


def stale_metadata(site: Site, name: str, entry_points: str | None) -> None:
    """What an older build leaves beside the sources: metadata in front of everything, and no modules."""
    folder = site.folder / f"stale-{name}" / f"{name}.egg-info"
    folder.mkdir(parents=True)
    (folder / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.9\n")
    if entry_points is not None:
        (folder / "entry_points.txt").write_text(entry_points)
    site.put_in_front(folder.parent)


@pytest.mark.parametrize("points", [None, "[console_scripts]\nx = hidden:x\n", "[sie]\n"])
def test_stale_metadata_without_plugins_hide_no_plugin(site: Site, points: str | None) -> None:
    """D6: of two copies of a distribution, the later one counts where only it has plugins."""
    site.install("hidden", GOOD, distribution="hidden")
    stale_metadata(site, "hidden", points)
    info = site.info("hidden", site.load(strict=True))
    assert (info.state, info.version) == ("loaded", "1.0")


def test_plugins_that_stale_metadata_hide_are_listed(site: Site) -> None:
    """D6: where both copies have plugins the first one counts, and what only the other has is told, in strict mode
    by a start failure."""
    points = "[sie]\nkept = keptmod\n"
    site.install(
        "kept", GOOD, module="keptmod", distribution="doubled", version="2.0", entry_points=f"{points}added = x\n"
    )
    stale_metadata(site, "doubled", points)
    site.install("added", GOOD, distribution="of-another-author")
    plugins = site.load()
    assert (site.info("kept", plugins).state, site.info("kept", plugins).version) == ("loaded", "0.9")
    added = {info.distribution: info for info in plugins.info() if info.name == "added"}
    assert added["doubled"].state == "broken"
    assert "another copy of doubled 0.9 comes first on the path" in added["doubled"].reason
    assert added["of-another-author"].state == "loaded", "what is not used contests no name"
    with pytest.raises(PluginError, match="comes first on the path"):
        site.load(strict=True)


def test_one_distribution_that_offers_a_name_twice_is_a_conflict(site: Site) -> None:
    points = "[sie]\ntwice = twicemod\ntwice = other\n"
    site.install("twice", GOOD, module="twicemod", entry_points=points)
    info = site.info("twice")
    assert info.state == "conflict"
    assert "twicemod" in info.reason
    assert "other" in info.reason


def test_two_names_for_one_module_are_a_conflict_that_names_both(site: Site) -> None:
    points = "[sie]\nalias = samemod\nreal = samemod\n"
    site.install("real", GOOD, module="samemod", entry_points=points)
    states = sorted((each.state, each.reason) for each in site.load().info() if each.name in ("alias", "real"))
    assert [state for state, _ in states] == ["conflict", "loaded"]
    assert "'alias'" in states[0][1]
    assert "'real'" in states[0][1]


def test_a_distribution_may_offer_several_plugins(site: Site) -> None:
    site.install(
        "one", GOOD, module="onemod", entry_points="[sie]\none = onemod\ntwo = twomod\n", more={"twomod.py": GOOD}
    )
    plugins = site.load()
    assert [each.state for each in plugins.info() if each.name in ("one", "two")] == ["loaded", "loaded"]


def test_unpacking_a_wheel_gives_what_an_installer_gives(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, "some-dist", "1.0", "[sie]\nx = y\n", {"y.py": GOOD})
    for target, install in ((tmp_path / "one", unpack), (tmp_path / "two", install_with_uv)):
        install(wheel, target)
        assert (target / "y.py").is_file()
        assert (target / "some_dist-1.0.dist-info" / "entry_points.txt").read_text() == "[sie]\nx = y\n"
