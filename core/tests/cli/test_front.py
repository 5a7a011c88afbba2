"""The front of the command line, run in this process: help, usage errors, endings."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sie_core.cli.catalogue import COMMANDS
from sie_core.cli.front import run
from sie_core.config import options

NAMES = [entry.name for entry in COMMANDS]


@pytest.fixture
def sie(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("SIE_BASE_URL", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        return (code, *capsys.readouterr())

    return call


def test_no_arguments_and_help_alone_are_the_help(sie: Any) -> None:
    assert sie() == sie("help") == sie("-h") == sie("--help")
    assert sie()[0] == 0


@pytest.mark.parametrize("command", NAMES)
def test_every_command_explains_itself_with_an_example(sie: Any, command: str) -> None:
    code, shown, _ = sie(command, "--help")
    assert code == 0
    assert shown.startswith(f"Usage: sie {command}")
    assert f"  sie {command}" in shown.partition("Examples:")[2]
    assert sie("help", command)[1] == shown


def test_serve_has_a_flag_for_every_option_that_may_have_one(sie: Any) -> None:
    shown = " ".join(sie("serve", "--help")[1].replace("│", " ").split())
    for info in options():
        if info.flag:
            assert info.flag in shown
            assert f"[{info.env}]" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sttus"], "did you mean 'status'?"),
        (["xyzzy"], "`sie --help` lists the commands"),
        (["--url", "http://localhost", "status"], "the command comes first"),
        (["status", "--jsn"], "Did you mean --json?"),
        (["load"], "MODEL"),
        (["encode"], "MODEL"),
        (["encode", "m", "text", "--dimensions", "many"], "many"),
        (["status", "extra"], "extra"),
        (["models", "--url", "ftp://somewhere"], "ftp://somewhere"),
        (["models", "--url", "http://"], "is no server's address"),
        (["models", "--url", "http://127.0.0.1:99999"], "is no server's address"),
        (["load", ""], "a model needs a name"),
    ],
)
def test_wrong_usage_exits_2_with_advice(sie: Any, arguments: list[str], message: str) -> None:
    code, shown, said = sie(*arguments)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert shown == ""


def test_wrong_usage_with_json_is_json(sie: Any) -> None:
    code, shown, _ = sie("load", "--json")
    assert code == 2
    assert json.loads(shown)["error"]["code"] == "USAGE"


def test_json_after_two_dashes_is_a_text_like_any_other(sie: Any) -> None:
    code, shown, said = sie("encode", "m", "--url", "ftp://x", "--", "--json")
    assert (code, shown) == (2, "")
    assert "ftp://x" in said


def test_what_others_say_can_not_steer_the_terminal(sie: Any) -> None:
    _, _, said = sie("models\x1b[2Jstatus")
    assert "\x1b" not in said


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sie_core.cli.app.call", interrupted)
    assert run(["status"]) == 130


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "gone", "some-file")

    monkeypatch.setattr("sie_core.cli.app.call", faulty)
    with pytest.raises(FileNotFoundError):
        run(["status"])


def test_headings_are_plain_where_nobody_looks(sie: Any) -> None:
    assert re.search(r"^Serve$", sie("--help")[1], re.MULTILINE)
    assert not sys.stdout.isatty()
