"""What a model folder says about a cross-encoder, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from sie_core import ModelSourceInvalid, UnsafeSource

from sie_adapters_torch._files import ModelFiles, Prompts, limited, read_model, read_modules, read_prompts
from sie_adapters_torch._labels import check_head, read_labels
from sie_adapters_torch._options import Activation, CrossEncoderOptions
from sie_adapters_torch._st_files import read_transformer

__all__ = ["CrossEncoderFiles", "read_cross_encoder"]

_NAME = "torch-cross-encoder"
_HEAD = "ForSequenceClassification"
_GENERATIVE = (
    ": it ranks by the words that it would write next. Take a version of it that was converted to "
    f"{_HEAD} (the same weights, and the same scores)"
)


@frozen(eq=False)
class CrossEncoderFiles:
    """A classifier of pairs of texts. ``label``: the place of the logit that is the score."""

    model: ModelFiles
    labels: tuple[str, ...]
    label: int
    activation: Activation
    prompts: Prompts


def read_cross_encoder(folder: Path, options: CrossEncoderOptions, *, weights_needed: bool = True) -> CrossEncoderFiles:
    """Read a cross-encoder's folder. Raises ModelSourceInvalid, UnsafeSource."""
    prompts, about = read_prompts(folder, options)
    model = limited(read_model(_place(folder), options, weights_needed=weights_needed), options.max_length)
    kinds = model.config.get("architectures")
    generative = isinstance(kinds, list) and bool(kinds) and str(kinds[0]).endswith(("ForCausalLM", "LMHeadModel"))
    check_head(model, _HEAD, adapter=_NAME, hint=_GENERATIVE if generative else "")
    labels = read_labels(model)
    activation = options.activation or _activation(model, about, len(labels))
    # As in CrossEncoder: the default prompt goes before the query, and nothing before a document.
    default = prompts.named.get(about.get("default_prompt_name") or "", "")
    query = default if options.query_prompt is None else options.query_prompt
    prompts = Prompts(prompts.named, query, options.document_prompt or "")
    return CrossEncoderFiles(model, labels, _label(folder, labels, options), activation, prompts)


def _place(folder: Path) -> Path:
    steps = read_modules(folder, ("Transformer", "LogitScore"), adapter=_NAME)
    if steps is None:
        return folder
    file, place = folder / "modules.json", steps[0][1]
    if any(name == "LogitScore" for name, _ in steps):
        raise ModelSourceInvalid(f"{file} has a LogitScore{_GENERATIVE}")
    transformer = read_transformer(place)
    task = transformer.content.get("transformer_task")
    if len(steps) != 1 or task != "sequence-classification":
        raise ModelSourceInvalid(f"{file}: its Transformer gives {task or 'hidden states'}, not the scores of pairs")
    transformer.check(task, "scores", "logits", adapter=_NAME)
    return place


def _label(folder: Path, labels: tuple[str, ...], options: CrossEncoderOptions) -> int:
    known = ", ".join(labels)
    if options.label is not None:
        if options.label not in labels:
            raise ModelSourceInvalid(f"{folder} has no label {options.label!r}; it has {known}")
        return labels.index(options.label)
    if len(labels) != 1:
        raise ModelSourceInvalid(
            f"{folder} tells {len(labels)} labels apart ({known}): a score is one number; name one with the option "
            "label, or serve the model with torch-classifier"
        )
    return 0


_BY_CLASS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}


def _activation(model: ModelFiles, about: Mapping[str, Any], labels: int) -> Activation:
    """As CrossEncoder takes it: its own file, what it left in config.json, what older releases left there."""
    own, inner = about.get("activation_fn"), model.config.get("sentence_transformers")
    if own is None and isinstance(inner, dict):
        own = inner.get("activation_fn")
    if own is None:
        own = model.config.get("sbert_ce_default_activation_function")
    if own is None:
        return "sigmoid" if labels == 1 else "identity"
    name = str(own).rpartition(".")[2]
    if not str(own).startswith("torch."):
        raise UnsafeSource(f"{model.folder} asks for {own!r}, code of the model's own; set the option activation")
    if name not in _BY_CLASS:
        raise ModelSourceInvalid(f"{model.folder} asks for {own}; {_NAME} knows {', '.join(_BY_CLASS)}")
    return _BY_CLASS[name]
