"""What a model will take, from its files alone. All sizes in bytes.

- Weights: every tensor of the checkpoint that the encoder loads, in the precision it is loaded in, each rounded up to
  64 bytes, and a little for the tables that the model computes itself.
- Headroom: activations of the largest batch, ``batch_tokens`` tokens, or of the one longest text. A transformer layer
  holds at its peak, per token, the residual stream, query, key, value, the attention's result and its projection, two
  copies in a normalisation (8 vectors of the hidden size), and then either the widened vector before and after its
  activation function (2 of the intermediate size; 3 with a gate), or what attention holds for each pair of tokens: the
  mask of a padded batch, a byte and once more in the model's precision, and where there is no fused kernel the tables
  of each head. Ids, mask and positions add 8 bytes each, pooling a hidden vector in float32. By the allocator's own
  figures the peaks of BERT, ModernBERT, MPNet, T5, Qwen3 and DeBERTa are 40 to 98% of this.
- Context: what a CUDA context and the kernels of torch take before the first weight, measured as 450 to 520 MB by
  ``nvidia-smi`` on current drivers; 512 MiB is booked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen
from sie_core import AdmissionReserve, DeviceNeed, DeviceView, ModelSpec, TensorEntry

from sie_adapters_torch._checkpoint import DTYPE_BYTES, read_headers, tensor_bytes
from sie_adapters_torch._dense_files import HeadStep
from sie_adapters_torch._files import ModelFiles, positions_of
from sie_adapters_torch._options import LoadOptions

__all__ = [
    "FEWEST_TOKENS",
    "Size",
    "activation_bytes_per_token",
    "head_bytes",
    "pool_name",
    "relative_bytes",
    "reserve",
    "weight_bytes",
]

CUDA_CONTEXT = 512 * 1024 * 1024
CUDA_WORKSPACE = 32 * 1024 * 1024  # cuBLAS takes this much on its first call on current GPUs
_COMPUTED_TABLES = 64 * 1024
_POSITION_TABLES = 2 * 8  # bytes a position: its number and its token type, as BERT and its kin keep them
_MASKED = 4096  # tokens: two texts of this length fill a batch; a longer one is alone in its batch, without a mask
# Tables that each head's attention holds, in float32, where transformers has no fused kernel.
# The oldest supported release holds one more of them than the newest does.
_UNFUSED = {"mpnet": 3, "t5": 3, "mt5": 3, "umt5": 3, "deberta": 4, "deberta-v2": 4}
_EAGER = 3
_SLIDING = 2 * 8  # bytes a pair: how far apart two tokens are, twice, for masks of sliding windows
_RELATIVE = 512  # positions to the left and to the right that DeBERTa has vectors for
# Parts of checkpoints that an encoder does not load: heads for pre-training and classification.
_HEADS = ("cls.", "lm_head.", "classifier.", "score.", "qa_outputs.", "vocab_", "generator_", "discriminator_")


@frozen
class Size:
    """What a model takes beside the weights of its checkpoint, in bytes.

    ``token_bytes``: activations of one token of a batch. ``fixed_bytes``: what a batch takes however small it is.
    ``head_bytes``: weights that are not in the checkpoint of the encoder.
    """

    token_bytes: int
    fixed_bytes: int = 0
    head_bytes: int = 0


def pool_name(device: str) -> str:
    """In-process engines on one device share a context and take turns."""
    return f"torch:{device}"


def weight_bytes(
    files: ModelFiles,
    dtype: str,
    entries: Sequence[TensorEntry] | None = None,
    loaded: Callable[[TensorEntry], bool | None] = lambda entry: None,
) -> int:
    """Bytes of the weights once loaded, of ``entries`` or what the files' headers say. Raises ModelSourceInvalid.

    ``loaded`` says whether a tensor is loaded; ``None``: as for an encoder alone.
    """
    computed = _COMPUTED_TABLES + _POSITION_TABLES * (positions_of(files.text_config) or 0)
    if files.pickled:
        # What a pickle holds is not known without running it: its size, doubled when it may be half precision.
        pickles = sum(file.stat().st_size for file in files.folder.glob("pytorch_model*.bin"))
        return pickles * (2 if dtype == "float32" else 1) + computed
    entries = read_headers(files.weights) if entries is None else entries
    decoder = ("decoder.",) if files.config.get("model_type") in ("t5", "mt5", "umt5") else ()
    said = [(entry, loaded(entry)) for entry in entries]
    kept = [entry for entry, yes in said if (not entry.name.startswith((*_HEADS, *decoder)) if yes is None else yes)]
    return tensor_bytes(kept or entries, dtype) + computed


def activation_bytes_per_token(files: ModelFiles, options: LoadOptions) -> int:
    """Bytes that one token of a batch takes while it runs; see the module's text for the formula."""
    config, hidden, item = files.text_config, files.hidden_size, DTYPE_BYTES[options.dtype]
    wide = _number(config, ("intermediate_size", "d_ff", "hidden_dim", "n_inner"), 4 * hidden)
    heads = _number(config, ("num_attention_heads", "num_heads", "n_heads", "n_head"), max(1, hidden // 64))
    longest = files.max_length or positions_of(config) or 512
    kind, mask = str(config.get("model_type")), 1 + item
    tables = _UNFUSED.get(kind, _EAGER if options.attn == "eager" else 0)
    if tables:
        attention = longest * (4 * tables * heads + mask)
    else:
        attention = longest * _SLIDING if kind == "modernbert" else min(longest, _MASKED) * mask
    token = 8 * hidden * item + 3 * 8 + 4 * hidden
    if kind == "modernbert":
        token += 2 * longest  # its two masks, which all layers share
    if kind in FEWEST_TOKENS:
        each_text, each_token = relative_bytes(hidden, heads, item)
        token += each_token
        attention = max(attention, each_text // FEWEST_TOKENS[kind])
    return token + max(3 * wide * item, attention)


def relative_bytes(hidden: int, heads: int, item: int) -> tuple[int, int]:
    """What DeBERTa takes for a text, and what for a token, because of relative positions: a text has copies of their
    vectors, and a token products with all of them."""
    return 3 * _RELATIVE * hidden * item, 2 * heads * _RELATIVE * 4


FEWEST_TOKENS = {"deberta": 64, "deberta-v2": 64}
"""As how many tokens a text counts at least in a batch, by ``model_type``: what it takes does not shrink with it."""


def _number(config: Mapping[str, Any], keys: Sequence[str], usual: int) -> int:
    return next((int(config[key]) for key in keys if config.get(key)), usual)


def head_bytes(steps: Sequence[HeadStep], width: int) -> int:
    """Bytes of the steps after pooling, which are kept in float32."""
    total = 0
    for step in steps:
        if step.kind == "dense":
            total += 4 * step.outputs * (step.inputs + 1) + 2 * 64
            if step.residual and step.inputs != step.outputs:
                total += 4 * step.outputs * step.inputs + 64
            width = step.outputs
        elif step.kind == "layer_norm":
            total += 2 * (4 * width + 64)
    return total


def reserve(
    model: ModelSpec, devices: Sequence[DeviceView], weights: int, size: Size, longest: int = 0
) -> AdmissionReserve:
    """The answer to ``admission_reserve`` for a model of ``weights`` bytes on one device.

    ``longest``: tokens of the longest text, which is run whole even where a batch has fewer.
    """
    best = devices[0] if devices else None
    kind = best.kind if best is not None else "cpu"
    headroom = model.runtime_headroom
    if headroom is None:
        per_batch = max(model.batch_tokens, longest) * size.token_bytes + size.fixed_bytes
        headroom = {"emulated": 0, "cuda": per_batch + CUDA_WORKSPACE}.get(kind, per_batch)
    need = DeviceNeed(
        min_bytes=weights,
        want_bytes=weights,
        context_bytes=CUDA_CONTEXT if kind == "cuda" else 0,
        headroom_bytes=headroom,
    )
    return AdmissionReserve(
        ranks=(need,),
        # Weights are read into RAM first; on a CPU that is where they stay.
        host_load_bytes=0 if kind == "cpu" else weights,
        headroom_pool=pool_name(best.name) if best is not None else None,
    )
