"""Tokenizers whose files make a great deal of text of a little."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from sie_core import ModelSourceInvalid


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


MAP = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"a" * 500 + b"\0").decode()
BAD = {
    "ten times ten": chain(*[replace("a" * 10, String="a")] * 9),
    "nested": chain(chain(replace("b" * 9, String="a")), chain(replace("a" * 9, String="b"))),
    "one": replace("a" * 100, String="a"),
    "everywhere": chain(*[replace("aaaa", Regex="")] * 3),
    "every letter": chain(*[replace("aaaaaaaaa", Regex="[a-z]")] * 2),
    "a map": {"type": "Precompiled", "precompiled_charsmap": MAP},
}
GOOD = {
    "words": chain({"type": "Prepend", "prepend": "a"}, replace("▁", String=" "), {"type": "Lowercase"}),
    "blanks": chain({"type": "NFKC"}, replace(" ", Regex=" {2,}"), replace('"', String="``")),
    "a phrase": replace("the house", String="hs"),
}


@pytest.mark.parametrize("name", [*BAD, *GOOD])
def test_steps_that_multiply_a_text(load: Any, make: Any, tmp_path: Path, name: str) -> None:
    """F13: chained replacements that would make 10^9 letters of one are refused before a text goes through them."""
    folder = make.transformer(tmp_path / "m")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {**BAD, **GOOD}[name]}))
    if name in GOOD:
        assert make.embed(load(folder), ["a red fox"]).shape == (1, 32)
        return
    with pytest.raises(ModelSourceInvalid, match="normalizer of its tokenizer"):
        load(folder)
