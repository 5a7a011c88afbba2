"""Write a snapshot of SGLang's command line, read off the real parser of an installed release.

    python scripts/snapshot_flags.py PYTHON [PYTHON ...]

Each ``PYTHON`` is an interpreter of an environment with SGLang in it. One file a version, in the package's ``flags``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FLAGS = Path(__file__).parents[1] / "src" / "sie_adapters_sglang" / "flags"

READER = r"""
import argparse, importlib.metadata, json, sys
from sglang.srt.server_args import ServerArgs

def kind(action):
    name = type(action).__name__
    known = {"_StoreTrueAction": "true", "_StoreFalseAction": "false", "_AppendAction": "append",
             "BooleanOptionalAction": "boolean", "_StoreConstAction": "const"}
    if name in known:
        return known[name]
    return "true" if action.nargs == 0 else "store"

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = {}
for action in parser._actions:
    if action.dest == "help":
        continue
    about = {"dest": action.dest, "action": kind(action)}
    if about["action"] in ("store", "append"):
        about["type"] = getattr(action.type, "__name__", "str") if action.type in (int, float) else "str"
    if action.nargs not in (None, 0):
        about["nargs"] = action.nargs
    if action.choices is not None:
        about["choices"] = sorted(map(str, action.choices))
    for option in action.option_strings:
        if option.startswith("--"):
            flags[option] = about
print("SNAPSHOT" + json.dumps({"version": importlib.metadata.version("sglang"), "flags": flags}))
"""


def snapshot(python: str) -> Path:
    """Read the parser that ``python`` sees. Raises CalledProcessError: it has no SGLang that can be imported."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([python, "-c", READER], capture_output=True, text=True, check=True, env=environment)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SNAPSHOT"))
    found = json.loads(line.removeprefix("SNAPSHOT"))
    target = FLAGS / f"{found['version']}.json"
    rows = (f"    {json.dumps(name)}: {json.dumps(about)}" for name, about in sorted(found["flags"].items()))
    head = f'{{\n  "version": {json.dumps(found["version"])},\n  "flags": {{\n'
    target.write_text(head + ",\n".join(rows) + "\n  }\n}\n")
    return target


if __name__ == "__main__":
    for interpreter in sys.argv[1:]:
        print(snapshot(interpreter))
