"""Hooks that block: the server goes on, says whose hook it is, and after three times does without it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import install_plugin
from sie_core.cli.front import run
from sie_core.plugins import Plugins
from website import Start

BLOCKS = """
    import threading
    from sie_core import hookimpl
    sie_api = 1
    let_go = threading.Event()
    threads = []

    @hookimpl
    def {hook}({arguments}):
        threads.append(threading.current_thread())
        let_go.wait()
"""


@pytest.fixture
def blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Plugins]:
    """Plugins, one of which blocks in the hook that the test names until the test is over."""
    hook, arguments = request.param
    name = install_plugin(tmp_path, monkeypatch, "sleepy", BLOCKS.format(hook=hook, arguments=arguments))
    plugins = Plugins.load(strict=True)
    plugins.pure.patience_s = 0.02
    yield plugins
    sys.modules[name].let_go.set()
    for thread in sys.modules[name].threads:
        thread.join(10)


def named(plugins: Plugins) -> dict[str, object]:
    (info,) = [info for info in plugins.info() if info.name == "sleepy"]
    return {"state": info.state, "reason": info.reason}


HOOKS = [("on_residency_changed", "event"), ("choose_victims", "candidates, needed")]


async def test_hooks_are_left_out_while_no_thread_can_start(
    served: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """D2: a sibling: the transition whose event it was failed instead."""
    source = BLOCKS.format(hook="on_residency_changed", arguments="event").replace("let_go.wait()", "pass")
    name = install_plugin(tmp_path, monkeypatch, "sleepy", source)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("sie-hooks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with served(plugins=Plugins.load(strict=True)) as s:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            assert (await s.embed()).status_code == 200
        assert "on_residency_changed of plugin 'sleepy' failed" in caplog.text
        told = len(sys.modules[name].threads)
        await s.registry.unload("mini")
        assert len(sys.modules[name].threads) > told


@pytest.mark.parametrize("blocking", HOOKS, indirect=True, ids=[hook for hook, _ in HOOKS])
async def test_a_hook_that_blocks_is_named_and_disabled_after_three_times(
    listening: Start, blocking: Plugins, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """D2: requests are answered, and log, status and both commands name plugin and hook."""
    (hook,) = next(info.hooks for info in blocking.info() if info.name == "sleepy")
    with caplog.at_level(logging.WARNING, "sie_core.plugins"):
        async with listening(plugins=blocking) as s:
            for model in ("half", "other-half") * 3:  # each has to evict the other
                assert (await s.encode(model)).status_code == 200
            status = (await s.http.get("/v1/status")).json()
            assert status["slow_hooks"] == [{"plugin": "sleepy", "hook": hook, "overruns": 3, "disabled": True}]
            assert await asyncio.to_thread(run, ["status", "--url", s.url]) == 0
            shown = f"\nPlugin sleepy: {hook} is disabled until the server is restarted"
            assert shown in capsys.readouterr().out
            assert await asyncio.to_thread(run, ["plugins", "--url", s.url]) == 0
            assert shown in capsys.readouterr().out
            assert await asyncio.to_thread(run, ["plugins", "--json", "--url", s.url]) == 0
            rows = {row["name"]: row["slow_hooks"] for row in json.loads(capsys.readouterr().out)}
            assert rows["sleepy"] == status["slow_hooks"]
            assert rows["core"] == []
    assert caplog.text.count(f"{hook} of plugin 'sleepy' did not return within 0.02 s") == 3
    assert f"{hook} of plugin 'sleepy' is disabled" in caplog.text
    assert not blocking.implements(hook)
    assert hook in str(named(blocking)["reason"])


async def test_a_hook_is_not_blamed_for_another_of_its_plugin(
    listening: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: only the one that blocks is disabled."""
    source = BLOCKS.format(hook="on_residency_changed", arguments="event")
    quick = "    @hookimpl\n    def choose_victims(candidates):\n        asked.append(1)\n    asked = []\n"
    name = install_plugin(tmp_path, monkeypatch, "sleepy", source + "\n" + quick)
    plugins = Plugins.load(strict=True)
    plugins.pure.patience_s = 0.2
    async with listening(plugins=plugins) as s:
        for model in ("half", "other-half") * 2:
            assert (await s.encode(model)).status_code == 200
        slow = (await s.http.get("/v1/status")).json()["slow_hooks"]
    assert [each["hook"] for each in slow if each["disabled"]] == ["on_residency_changed"]
    assert sys.modules[name].asked
    sys.modules[name].let_go.set()


ENDS = """
    from sie_core import hookimpl
    sie_api = 1

    @hookimpl
    def {hook}():
        raise {error}
"""


@pytest.mark.parametrize("hook", ["choose_victims", "on_residency_changed", "on_shutdown"])
@pytest.mark.parametrize("error", ["SystemExit(3)", "KeyboardInterrupt", "GeneratorExit", "OSError('no such disk')"])
async def test_whatever_a_pure_hook_raises_is_contained(
    served: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    error: str,
) -> None:
    """D1: a plugin that exits in a hook does not end the server, and is named."""
    install_plugin(tmp_path, monkeypatch, "leaving", ENDS.format(hook=hook, error=error))
    with caplog.at_level(logging.ERROR):
        async with served(plugins=Plugins.load(strict=True)) as s:
            for model in ("half", "other-half"):
                assert (await s.encode(model)).status_code == 200
    assert f"{hook} of plugin 'leaving' failed" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("answer", ["'half'", "7", "{'half': 1}"])
async def test_an_answer_of_the_wrong_kind_is_named_and_left_alone(
    served: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    """D1: a text where a list of names is expected is not taken letter by letter."""
    source = "from sie_core import hookimpl\nsie_api = 1\n@hookimpl\ndef choose_victims():\n    return " + answer
    install_plugin(tmp_path, monkeypatch, "odd", source)
    with caplog.at_level(logging.ERROR):
        async with served(plugins=Plugins.load(strict=True)) as s:
            for model in ("half", "other-half"):
                assert (await s.encode(model)).status_code == 200
    assert "choose_victims of plugin 'odd' returned" in caplog.text
