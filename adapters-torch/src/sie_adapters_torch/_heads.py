"""Heads that belong to a checkpoint: masked language model, classifiers. Whatever an architecture calls theirs.

The model is cut in two: its encoder, which runs without padding like any other, and what its own ``forward`` does with
the hidden states. Every weight of both comes from the checkpoint.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._weights import HeadKind, load_model

__all__ = ["CheckpointHead", "VocabularyHead", "load_masked_lm", "load_with_head"]


class _Given(torch.nn.Module):
    """Stands for the encoder: its output is what it is called with."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled: Any = self.pooler(inputs_embeds) if self.pooler is not None else None
        given: Any = BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)
        given.cache = given.past_key_values = None  # what heads of decoders hand on, by the release's name for it
        return given


class CheckpointHead(torch.nn.Module):
    """A model without its encoder, around the same tensors. Safe on several threads at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        rest = copy.copy(model)
        rest._modules = dict(model._modules) | {model.base_model_prefix: _Given(model.base_model)}
        self.rest = rest
        self.width = int(model.config.get_text_config().hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states (rows, tokens, width): (rows, tokens, n), or (rows, n) where a row is classified."""
        result: torch.Tensor = self.rest(inputs_embeds=hidden, return_dict=True).logits
        return result


class VocabularyHead(torch.nn.Module):
    """The head of a masked language model in two steps: features, and the matrix that makes logits of them.

    The matrix is most of the work, and can so be applied to a part of the vocabulary at a time. Raises ValueError for a
    model whose logits come about in another way.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        output: Any = model.get_output_embeddings()
        names = [name for name, module in model.named_modules() if module is output]
        if not isinstance(output, torch.nn.Linear) or not names:
            raise ValueError(f"{type(model).__name__} has no matrix that makes its logits")
        head = CheckpointHead(model)
        self.features = CheckpointHead(_without(model, names[0]))
        self.output = output
        with torch.inference_mode():
            sample = torch.linspace(-1, 1, 2 * head.width).reshape(1, 2, head.width).to(output.weight.dtype)
            whole, halves = head(sample), output(self.features(sample))
        if whole.shape != halves.shape or not torch.equal(whole, halves):
            raise ValueError(f"{type(model).__name__} does more to its logits than its output matrix")


def _without(model: Any, name: str) -> Any:
    """The model with its submodule ``name`` left out: modules of their own on the way there, the others shared."""
    first, _, rest = name.partition(".")
    twin = copy.copy(model)
    inner = _without(model._modules[first], rest) if rest else torch.nn.Identity()
    twin._modules = dict(model._modules) | {first: inner}
    return twin


def load_with_head(
    files: ModelFiles, options: LoadOptions, kind: HeadKind
) -> tuple[torch.nn.Module, CheckpointHead, Any]:
    """The encoder, the head and the configuration of a model, on the CPU. Raises LoadError."""
    whole, config = load_model(files, options, kind)
    model: Any = whole
    if model.base_model_prefix not in model._modules:
        raise ModelSourceInvalid(f"{files.folder}: {type(model).__name__} can't be told apart from its encoder")
    return model.base_model, CheckpointHead(model).eval(), config


def load_masked_lm(files: ModelFiles, options: LoadOptions) -> tuple[torch.nn.Module, VocabularyHead, Any]:
    """A masked language model's encoder, head and configuration, on the CPU. Raises LoadError."""
    model, config = load_model(files, options, "masked_lm")
    try:
        return cast(Any, model).base_model, VocabularyHead(model).eval(), config
    except ValueError as error:
        raise ModelSourceInvalid(f"{files.folder}: {error}") from error
