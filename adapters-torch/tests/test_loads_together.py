"""Models that are loaded at the same time, each on a thread of its own, as the server does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sie_core import Engine, ModelSpec

_LOADS = 12


def test_heads_that_share_their_weights_are_complete_however_many_load(make: Any, tmp_path: Path) -> None:
    """F16: transformers does not tie weights while it makes a model, in all threads: found by the soak."""
    folder = make.transformer(tmp_path / "m", head="AutoModelForMaskedLM")
    sparse: ModelSpec = make.spec(folder, "torch-sparse")

    def load(_: int) -> Engine:
        return make.adapter("torch-sparse").load(sparse, make.context(), make.events())

    with ThreadPoolExecutor(4) as pool:
        engines = [*pool.map(load, range(_LOADS))]
    for engine in engines:
        engine.close(make.context())
