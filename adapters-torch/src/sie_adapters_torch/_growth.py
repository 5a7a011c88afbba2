"""How many letters a tokenizer's normalizer makes of one: a file of a few hundred bytes can make a billion."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sie_core import ModelSourceInvalid

__all__ = ["check_growth"]

_MOST = 64.0  # Unicode's own compatibility forms make up to 18 letters of one, or 33 bytes


def check_growth(normalizer: Any, folder: Path) -> None:
    """Refuse a normalizer of the tokenizers library whose steps multiply a text. Raises ModelSourceInvalid."""
    if normalizer is None:
        return
    found = _growth(json.loads(normalizer.__getstate__()))
    if found > _MOST:
        raise ModelSourceInvalid(
            f"{folder}: the normalizer of its tokenizer makes up to {found:.0f} letters of one; limit: {_MOST:.0f}"
        )


def _growth(step: Mapping[str, Any]) -> float:
    """Letters that come out for each that goes in, at most."""
    kind = step.get("type")
    if kind == "Sequence":
        product = 1.0
        for each in step["normalizers"]:
            product = min(product * _growth(each), 1e18)
        return product
    if kind == "Replace":
        return _replaced(step["pattern"], len(step["content"]))
    if kind == "Precompiled":
        return _mapped(step.get("precompiled_charsmap") or "")
    return 1.0


def _replaced(pattern: Mapping[str, str], letters: int) -> float:
    if "String" in pattern:
        return max(1.0, letters / max(1, len(pattern["String"])))
    try:
        everywhere = re.match(pattern["Regex"], "") is not None
    except re.error:  # of another kind of expression
        everywhere = True
    return float(letters + 1 if everywhere else max(1, letters))


def _mapped(charsmap: str) -> float:
    """sentencepiece's map: the size of a trie, the trie, and the replacements with a zero after each."""
    content = base64.b64decode(charsmap)
    start = 4 + int.from_bytes(content[:4], "little")
    return float(max(1, *(len(each) for each in content[start:].split(b"\0"))))
