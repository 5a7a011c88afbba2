"""From token vectors to one vector a text, and the steps after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sie_core import ModelSourceInvalid

from sie_adapters_torch._dense_files import HeadStep
from sie_adapters_torch._options import Pooling
from sie_adapters_torch._weights import load_tensors

__all__ = ["Head", "load_head", "pool"]


def pool(hidden: torch.Tensor, lengths: Sequence[int], how: Pooling, skips: Sequence[int]) -> torch.Tensor:
    """One vector a text, float32 (texts, hidden). ``skips``: leading tokens of each text that don't count."""
    counts = torch.tensor(lengths, device=hidden.device)
    ends = counts.cumsum(0)
    if how == "last_token":
        return hidden[ends - 1].float()
    if how == "cls":
        return hidden[ends - counts + torch.tensor(skips, device=hidden.device)].float()
    texts = torch.repeat_interleave(counts)
    if any(skips):
        skipped = torch.tensor(skips, device=hidden.device)
        place = torch.arange(len(texts), device=hidden.device) - (ends - counts)[texts]
        kept = place >= skipped[texts]
        hidden, texts, counts = hidden[kept], texts[kept], counts - skipped
    sums = torch.zeros(len(lengths), hidden.shape[1], device=hidden.device)
    return sums.index_add_(0, texts, hidden.float()) / counts[:, None].clamp(min=1)


class _Normalise(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vectors, dim=1)


class _First(torch.nn.Module):
    def __init__(self, dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[:, : self.dims]


class _Residual(torch.nn.Module):
    """A step whose input is added to its output, by way of a matrix of its own where their sizes differ."""

    def __init__(self, step: torch.nn.Module, around: torch.nn.Module) -> None:
        super().__init__()
        self.step, self.around = step, around

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.step(vectors) + self.around(vectors)
        return result


class Head(torch.nn.Sequential):
    """The steps after pooling, in float32 whatever the model's own precision."""


def load_head(steps: Sequence[HeadStep], width: int, inline: torch.Tensor | None = None) -> Head:
    """The steps with their weights; a Dense without a folder is the matrix ``inline``.

    Raises ModelSourceInvalid, UnsafeSource.
    """
    made: list[torch.nn.Module] = []
    for step in steps:
        if step.kind == "normalise":
            made.append(_Normalise())
            continue
        if step.kind == "truncate":
            made.append(_First(step.outputs))
            width = step.outputs
            continue
        if step.kind == "layer_norm":
            made.append(_filled(torch.nn.LayerNorm(width), step, "norm"))
            continue
        if step.folder is None and inline is not None:
            made.append(_matrix(inline))
            width = inline.shape[0]
            continue
        if step.inputs != width:
            raise ModelSourceInvalid(f"{step.folder} takes {step.inputs} numbers and gets {width}")
        made.append(_dense(step))
        width = step.outputs
    head = Head(*made).eval()
    head.requires_grad_(False)
    return head


def _matrix(weight: torch.Tensor) -> torch.nn.Module:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


def _dense(step: HeadStep) -> torch.nn.Module:
    linear = _filled(torch.nn.Linear(step.inputs, step.outputs, bias=step.bias), step, "linear")
    dense = torch.nn.Sequential(linear, getattr(torch.nn, step.activation)())
    if not step.residual:
        return dense
    if step.inputs == step.outputs:
        return _Residual(dense, torch.nn.Identity())
    return _Residual(dense, _filled(torch.nn.Linear(step.inputs, step.outputs, bias=False), step, "residual"))


def _filled(module: torch.nn.Module, step: HeadStep, name: str) -> torch.nn.Module:
    assert step.folder is not None
    wanted: dict[str, Any] = module.state_dict()
    tensors = load_tensors(step.folder, [f"{name}.{key}" for key in wanted], "float32")
    for key, place in wanted.items():
        if tensors[f"{name}.{key}"].shape != place.shape:
            raise ModelSourceInvalid(f"{step.folder}: {name}.{key} has another shape than its config.json says")
        place.copy_(tensors[f"{name}.{key}"])
    return module
