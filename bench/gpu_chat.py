"""Makes a Llama with random weights for the drills on a GPU. Run by an interpreter that has transformers.

Its answers mean nothing, and take the time and the memory that those of a trained model of its size take.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

LAYERS = 16
CONTEXT = 4096
_HEAD = 128
_VOCABULARY = 512
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def width(nbytes: int) -> int:
    """The hidden size with which the weights, in bfloat16, come closest to ``nbytes``."""
    return max(_HEAD, round(math.sqrt(nbytes / 2 / (LAYERS * 12)) / _HEAD) * _HEAD)


def save(folder: Path, nbytes: int) -> None:
    import torch
    import transformers

    tokenizer = _tokenizer()
    hidden = width(nbytes)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 128 * 128,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // _HEAD,
        num_key_value_heads=hidden // _HEAD,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = transformers.LlamaForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _tokenizer() -> Any:
    """One token a byte: every text is legal."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fast_tokenizer: Any = PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<|end|>": 0, **{x: i + 1 for i, x in enumerate(letters)}}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = fast_tokenizer(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = _TEMPLATE
    return fast


if __name__ == "__main__":
    save(Path(sys.argv[1]), int(sys.argv[2]))
