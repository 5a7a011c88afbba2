"""Print the flags of the SGLang that this interpreter has, read off its own parser, as a snapshot for ``flags/``.

PYTHONPATH=adapters-sglang/tests/support/shims/all PYTHON adapters-sglang/tests/support/snapshot.py > FILE
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from typing import Any


def about(action: argparse.Action) -> dict[str, Any]:
    """What ``_flags.py`` wants to know of one option."""
    kinds = {
        "_StoreTrueAction": "true",
        "_StoreFalseAction": "false",
        "BooleanOptionalAction": "boolean",
        "_StoreConstAction": "const",
        "_AppendAction": "append",
    }
    found: dict[str, Any] = {"dest": action.dest, "action": kinds.get(type(action).__name__, "store")}
    if found["action"] == "store" and action.nargs == 0:
        found["action"] = "true"
    if found["action"] in ("store", "append"):
        found["type"] = getattr(action.type, "__name__", "str") if action.type in (int, float) else "str"
        if action.nargs is not None:
            found["nargs"] = action.nargs
        if action.choices is not None:
            found["choices"] = sorted(str(choice) for choice in action.choices)
    return found


def main() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    flags = {
        name: about(action)
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(flags[name])}" for name in sorted(flags))
    version = importlib.metadata.version("sglang")
    print(f'{{\n  "version": {json.dumps(version)},\n  "flags": {{\n{lines}\n  }}\n}}')


if __name__ == "__main__":
    main()
