"""Help and usage: what a newcomer sees first."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sie_core import __version__

COMMANDS = [
    *("serve", "check", "plugins", "models", "ps", "status", "decisions", "explain"),
    *("load", "unload", "park", "wake", "pin", "unpin", "encode", "score", "extract"),
]

COMMAND_PLUGIN = """
from sie_core import Command, hookimpl
sie_api = 1

@hookimpl
def register_commands():
    return [
        Command("greet", "Say hello to somebody.", "greeting_target:greet"),
        Command("broken-greeting", "Can't be imported.", "no_such_module_here:greet"),
    ]
"""

GREETING = """
def greet(name: str, *, loud: bool = False):
    print(("HELLO " if loud else "hello ") + name)
    return 0
"""


def test_help_names_every_command_and_how_to_begin(sie: Callable[..., Any]) -> None:
    done = sie("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\S", done.stdout, re.MULTILINE), command
    assert "sie encode minilm" in done.stdout
    assert "Exit codes: 0 ok, 1 failed, 2" in done.stdout
    assert done.stderr == ""


def test_version(sie: Callable[..., Any]) -> None:
    assert sie("--version").stdout == f"sie {__version__}\n"


def test_wrong_usage_exits_2_with_advice(sie: Callable[..., Any]) -> None:
    done = sie("sttus")
    assert done.returncode == 2
    assert "did you mean 'status'?" in done.stderr
    assert done.stdout == ""


def test_the_commands_of_plugins_are_listed_and_run(sie: Callable[..., Any], distribution: Callable[..., Any]) -> None:
    env = distribution("greeter", COMMAND_PLUGIN)
    env = distribution("greeting-target", GREETING, plugin="other") | env  # refused as a plugin: it states no version
    shown = sie("--help", env=env).stdout
    assert re.search(r"^  greet +Say hello to somebody\.$", shown, re.MULTILINE)
    assert "From plugins" in shown
    assert "1 plugin(s) can't be used" in shown
    assert sie("greet", "Ada", "--loud", env=env).stdout == "HELLO Ada\n"
    assert sie("greet", env=env).returncode == 2
    assert "Usage: sie greet" in sie("greet", "--help", env=env).stdout
    assert "did you mean 'greet'?" in sie("great", env=env).stderr


def test_a_plugins_command_that_can_not_be_imported_says_so(
    sie: Callable[..., Any], distribution: Callable[..., Any]
) -> None:
    done = sie("broken-greeting", env=distribution("greeter", COMMAND_PLUGIN))
    assert done.returncode == 1
    assert "No module named 'no_such_module_here'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sie_core.cli.front import run; run(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'cyclopts', 'rich', 'httpx', 'uvicorn', 'starlette', 'yaml',"
        " 'opentelemetry', 'psutil', 'pynvml', 'cattrs'};"
        "print('HEAVY', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize(("code", "limit_s"), [("import sie_core", 0.15), ("HELP", 0.3)])
def test_importing_and_help_are_quick(code: str, limit_s: float) -> None:
    # Processor time, the best of several: what others do on this machine at the moment is not what is measured.
    code = code.replace("HELP", "from sie_core.cli.front import run; run(['--help'])")
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) <= limit_s


def test_client_commands_import_no_framework(sie: Callable[..., Any]) -> None:
    code = (
        "import sys; from sie_core.cli.front import run;"
        "run(['status', '--url', 'http://127.0.0.1:9']); run(['plugins']); run(['check', 'no-such-file']);"
        "print('HEAVY', sorted({'torch', 'transformers', 'uvicorn', 'starlette', 'opentelemetry'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
