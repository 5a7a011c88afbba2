"""How command lines are read, and what is printed where there is little room."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Sie = Callable[..., Any]
SCRIPT = Path(sys.executable).with_name("sie")
LONG = "sentence-transformers/a-model-with-a-name-as-long-as-they-are-on-the-hub"
MODELS = f"""\
models:
  - {{name: any, adapter: fake, options: {{dims: 4, outputs: [dense, sparse, multivector]}}}}
  - {{name: ranker, adapter: fake, options: {{tasks: [score]}}}}
  - {{name: finder, adapter: fake, options: {{tasks: [extract]}}}}
  - {{name: {LONG}, adapter: fake}}
  - {{name: unused, adapter: fake}}
"""


@pytest.fixture(scope="module")
def fakes(start_server: Callable[..., Any]) -> Any:
    return start_server(MODELS, command=[str(SCRIPT)])


@pytest.fixture
def ask(sie: Sie, fakes: Any) -> Sie:
    def run(*arguments: object, **options: Any) -> Any:
        return sie(*arguments, **{**options, "env": {"SIE_BASE_URL": fakes.url}})

    return run


@pytest.mark.parametrize(
    "line",
    [
        "encode any a b --query",
        "encode any --query a b",
        "encode --query any a b",
        "encode any a --query b",
        "encode any a --output dense b --query",
        "encode any --timeout 60 a --query b",
        "encode any --query a -- b",
    ],
)
def test_options_may_stand_anywhere(ask: Sie, line: str) -> None:
    """E1: options before, between and behind the texts say the same."""
    done = ask(*line.replace("encode", "encode --json").split())
    assert done.returncode == 0, done.stderr
    assert [json.loads(answer)["text"] for answer in done.stdout.splitlines()] == ["a", "b"]


def test_options_may_stand_anywhere_in_every_command(ask: Sie) -> None:
    """E1: siblings: score, extract, load and unload take lists, too."""
    scored = ask("score", "ranker", "--top", "1", "a", "a", "b")
    assert (scored.returncode, len(scored.stdout.splitlines())) == (0, 1)
    found = ask("extract", "finder", "--label", "fox", "a fox", "--json", "a dog")
    assert [json.loads(line)["text"] for line in found.stdout.splitlines()] == ["a fox", "a dog"]
    for action in ("load", "unload"):
        assert ask(action, "any", "--timeout", "30", "ranker").returncode == 0


def test_texts_that_look_like_options_stand_behind_two_dashes(ask: Sie) -> None:
    """E1: what is not known is still refused, and two dashes end the options."""
    done = ask("encode", "any", "--json", "--", "--query", "-x")
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["--query", "-x"]
    unknown = ask("encode", "any", "a", "--quary", "b")
    assert unknown.returncode == 2
    assert "--quary" in unknown.stderr


@pytest.mark.parametrize(
    "command", [("encode", "any"), ("score", "ranker", "q"), ("extract", "finder", "--label", "x")], ids=lambda c: c[0]
)
def test_a_blank_line_of_stdin_is_an_error_with_its_number(ask: Sie, command: tuple[str, ...]) -> None:
    """E2: left out, it would shift all answers behind it by a line."""
    for blank in ("", "  "):
        done = ask(*command, stdin=f"a\n{blank}\nb\n")
        assert done.returncode == 2
        assert "line 2 of stdin is blank" in done.stderr
        assert done.stdout == ""
    assert len(ask(*command, stdin="a\nb\n").stdout.splitlines()) >= 2


def test_decisions_for_an_unknown_model_are_an_error(ask: Sie) -> None:
    """E8: a slip in the name is not the same as nothing decided."""
    done = ask("decisions", "--model", "rankr")
    assert done.returncode == 1
    assert "unknown model 'rankr'" in done.stderr
    assert "ranker" in done.stderr
    known = ask("decisions", "--model", "unused")
    assert (known.returncode, known.stdout) == (0, "Nothing had to be decided for 'unused' yet.\n")


def test_a_refusal_that_stands_is_explained(server: Callable[..., Any], sie: Sie) -> None:
    """E8: `sie explain` says why a model could not be brought in."""
    models = ", ".join(
        f"{{name: {name}, adapter: fake, pinned: {pinned}, options: {{weights_bytes: 41943040, allocate: true}}}}"
        for name, pinned in (("kept", "true"), ("refused", "false"))
    )
    started = server(f"models: [{models}]\nrequests: {{load_wait_s: 1}}", "--emulate-device", "64MiB")
    assert started.encode("kept").status_code == 200
    assert started.encode("refused").status_code == 503
    told = sie("explain", "refused", "--url", started.url).stdout
    assert "The last request to bring it in was refused: " in told


# --- on a terminal -----------------------------------------------------------------------------------------


def on_a_terminal(columns: int, url: str, *arguments: str) -> str:
    """What a command prints on a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    env |= {"SIE_BASE_URL": url, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen([SCRIPT, *arguments], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # Linux says so when the last writer is gone
        pass
    os.close(master)
    assert process.wait(60) == 0, shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode().replace("\r\n", "\n"))


@pytest.mark.parametrize("command", ["status", "models", "ps"])
@pytest.mark.parametrize("columns", [60, 80])
def test_a_name_is_never_broken(ask: Sie, fakes: Any, command: str, columns: int) -> None:
    """E4: where there is little room, columns are left out and named; names stay whole."""
    assert ask("load", LONG).returncode == 0
    shown = on_a_terminal(columns, fakes.url, command)
    assert any(line.startswith(f"{LONG} ") for line in shown.splitlines()), shown
    assert "(no room for " in shown
    wide = on_a_terminal(250, fakes.url, command)
    assert "(no room for " not in wide


def test_tables_that_ask_no_server_leave_names_whole_too(fakes: Any) -> None:
    """E4: siblings: the catalogue and the plugins."""
    for command, name in ((["models", "--available"], "all-minilm-l12-v2 "), (["plugins"], "testing ")):
        shown = on_a_terminal(80, fakes.url, *command)
        rows = shown.partition("\n(no room")[0].splitlines()
        assert max(map(len, rows)) <= 80
        assert any(name in row for row in rows)


# --- what a server says when it starts ----------------------------------------------------------------------


def test_an_adapter_that_is_not_installed_is_a_warning_with_what_to_install(server: Callable[..., Any]) -> None:
    """E3: the log names model and package, and the example of the greeting is one that works."""
    started = server("models: [{name: chat, adapter: nobody-chat}, {name: there, adapter: fake}]")
    greeting = started.wait_for("stop      Ctrl-C")
    assert re.search(r"WARNING .*model 'chat' can't be served: unknown adapter 'nobody-chat'", greeting)
    assert '"model": "there"' in greeting


def test_no_example_is_shown_where_none_works(server: Callable[..., Any]) -> None:
    """E3: a server all of whose adapters are missing has nothing to try."""
    assert "try " not in server("models: [{name: chat, adapter: nobody-chat}]").wait_for("stop      Ctrl-C")


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ("{tasks: [extract]}", "/v1/extract/m"),
        ("{outputs: [sparse]}", "/v1/encode/m"),
        ("{tasks: [score]}", "/v1/rerank"),
    ],
)
def test_the_example_suits_what_the_model_does(server: Callable[..., Any], options: str, path: str) -> None:
    """E3: sibling: a request that the model refuses is no example either."""
    started = server(f"models: [{{name: m, adapter: fake, options: {options}}}]")
    greeting = started.wait_for("stop      Ctrl-C")
    assert f"curl {started.url}{path} " in greeting


def test_the_package_of_well_known_adapters_is_named() -> None:
    """E3: for names that begin with sglang- or torch-, unless others of that package are there."""
    from sie_core.errors import MissingAdapter

    assert "pip install sie-adapters-sglang" in MissingAdapter("sglang-generation", found=["fake"]).message
    assert "pip install sie-adapters-torch" in MissingAdapter("torch-dense").message
    there = MissingAdapter("torch-dens", found=["torch-dense"]).message
    assert "did you mean torch-dense?" in there
    assert "pip install" not in there


def test_the_device_of_a_server_is_that_of_models_that_name_none(server: Callable[..., Any], sie: Sie) -> None:
    """E9: `sie serve --device`; a device that the machine lacks is an error before anything starts."""
    models = "models: [{name: a, adapter: fake}, {name: b, adapter: fake, device: cpu}]"
    started = server(models, "--emulate-device", "64MiB", "--device", "emulated:0")
    assert [started.encode(name).status_code for name in "ab"] == [200, 200]
    assert [started.model(name)["device"] for name in "ab"] == ["emulated:0", "cpu"]
    absent = sie("serve", "--device", "cuda:7")
    assert absent.returncode == 2
    assert "--device" in absent.stderr
    assert "'cuda:7' not found" in absent.stderr
    assert sie("serve", "--device", "gpu").returncode == 2
