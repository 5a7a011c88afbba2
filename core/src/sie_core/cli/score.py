"""``sie score``: which texts answer a query best, through a running server."""

from __future__ import annotations

import json
from typing import Annotated

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.asking import (
    Instruction,
    Lora,
    Model,
    Texts,
    Timeout,
    Truncate,
    answer,
    label_of,
    said,
    texts_or_lines,
)
from sie_core.cli.client import Client, Remote, model_path
from sie_core.cli.errors import CommandError, Exit

__all__ = ["score"]

_NO_REMOTE = Remote()


@command(
    "MODEL QUERY [TEXT...] [OPTIONS]",
    'sie score reranker "who wrote Faust?" "Goethe wrote it" "Faust is a river"',
    'sie score reranker "who wrote Faust?" --top 5 < texts.txt',
)
def score(
    model: Model,
    query: Annotated[str, Parameter(help="What the texts shall answer.")],
    texts: Texts = (),
    /,
    *,
    top: Annotated[int | None, Parameter(metavar="N", help="Show the N best only.")] = None,
    instruction: Instruction = None,
    lora: Lora = None,
    truncate: Truncate = False,
    timeout: Timeout = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Score texts against a query, best first.

    Prints a score and a text a line; with --json one JSON object a line. All texts go in one request, 1000 at most.
    """
    if top is not None and top < 1:
        raise CommandError(f"--top must be 1 or more, not {top}", exit_code=Exit.USAGE, code="USAGE")
    given = list(texts_or_lines(texts, f'sie score {model} "a query" "a text" "another"'))
    asked = {"query": {"text": query}, "items": [{"id": str(place), "text": text} for place, text in enumerate(given)]}
    body = {**asked, **said(instruction, lora, truncate)}
    with Client(remote) as client:
        scores = answer(client, model_path("/v1/score", model), body, timeout)["scores"]
    for one in scores[:top]:
        text = given[int(one["item_id"])]
        if remote.json:
            print(json.dumps({"text": text, "score": one["score"], "rank": one["rank"]}))
        else:
            print(f"{one['score']:+.4f}  {label_of(text)}")
