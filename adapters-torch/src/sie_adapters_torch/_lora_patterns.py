"""Regular expressions in an adapter's configuration, which PEFT matches against the names of the model's modules.

A pattern can take longer than anybody lives to match, holds the whole process while it does, and can't be called off.
So patterns that are more than names are first tried on these very names by a process of their own, which the kernel
ends when it has had its share of the CPU. What passes takes PEFT about as long.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sie_core import EngineStartError, ModelSourceInvalid

__all__ = ["check_patterns"]

_SECONDS = 0.5  # of CPU time. Ordinary patterns take a few milliseconds on a thousand names
_PATIENCE_S = 60.0  # of the clock, on a machine that is busy
_MOST = 5000  # entries of a list or of a mapping: each is compared with the name of each module
_FEW = 50_000  # comparisons of plain names, which take less time than starting a process
_PLAIN = re.compile(r"(?:[\w.^$-]|\\\.)*")

_TRY = f"""
import json, re, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
patterns, names = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, {_SECONDS})
for where, pattern in patterns:
    print(where, flush=True)
    try:
        match = re.fullmatch if where in ("target_modules", "exclude_modules") else re.match
        for name in names:
            match(pattern, name)
    except (re.error, RecursionError, OverflowError):
        continue  # PEFT says what is wrong with it
"""


def check_patterns(file: Path, settings: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse settings that take too long to be compared with modules of these ``names``. Blocking.

    Raises:
        ModelSourceInvalid: they do.
        EngineStartError: there was no process to try them in.
    """
    for key, value in settings.items():
        if isinstance(value, list | dict | set | tuple) and len(value) > _MOST:
            raise ModelSourceInvalid(f"{file}: {key} has {len(value)} entries; the limit is {_MOST}")
    patterns = list(_patterns(settings))
    plain = all(_PLAIN.fullmatch(given) for _, given, _ in patterns)
    if not patterns or (plain and len(patterns) * len(names) <= _FEW):
        return
    slow = _too_slow([(where, whole) for where, _, whole in patterns], names)
    if slow is not None:
        raise ModelSourceInvalid(
            f"{file}: the patterns of {slow} take more than {_SECONDS} s to compare with the names of the model's "
            f"{len(names)} modules: give names in their place"
        )


def _patterns(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Where each stands, what is given there, and what PEFT makes of that."""
    for key in ("target_modules", "exclude_modules"):
        given = settings.get(key)
        if isinstance(given, str) and given.lower() != "all-linear":
            yield key, given, given
    for key in ("rank_pattern", "alpha_pattern"):
        given = settings.get(key)
        for each in given if isinstance(given, dict) else ():
            yield key, each, rf"(.*\.)?({each})$"
    layers = settings.get("layers_pattern")
    for each in [layers] if isinstance(layers, str) else layers or ():
        if isinstance(each, str):
            yield "layers_pattern", each, rf"(?:^|.*?\.){each}\.(?P<idx>\d+)\."


def _too_slow(patterns: Sequence[tuple[str, str]], names: Sequence[str]) -> str | None:
    """Where the pattern stands that took too long or too much memory; ``None``: all of them pass."""
    given = json.dumps([patterns, list(names)])
    command = [sys.executable or "python3", "-I", "-S", "-c", _TRY]
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_PATIENCE_S, check=False,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return patterns[0][0]
    except OSError as error:
        raise EngineStartError(f"the patterns of a LoRA adapter can't be tried in a process: {error}") from error
    if not done.returncode:
        return None
    tried = done.stdout.split()
    return tried[-1] if tried else patterns[0][0]
