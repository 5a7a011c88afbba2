"""``sie extract``: what texts speak of, through a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

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
from sie_core.cli.output import printable

__all__ = ["extract"]

_NO_REMOTE = Remote()


@command(
    "MODEL [TEXT...] [OPTIONS]",
    'sie extract gliner "Goethe wrote Faust" --label person --label work',
    "sie extract ner --json < texts.txt > entities.jsonl",
)
def extract(
    model: Model,
    texts: Texts = (),
    /,
    *,
    label: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="LABEL",
            negative="",
            show_default=False,
            help="What to look for; may be given again. Models with labels of their own need none.",
        ),
    ] = (),
    instruction: Instruction = None,
    lora: Lora = None,
    truncate: Truncate = False,
    timeout: Timeout = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Find entities, relations and classes in texts.

    Prints each text and, below it, what was found; with --json one JSON object a line.
    """
    given = texts_or_lines(texts, f'sie extract {model} "Goethe wrote Faust" --label person')
    params = said(instruction, lora, truncate)
    if label:
        params["labels"] = list(label)
    path = model_path("/v1/extract", model)
    for text, item in each_answer(remote, path, given, params, timeout):
        if remote.json:
            print(json.dumps({"text": text, **item}))
        else:
            print("\n".join([label_of(text), *(f"  {line}" for line in _lines(item))]))


def _lines(item: dict[str, Any]) -> Iterator[str]:
    for one in item["entities"]:
        place = f"{one['start']}-{one['end']}" if "start" in one else ""
        yield f"{one['score']:.3f}  {printable(one['label'])}  {printable(one['text'])}  {place}".rstrip()
    for one in item["relations"]:
        yield (f"{one['score']:.3f}  {printable(one['head'])}  {printable(one['relation'])}  {printable(one['tail'])}")
    for one in [*item["classifications"], *item["objects"]]:
        yield f"{one['score']:.3f}  {printable(one['label'])}"
