"""What a checkpoint will take, read from ``config.json`` and the headers of its safetensors files alone.

- Weights: every tensor in the precision it is loaded in; tensors that are quantized stay as they are. Of several ranks
  each holds its share of the matrices, of the key and value projections no less than one head, and all of the vectors.
- KV cache, a token and rank: 2 vectors (key and value) for each head that the rank holds, in each layer that attends;
  with multi-head latent attention one compressed vector a layer, which every rank holds in full.

The engine's own figures replace both once it has run; until then these decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from sie_core import ModelSourceInvalid, TensorEntry, read_file, read_headers

__all__ = ["MOST_JSON", "Checkpoint", "read_checkpoint"]

MOST_JSON = 64 * 1024 * 1024
"""Bytes of a JSON file of a model that are read."""

_FULL_PRECISION = ("F64", "F32", "F16", "BF16")
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
_KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_STATE_KEYS = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "mamba_num_heads", "linear_attn_config")


@frozen
class Checkpoint:
    """A model's files. ``config`` is that of the part that generates, where the model has several parts."""

    config: Mapping[str, Any]
    dtype: str
    """What the floating-point weights are loaded as."""
    tensors: tuple[TensorEntry, ...] = ()
    pickled_bytes: int = 0
    """Size of weights whose files don't say what they hold."""

    def weight_bytes(self, ranks: int = 1) -> int:
        """Bytes of the weights that one of ``ranks`` ranks holds."""
        item = _DTYPE_BYTES[self.dtype]
        total = 0
        for tensor in self.tensors:
            size = tensor.elements * item if tensor.dtype in _FULL_PRECISION else tensor.nbytes
            total += -(-size // self._parts(tensor, ranks))
        return total + -(-self.pickled_bytes // ranks)

    def _parts(self, tensor: TensorEntry, ranks: int) -> int:
        if len(tensor.shape) < 2:
            return 1
        if any(part in tensor.name for part in ("k_proj", "v_proj")) and not self.latent:
            return min(ranks, self.kv_heads)
        return ranks

    @property
    def layers(self) -> int:
        return self._number("num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def heads(self) -> int:
        return self._number("num_attention_heads", "n_head", "n_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        return self._number("num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=self.heads)

    @property
    def head_dim(self) -> int:
        hidden = self._number("hidden_size", "n_embd", "d_model", "dim")
        return self._number("head_dim", default=hidden // max(1, self.heads))

    @property
    def vocabulary(self) -> int | None:
        """How many token ids it has; ``None``: its files don't say."""
        size = self.config.get("vocab_size")
        if isinstance(size, int) and size > 0:
            return size
        return next((tensor.shape[0] for tensor in self.tensors if tensor.name.endswith(_EMBEDDINGS)), None)

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state beside the KV cache (mamba, linear attention), which a token cap does not bound."""
        return any(self.config.get(key) for key in _STATE_KEYS)

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend to a sliding window only, so that the engine makes a pool of its own for them."""
        kinds = set(self.config.get("layer_types") or ())
        return len(kinds & {"sliding_attention", "full_attention", "chunked_attention"}) > 1

    @property
    def is_hybrid(self) -> bool:
        """Whether the engine makes several pools for it, of which only one is an ordinary KV cache."""
        return self.has_windows or self.has_state

    @property
    def file_bytes(self) -> int:
        """Bytes of its weights as they lie on disk."""
        return sum(tensor.nbytes for tensor in self.tensors) + self.pickled_bytes

    @property
    def latent(self) -> bool:
        """Whether it attends by one compressed vector a layer (multi-head latent attention)."""
        return bool(self.config.get("kv_lora_rank"))

    def kv_bytes_per_token(self, ranks: int = 1, kv_cache_dtype: str = "auto") -> int:
        """Bytes that one token of KV cache takes on one of ``ranks`` ranks."""
        item = _KV_BYTES.get(kv_cache_dtype, _DTYPE_BYTES[self.dtype])
        kinds = self.config.get("layer_types") or ()
        attending = sum("linear" not in str(kind) and "mamba" not in str(kind) for kind in kinds) or self.layers
        if self.latent:
            return (int(self.config["kv_lora_rank"]) + self._number("qk_rope_head_dim", default=0)) * attending * item
        heads = max(1, self.kv_heads // ranks)
        return heads * (self.head_dim + self._number("v_head_dim", default=self.head_dim)) * attending * item

    def _number(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise ModelSourceInvalid(f"config.json has none of {', '.join(keys)}: its KV cache can't be sized")
        return default


def read_checkpoint(folder: Path, dtype: str = "auto", absent: int = 0) -> Checkpoint:
    """Read a model folder. ``dtype``: as the option says, ``auto`` for the checkpoint's own.

    ``absent``: bytes of weights that belong to it and are not there yet.

    Raises:
        ModelSourceInvalid: no model folder, damaged files, no weights, or a dtype that nobody knows.
    """
    outer = _read_config(folder / "config.json")
    config = next((outer[key] for key in ("text_config", "llm_config") if isinstance(outer.get(key), dict)), outer)
    own = str(config.get("dtype") or config.get("torch_dtype") or outer.get("dtype") or outer.get("torch_dtype") or "")
    own = own.removeprefix("torch.") or "float32"
    if dtype == "auto":
        # Checkpoints in float32 are loaded in half precision: the engine's own rule.
        dtype = "float16" if own in ("float32", "float", "float64") else own
    if dtype not in _DTYPE_BYTES:
        raise ModelSourceInvalid(f"{folder}: dtype {dtype!r} is none of {', '.join(_DTYPE_BYTES)}")
    files = [] if absent else sorted(folder.glob("*.safetensors"))
    tensors = tuple(read_headers(files))
    pickled = absent or (
        0 if files else sum(file.stat().st_size for end in ("bin", "pt", "gguf") for file in folder.glob(f"*.{end}"))
    )
    if not tensors and not pickled:
        raise ModelSourceInvalid(f"{folder} holds no weights (*.safetensors)")
    return Checkpoint(config, dtype, tensors, pickled)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_file(file, MOST_JSON))
    except OSError as error:
        raise ModelSourceInvalid(f"{file} can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelSourceInvalid(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelSourceInvalid(f"{file} is no model configuration")
    return config
