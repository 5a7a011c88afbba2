"""Makes the smallest models that SGLang serves, with random weights. Run by an interpreter that has transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

CHAT = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


def save_tokenizer(folder: Path) -> Any:
    """Byte-level BPE without merges: every text is legal, one token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {letter: i + 1 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=512
    )
    fast.chat_template = CHAT
    fast.save_pretrained(str(folder))
    return fast


def save_gpt2(folder: Path) -> None:
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(str(folder))


def save_qwen2(folder: Path) -> None:
    """Of the architectures that SGLang turns into embedding models, the one that runs on a CPU."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(folder)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(str(folder))


if __name__ == "__main__":
    {"gpt2": save_gpt2, "qwen2": save_qwen2}[sys.argv[1]](Path(sys.argv[2]))
