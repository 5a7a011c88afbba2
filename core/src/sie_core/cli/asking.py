"""What the commands that use a model share: options, texts from the command line or from stdin, and patience."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, TypeAlias

from cyclopts import Parameter

from sie_core.cli.client import Client, Remote
from sie_core.cli.errors import CommandError, Exit
from sie_core.cli.output import console, printable

__all__ = [
    "Instruction",
    "Lora",
    "Model",
    "Texts",
    "Timeout",
    "Truncate",
    "answer",
    "each_answer",
    "label_of",
    "said",
    "texts_or_lines",
]

Model: TypeAlias = Annotated[str, Parameter(help="Name of the model, as in `sie models`.")]
Texts: TypeAlias = Annotated[
    tuple[str, ...], Parameter(name="TEXT", negative="", show_default=False, help="Texts; none: stdin, one a line.")
]
Instruction: TypeAlias = Annotated[
    str | None, Parameter(metavar="TEXT", help="An instruction for models that take one.")
]
Lora: TypeAlias = Annotated[str | None, Parameter(metavar="NAME", help="A LoRA adapter of the model to apply.")]
Truncate: TypeAlias = Annotated[
    bool, Parameter(negative="", show_default=False, help="Cut texts that are too long; without it: an error.")
]
Timeout: TypeAlias = Annotated[float, Parameter(metavar="SECONDS", help="Seconds to wait for an answer.")]

_CHUNK = 256
"""Texts a request, when they come from stdin: small enough that the first answers are there soon."""
_AGAIN_S = 5.0
"""Seconds to wait at most before asking again for a model that loads; the request itself waits for it, too."""


def said(instruction: str | None, lora: str | None, truncate: bool) -> dict[str, Any]:
    """Those of the options that all requests have that were given, as fields of a request."""
    fields = {"instruction": instruction, "lora": lora, "truncate": truncate or None}
    return {name: value for name, value in fields.items() if value is not None}


def texts_or_lines(texts: Sequence[str], example: str) -> Iterable[str]:
    """The texts given, or the lines of stdin. Raises CommandError when somebody would have to type them."""
    if texts:
        return texts
    if sys.stdin.isatty():
        raise CommandError(
            "give at least one text, or pipe some in, one a line",
            exit_code=Exit.USAGE,
            code="USAGE",
            hint=f"for example: {example}",
        )
    return _lines()


def answer(client: Client, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
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
    """The lines of stdin without their ends. Raises CommandError at a blank one: left out, answers and lines differ."""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
    try:
        for number, line in enumerate(sys.stdin, 1):
            if not line.strip():
                raise CommandError(
                    f"line {number} of stdin is blank: a text must not be empty",
                    exit_code=Exit.USAGE,
                    code="INVALID_INPUT",
                    hint="remove the blank lines first, for example with: grep '[^[:space:]]'",
                    details={"line": number},
                )
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise CommandError("stdin is not valid UTF-8", exit_code=Exit.USAGE, code="INVALID_INPUT") from error


def each_answer(
    remote: Remote, path: str, texts: Iterable[str], params: dict[str, Any], timeout_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each text with its answer, a request's worth at a time; what was printed for one is seen before the next."""
    source = iter(texts)
    with Client(remote) as client:
        while chunk := list(islice(source, _CHUNK)):
            body = {"items": [{"text": text} for text in chunk], "params": params}
            yield from zip(chunk, answer(client, path, body, timeout_s)["items"], strict=True)
            sys.stdout.flush()


def label_of(text: str) -> str:
    """A text as it may stand before its answer."""
    width = max(console().width - 60, 12) if sys.stdout.isatty() else 40
    return printable(text if len(text) <= width else text[: width - 1] + "…")
