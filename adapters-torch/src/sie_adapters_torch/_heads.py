"""Heads that belong to a checkpoint: masked language model, classifiers. Whatever an architecture calls theirs.

The model is cut in two: its encoder, which runs without padding like any other, and what its own ``forward`` does with
the hidden states. Every weight of both comes from the checkpoint.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sie_core import ModelSourceInvalid

from sie_adapters_torch._files import ModelFiles
from sie_adapters_torch._options import LoadOptions
from sie_adapters_torch._weights import HeadKind, load_model

__all__ = ["CheckpointHead", "load_with_head"]


class _Given(torch.nn.Module):
    """Stands for the encoder: its output is what it is called with."""

    def __init__(self, encoder: torch.nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(encoder, "pooler", None)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled: Any = self.pooler(inputs_embeds) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


class CheckpointHead(torch.nn.Module):
    """A model without its encoder, around the same tensors. Safe on several threads at once."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        rest = copy.copy(model)
        rest._modules = dict(model._modules) | {model.base_model_prefix: _Given(model.base_model)}
        self.rest = rest

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states (rows, tokens, width): (rows, tokens, n), or (rows, n) where a row is classified."""
        result: torch.Tensor = self.rest(inputs_embeds=hidden, return_dict=True).logits
        return result


def load_with_head(
    files: ModelFiles, options: LoadOptions, kind: HeadKind
) -> tuple[torch.nn.Module, CheckpointHead, Any]:
    """The encoder, the head and the configuration of a model, on the CPU. Raises LoadError."""
    whole, config = load_model(files, options, kind)
    model: Any = whole
    if model.base_model_prefix not in model._modules:
        raise ModelSourceInvalid(f"{files.folder}: {type(model).__name__} can't be told apart from its encoder")
    head = CheckpointHead(model).eval()
    head.requires_grad_(False)
    return model.base_model, head, config
