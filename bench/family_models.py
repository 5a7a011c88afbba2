"""Models with random weights, made on the spot: of the families of which no package ships real ones.

They have the shape and the tokenizer of real models, so that they take as long; what they answer means nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from contestants import model_folder

__all__ = ["DIMS", "DOCUMENT_MARKER", "save_colbert", "save_cross_encoder"]

DIMS = 128
"""Of each of ColBERT's vectors."""
DOCUMENT_MARKER = "[unused1]"
_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def save_cross_encoder(folder: Path) -> Path:
    """A BERT that classifies pairs, with one label; MiniLM's tokenizer."""
    import torch
    from transformers import BertForSequenceClassification
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar

    torch.manual_seed(0)
    model: Any = BertForSequenceClassification(_bert(num_labels=1))
    # As they are made, all scores are alike: nobody could tell whether two answers are the same.
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    quiet()
    model.save_pretrained(str(folder))
    return _with_tokenizer(folder)


def save_colbert(folder: Path) -> Path:
    """A BERT with a projection, in the layout of ColBERT's own code; MiniLM's tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertModel

    torch.manual_seed(0)
    config = _bert()
    model: Any = BertModel(config, add_pooling_layer=False)
    tensors = {f"bert.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    config.architectures = ["HF_ColBERT"]
    config.save_pretrained(str(folder))
    save_file({**tensors, "linear.weight": torch.randn(DIMS, config.hidden_size) * 0.05}, folder / "model.safetensors")
    said = {"query_token_id": "[unused0]", "doc_token_id": DOCUMENT_MARKER, "query_maxlen": 32, "doc_maxlen": 180}
    (folder / "artifact.metadata").write_text(json.dumps({**said, "dim": DIMS}), encoding="utf-8")
    return _with_tokenizer(folder)


def _bert(**more: Any) -> Any:
    """4 layers of 256, as the smaller of the public rerankers and ColBERT models have them."""
    from transformers import BertConfig

    shape: dict[str, Any] = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    return BertConfig(vocab_size=30522, max_position_embeddings=512, **shape, **more)


def _with_tokenizer(folder: Path) -> Path:
    real = model_folder()
    for name in _TOKENIZER:
        shutil.copy(real / name, folder / name)
    whole = json.loads((real / "tokenizer.json").read_text(encoding="utf-8"))
    # MiniLM's own lengths are none of theirs.
    (folder / "tokenizer.json").write_text(json.dumps({**whole, "truncation": None, "padding": None}), encoding="utf-8")
    return folder
