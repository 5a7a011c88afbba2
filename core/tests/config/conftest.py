from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write ``sie.yaml`` into the working directory, an empty one, and give its relative path."""
    monkeypatch.chdir(tmp_path)
    for name in ("SIE_PORT", "SIE_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def write(text: str) -> Path:
        path = Path("sie.yaml")
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return write
