"""``sie encode``: texts to vectors, through a running server."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

from cyclopts import Parameter

from sie_core.cli.app import command
from sie_core.cli.client import Client, Remote, model_path
from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.output import console, printable

__all__ = ["encode"]

_NO_REMOTE = Remote()
_CHUNK = 256
"""Texts a request, when they come from stdin: small enough that the first vectors are there soon."""
_AGAIN_S = 5.0
"""Seconds to wait at most before asking again for a model that loads; the request itself waits for it, too."""


@command(
    "MODEL [TEXT...] [OPTIONS]",
    'sie encode minilm "Hello, world"',
    'sie encode minilm --query "who wrote Faust?" --json',
    "sie encode minilm --json < texts.txt > vectors.jsonl",
)
def encode(
    model: Annotated[str, Parameter(help="Name of the model, as in `sie models`.")],
    texts: Annotated[
        tuple[str, ...], Parameter(name="TEXT", negative="", show_default=False, help="Texts; none: stdin, one a line.")
    ] = (),
    /,
    *,
    query: Annotated[
        bool, Parameter(negative="", show_default=False, help="The texts are search queries, not documents.")
    ] = False,
    dimensions: Annotated[int | None, Parameter(metavar="N", help="Shorten the vectors to so many numbers.")] = None,
    instruction: Annotated[
        str | None, Parameter(metavar="TEXT", help="An instruction for models that take one.")
    ] = None,
    lora: Annotated[str | None, Parameter(metavar="NAME", help="A LoRA adapter of the model to apply.")] = None,
    truncate: Annotated[
        bool, Parameter(negative="", show_default=False, help="Cut texts that are too long; without it: an error.")
    ] = False,
    timeout: Annotated[float, Parameter(metavar="SECONDS", help="Seconds to wait for an answer.")] = 120.0,
    remote: Remote = _NO_REMOTE,
) -> None:
    """Turn texts into vectors.

    Prints the beginning of each vector; with --json one JSON object a line, with the whole vector in it.
    """
    if not texts and sys.stdin.isatty():
        raise CommandError(
            "give at least one text, or pipe some in, one a line",
            exit_code=Exit.USAGE,
            code="USAGE",
            hint=f'for example: sie encode {model} "Hello, world"',
        )
    options: dict[str, Any] = {"is_query": query}
    if dimensions is not None:
        options["dimensions"] = dimensions
    if truncate:
        options["truncate"] = True
    params: dict[str, Any] = {"options": options}
    if instruction is not None:
        params["instruction"] = instruction
    if lora is not None:
        params["lora"] = lora
    path = model_path("/v1/encode", model)
    with Client(remote) as client:
        for chunk in _chunks(texts or _lines()):
            body = {"items": [{"text": text} for text in chunk], "params": params}
            items = _answer(client, path, body, timeout)["items"]
            for text, item in zip(chunk, items, strict=True):
                _show(text, item, as_json=remote.json)
            sys.stdout.flush()


def _answer(client: Client, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask until the model is loaded: a person at a terminal would do nothing else."""
    deadline = time.monotonic() + timeout_s
    told = ""
    while True:
        try:
            return client.post(path, body, timeout_s=max(deadline - time.monotonic(), 1.0))
        except CommandError as error:
            again_s = min(float(error.details.get("retry_after_s", 1)), _AGAIN_S)
            if error.code not in ("MODEL_LOADING", "LORA_LOADING") or time.monotonic() + again_s >= deadline:
                raise
            if error.message != told:
                told = error.message
                print(f"sie: {printable(told)}: waiting for it", file=sys.stderr)
            time.sleep(again_s)


def _lines() -> Iterator[str]:
    """The lines of stdin, without their ends and without the empty ones."""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    try:
        for line in sys.stdin:
            text = line.rstrip("\r\n")
            if text.strip():
                yield text
    except UnicodeDecodeError as error:
        raise CommandError("stdin is no UTF-8 text", exit_code=Exit.USAGE, code="INVALID_INPUT") from error


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    source = iter(texts)
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


def _show(text: str, item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"text": text, **{kind: _plain(value) for kind, value in item.items() if value is not None}}))
        return
    vector = (item.get("dense") or {}).get("values") or []
    norm = math.sqrt(sum(value * value for value in vector))
    head = ", ".join(f"{value:+.4f}" for value in vector[:4])
    width = max(console().width - 60, 12) if sys.stdout.isatty() else 40
    label = printable(text if len(text) <= width else text[: width - 1] + "…")
    print(f"{label}  [{head}{', …' if len(vector) > 4 else ''}]  {len(vector)} dims, norm {norm:.3f}")


def _plain(value: Any) -> Any:
    """``{"dims": 3, "dtype": …, "values": […]}`` as the bare list; everything else as it came."""
    return value["values"] if isinstance(value, dict) and "dims" in value and "values" in value else value
