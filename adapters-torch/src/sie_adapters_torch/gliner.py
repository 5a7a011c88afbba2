"""``torch-gliner``: entities by labels that come with the request. Importing this module imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from attrs import evolve
from sie_core import (
    Capabilities,
    Engine,
    EngineEvents,
    ModelSourceInvalid,
    ModelSpec,
    Source,
    Task,
    TensorEntry,
    TransitionContext,
)

from sie_adapters_torch._adapter import TorchAdapter
from sie_adapters_torch._checkpoint import DTYPE_BYTES
from sie_adapters_torch._gliner_files import GlinerFiles, check_code, encoder_of, read_gliner
from sie_adapters_torch._json import read_object
from sie_adapters_torch._options import GlinerOptions, options_of
from sie_adapters_torch._reserve import Size, relative_bytes
from sie_adapters_torch._source import Want, find_folder

__all__ = ["LABEL_TOKENS", "WORK_BYTES", "GlinerAdapter", "GlinerOptions", "work_bytes"]

WORK_BYTES = 256 * 1024 * 1024
"""Bytes that a batch may take while it runs, but for a single text, which may take more."""
LABEL_TOKENS = 8192
"""Tokens of all labels together, padding included, where they have an encoder of their own."""
_TOKEN_BYTES = 64  # ids and masks; what grows with a batch is within WORK_BYTES


class GlinerAdapter(TorchAdapter[GlinerFiles]):
    """GLiNER, through its own package: the extra ``gliner``."""

    options: ClassVar[type] = GlinerOptions
    declares = Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=())

    def read(self, folder: Path, options: Any, *, weights_needed: bool) -> GlinerFiles:
        return read_gliner(folder, options, weights_needed=weights_needed)

    def files(self, model: ModelSpec, want: Want = "all") -> GlinerFiles:
        """As for every adapter; and of the encoders that the model is made from what it lacks itself."""
        found = super().files(model, want)
        options, small = options_of(model, GlinerOptions), want if want == "cached" else "files"
        if found.backbone is not None:
            config = _config_on_hub(model, found.backbone, options, small)
            found = evolve(found, model=evolve(found.model, config=dict(found.model.config) or config))
        if found.labels_backbone is not None:
            config = _config_on_hub(model, found.labels_backbone, options, small)
            found = evolve(found, labels_config=dict(found.labels_config) or config)
        return evolve(found, limit=_limit(found, options))

    def capabilities(self, files: GlinerFiles) -> Capabilities:
        return capabilities_of(files)

    def size(self, files: GlinerFiles, options: Any) -> Size:
        return size_of(files, options)

    def loaded(self, files: GlinerFiles, entry: TensorEntry) -> bool | None:
        return True

    def build(self, model: ModelSpec, files: GlinerFiles, ctx: TransitionContext, events: EngineEvents) -> Engine:
        from sie_adapters_torch._gliner_engine import load_gliner

        return load_gliner(model, files, ctx, events)


def _config_on_hub(model: ModelSpec, name: str, options: GlinerOptions, want: Want) -> dict[str, Any]:
    """The configuration of a model on the hub; its tokenizer comes along. Raises as ``find_folder``."""
    file = find_folder(evolve(model, source=Source("hf", name)), want) / "config.json"
    config = read_object(file)
    if config is None:
        raise ModelSourceInvalid(f"{model.name} is made from {name}, which has no config.json")
    check_code(config, file, options)
    return config


def capabilities_of(files: GlinerFiles) -> Capabilities:
    """What a model takes and gives. Its length is that of its encoder: a text may have fewer words than that."""
    return Capabilities(tasks=frozenset({Task.EXTRACT}), outputs=(), max_sequence_length=files.limit)


def _limit(files: GlinerFiles, options: GlinerOptions) -> int:
    """Tokens that the encoder may have at a time. Raises ModelSourceInvalid."""
    positions = encoder_of(files.model.config).positions
    usual = files.words * 5 // 2 + 64
    if options.max_length is not None and positions is not None and options.max_length > positions:
        raise ModelSourceInvalid(f"max_length is {options.max_length}, and the model has {positions} positions")
    return options.max_length or min(usual, positions or usual)


def size_of(files: GlinerFiles, options: GlinerOptions) -> Size:
    """What it takes beside its weights: a full batch, or the one longest text with the most labels."""
    largest = work_bytes(files, options, files.limit, files.words, options.max_labels)
    labels = 0
    if files.own_labels:
        labels = LABEL_TOKENS * _activations(files.labels_config, DTYPE_BYTES[options.dtype])
    return Size(token_bytes=_TOKEN_BYTES, fixed_bytes=max(WORK_BYTES, largest) + labels)


def work_bytes(files: GlinerFiles, options: GlinerOptions, tokens: int, words: int, labels: int) -> int:
    """Bytes that one text takes while it runs: the encoder's, those of the spans of its words, and their scores."""
    item = DTYPE_BYTES[options.dtype]
    encoder = encoder_of(files.model.config)
    attention = encoder.heads * encoder.copies * tokens * tokens * 4
    if encoder.relative:
        each_text, each_token = relative_bytes(encoder.hidden, encoder.heads, item)
        attention += each_text + each_token * tokens
    item_bytes = files.hidden * item
    if files.spans:
        # A span's two ends, beside each other, widened four times, and what becomes of them; each score four times.
        scores = words * files.width * (10 * item_bytes + 16 * labels)
    else:
        # Each word beside each label and their product, widened four times, before and after an activation function.
        scores = words * 10 * item_bytes + words * labels * (11 * item_bytes + 3 * 16)
    return tokens * _activations(files.model.config, item) + attention + scores


def _activations(config: Any, item: int) -> int:
    """Of one token, as for any transformer; see ``_reserve``."""
    encoder = encoder_of(config)
    return (8 * encoder.hidden + 3 * encoder.wide) * item + 3 * 8 + 4 * encoder.hidden
