"""The commands that use models: encode in every output, score, extract."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sie_testing import expected_score

Sie = Callable[..., Any]
MODELS = """\
models:
  - {name: any, adapter: fake, options: {dims: 4, outputs: [dense, sparse, multivector]}}
  - {name: ranker, adapter: fake, options: {tasks: [score], max_length: 6}}
  - {name: finder, adapter: fake, options: {tasks: [extract]}}
"""
TEXTS = ["a blue whale", "a red fox", "red"]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Any:
    return start_server(MODELS, command=[str(Path(sys.executable).with_name("sie"))])


@pytest.fixture
def ask(sie: Sie, server: Any) -> Sie:
    def run(*arguments: object, **options: Any) -> Any:
        return sie(*arguments, **{**options, "env": {"SIE_BASE_URL": server.url}})

    return run


def test_every_output_is_previewed_and_printed(ask: Sie) -> None:
    outputs = ["--output", "sparse", "--output", "multivector", "--output", "dense"]
    preview = ask("encode", "any", "two words", *outputs)
    assert re.search(r"\{\d+: 1\.0000, \d+: 1\.0000\}  2 weights", preview.stdout), preview
    assert "2 tokens, 4 dims" in preview.stdout
    assert "4 dims, norm 1.000" in preview.stdout
    line = json.loads(ask("encode", "any", "two words", *outputs, "--json").stdout)
    assert len(line["dense"]) == 4
    assert [len(row) for row in line["multivector"]] == [4, 4]
    assert len(line["sparse"]["indices"]) == len(line["sparse"]["values"]) == 2
    assert ask("encode", "any", "x", "--output", "smell").returncode == 2


def test_scores_come_best_first(ask: Sie) -> None:
    expected = sorted(((expected_score("red fox", text), text) for text in TEXTS), reverse=True)
    done = ask("score", "ranker", "red fox", *TEXTS)
    assert done.stdout == "".join(f"{score:+.4f}  {text}\n" for score, text in expected)
    none = ask("score", "ranker", "red fox", *TEXTS, "--top", "-1")
    assert (none.returncode, none.stdout) == (2, "")
    assert "--top must be 1 or more" in none.stderr
    piped = ask("score", "ranker", "red fox", "--top", "2", "--json", stdin="\n".join(TEXTS))
    assert [json.loads(line) for line in piped.stdout.splitlines()] == [
        {"text": text, "score": score, "rank": rank} for rank, (score, text) in enumerate(expected[:2])
    ]


def test_what_was_found_stands_below_its_text(ask: Sie) -> None:
    done = ask("extract", "finder", "the Fox met a fox", "nobody", "--label", "fox")
    assert done.stdout.splitlines() == [
        "the Fox met a fox",
        "  1.000  fox  Fox  4-7",
        "  1.000  fox  fox  14-17",
        "  0.500  Fox  next to  fox",
        "  0.400  fox",
        "nobody",
        "  0.000  fox",
    ]
    line = json.loads(ask("extract", "finder", "a fox", "--label", "fox", "--json").stdout)
    assert line["text"] == "a fox"
    assert line["entities"][0]["start"] == 2


def test_refusals_say_what_to_do(ask: Sie) -> None:
    long, cut = ask("score", "ranker", "q", "a b c d e f g"), ask("score", "ranker", "q", "a b c d e f g", "--truncate")
    assert (long.returncode, cut.returncode) == (1, 0)
    assert "7 tokens" in long.stderr
    unlabelled = ask("extract", "finder", "a fox")
    assert unlabelled.returncode == 1
    assert "labels" in unlabelled.stderr
    other = ask("score", "any", "q", "text")
    assert "it can encode" in other.stderr
