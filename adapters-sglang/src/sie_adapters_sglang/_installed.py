"""Which SGLang an interpreter has. The interpreter is asked, once; it may be that of another environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from attrs import frozen
from sie_core import EngineStartError, MissingDependency

__all__ = ["Installed", "find_installed", "interpreter"]

_ASK = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("sglang", "torch-memory-saver"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""
_ASK_S = 25.0
"""Less than the core waits for what a model needs."""
_MATTERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


@frozen
class Installed:
    """``python`` is the interpreter's path; ``memory_saver`` the version of torch-memory-saver, if there is one."""

    python: str
    sglang: str
    memory_saver: str | None = None


def interpreter(python: str | None) -> str:
    """The path of an interpreter; by default the server's own. Raises MissingDependency: there is none."""
    if python is None:
        return sys.executable
    found = shutil.which(os.path.expanduser(python))  # noqa: PTH111 - shutil.which wants text
    if found is None:
        raise MissingDependency(f"python: {python!r} is no interpreter that can be run; name one that has sglang")
    return os.path.abspath(found)  # noqa: PTH100 - a link into an environment must stay one


def find_installed(python: str | None, env: Mapping[str, str]) -> Installed:
    """What the interpreter has.

    Raises:
        MissingDependency: no such interpreter, or no SGLang in it.
        EngineStartError: the interpreter does not answer.
    """
    return _ask(interpreter(python), tuple((name, env[name]) for name in _MATTERS if name in env))


@cache
def _ask(python: str, env: tuple[tuple[str, str], ...]) -> Installed:
    try:
        done = subprocess.run(
            [python, "-c", _ASK], env={**os.environ, **dict(env)}, capture_output=True, text=True, timeout=_ASK_S
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise EngineStartError(f"{python} could not be asked for its SGLang: {error}") from error
    if found["sglang"] is None:
        raise MissingDependency(
            f"{python} has no sglang: install it there, or name the interpreter that has it with the option `python`"
        )
    return Installed(python, found["sglang"], found["torch-memory-saver"])
