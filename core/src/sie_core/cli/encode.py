"""``sie encode``: texts to vectors, through a running server."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.asking import (
    Instruction,
    Lora,
    Model,
    Texts,
    Timeout,
    Truncate,
    each_answer,
    label_of,
    said,
    texts_or_lines,
)
from sie_core.cli.client import Remote, model_path

__all__ = ["encode"]

_NO_REMOTE = Remote()


@command(
    "MODEL [TEXT...] [OPTIONS]",
    'sie encode minilm "Hello, world"',
    'sie encode minilm --query "who wrote Faust?" --json',
    "sie encode minilm --json < texts.txt > vectors.jsonl",
    'sie encode splade --output sparse "Hello, world" --json',
)
def encode(
    model: Model,
    texts: Texts = (),
    /,
    *,
    query: Annotated[
        bool, Parameter(negative="", show_default=False, help="The texts are search queries, not documents.")
    ] = False,
    output: Annotated[
        tuple[Literal["dense", "sparse", "multivector"], ...],
        Parameter(
            metavar="KIND",
            negative="",
            show_default=False,
            show_choices=False,
            help="dense, sparse or multivector; may be given again. Without it: dense.",
        ),
    ] = (),
    dimensions: Annotated[int | None, Parameter(metavar="N", help="Shorten the vectors to so many numbers.")] = None,
    instruction: Instruction = None,
    lora: Lora = None,
    truncate: Truncate = False,
    timeout: Timeout = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Turn texts into vectors.

    Prints the beginning of each vector; with --json one JSON object a line, with the whole vector in it.
    """
    given = texts_or_lines(texts, f'sie encode {model} "Hello, world"')
    options: dict[str, Any] = {"is_query": True} if query else {}
    if dimensions is not None:
        options["dimensions"] = dimensions
    params: dict[str, Any] = {"options": options, **said(instruction, lora, truncate)}
    if output:
        params["output_types"] = list(output)
    path = model_path("/v1/encode", model)
    for text, item in each_answer(remote, path, given, params, timeout):
        _show(text, item, as_json=remote.json)


def _show(text: str, item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"text": text, **{kind: _plain(value) for kind, value in item.items() if value is not None}}))
        return
    shown = [_PREVIEWS[kind](value) for kind, value in item.items() if kind in _PREVIEWS and value is not None]
    print(f"{label_of(text)}  {'; '.join(shown)}")


def _dense(value: dict[str, Any]) -> str:
    vector = value["values"]
    norm = math.sqrt(sum(number * number for number in vector))
    return f"{_head(vector)}  {len(vector)} dims, norm {norm:.3f}"


def _sparse(value: dict[str, Any]) -> str:
    best = sorted(zip(value["values"], value["indices"], strict=True), reverse=True)
    head = ", ".join(f"{index}: {weight:.4f}" for weight, index in best[:3])
    return f"{{{head}{', …' if len(best) > 3 else ''}}}  {len(best)} weights"


def _multivector(value: dict[str, Any]) -> str:
    rows = value["values"]
    return f"{_head(rows[0]) if rows else '[]'}  {len(rows)} tokens, {value['dims']} dims"


_PREVIEWS = {"dense": _dense, "sparse": _sparse, "multivector": _multivector}


def _head(vector: list[float]) -> str:
    return f"[{', '.join(f'{value:+.4f}' for value in vector[:4])}{', …' if len(vector) > 4 else ''}]"


def _plain(value: Any) -> Any:
    """``{"dims": 3, "dtype": …, "values": […]}`` as the bare list; everything else as it came."""
    listed = isinstance(value, dict) and "dims" in value and "values" in value and "indices" not in value
    return value["values"] if listed else value
