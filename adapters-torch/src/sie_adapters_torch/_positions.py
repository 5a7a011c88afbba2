"""How many positions a model has, found by trying.

Tables of positions differ in where they start: some families count from 0, some from the id after the padding's, some
leave out two rows. No file says which, so texts are put through the model as far as its first layer.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["tried_positions"]

_FEW = 2  # rows of a table that is about something else: types of tokens


class _Enough(Exception):
    pass


def tried_positions(model: torch.nn.Module, claimed: int | None, *, pad_id: int) -> int | None:
    """Tokens that a text may have, ``claimed`` at most; ``None``: no limit shows. Blocking; the model is on the CPU."""
    own = _embeddings(model)
    tables = [rows for module in model.modules() if module is not own and (rows := _rows(module)) > _FEW]
    if not tables:
        return claimed
    most = max(tables) + 1 if claimed is None else claimed
    layer = _first_layer(model)
    handle = layer.register_forward_pre_hook(_stop) if layer is not None else None
    token = 1 if pad_id == 0 else 0
    try:
        if _passes(model, most, token) or not _passes(model, 1, token):
            return claimed
        works, fails = 1, most
        while fails - works > 1:
            middle = (works + fails) // 2
            if _passes(model, middle, token):
                works = middle
            else:
                fails = middle
        return works
    finally:
        if handle is not None:
            handle.remove()


def _rows(module: torch.nn.Module) -> int:
    """Of a table; 0: it is none. Some families have classes of their own for them."""
    weight = getattr(module, "weight", None)
    there = isinstance(weight, torch.Tensor) and weight.dim() == 2 and "Embedding" in type(module).__name__
    return len(weight) if there else 0  # type: ignore[arg-type]


def _stop(*_: Any) -> None:
    raise _Enough


@torch.inference_mode()
def _passes(model: torch.nn.Module, length: int, token: int) -> bool:
    ids = torch.full((1, length), token, dtype=torch.int64)
    try:
        model(input_ids=ids)
    except _Enough:
        return True
    except (IndexError, RuntimeError, ValueError, AssertionError):
        return False
    return True


def _embeddings(model: Any) -> torch.nn.Module | None:
    try:
        found: torch.nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found


def _first_layer(model: Any) -> torch.nn.Module | None:
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    return next((each[0] for each in lists if len(each) == count), lists[0][0] if lists else None)
