"""Signing an engine's pieces: the quick way and the slow way say the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sie_core.serving._splice import Signature, Splice

CHOICES = [{"index": 0, "delta": {"content": 'a "choices":[] b'}, "finish_reason": None}]
HEADS = [
    {"id": "x", "object": "chat.completion.chunk", "created": 5, "model": "theirs"},
    {"model": "theirs", "id": "x"},
    {},
    {"id": 'a "quoted" one', "created": 5, "model": "theirs"},
    {"system_fingerprint": "fp", "id": "x"},
    {"id": None, "model": ["odd"]},
]


def read(splice: Splice, piece: bytes) -> dict[str, Any]:
    ready = splice.take(piece)
    assert ready is not None
    assert b"\n" not in ready
    value: dict[str, Any] = json.loads(ready)
    assert len(ready.split(b'"model"')) == 2  # said once
    return value


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("tail", [{}, {"usage": None}, {"model": "theirs", "extra": 1}], ids=str)
@pytest.mark.parametrize("layout", [{"separators": (",", ":")}, {}, {"indent": 1}], ids=["tight", "loose", "lines"])
def test_whatever_stands_around_the_choices(head: dict[str, Any], tail: dict[str, Any], layout: dict[str, Any]) -> None:
    signature = Signature("chat", "ours")
    splice = Splice(signature, keep_usage=False)
    mine = {"id": signature.id, "object": "chat.completion.chunk", "created": signature.created, "model": "ours"}
    for number in range(3):
        theirs = {**head, "choices": CHOICES, **tail, "number": number}
        if "created" in theirs:
            theirs["created"] += number // 2  # the clock ticks in the middle of an answer
        assert read(splice, json.dumps(theirs, **layout).encode()) == {**theirs, **mine}


@given(st.lists(st.tuples(st.sampled_from(HEADS), st.text(), st.booleans()), max_size=6))
def test_pieces_of_all_kinds_in_any_order(drawn: list[tuple[dict[str, Any], str, bool]]) -> None:
    signature = Signature("completion", 'ours "\\ \u00e9')
    splice = Splice(signature, keep_usage=False)
    mine = {"id": signature.id, "object": "text_completion", "created": signature.created, "model": signature.model}
    for head, text, behind in drawn:
        choices = [{"index": 0, "text": text}]
        theirs = {"choices": choices, **head} if behind else {**head, "choices": choices}
        ready = splice.take(json.dumps(theirs).encode("utf-8"))
        assert ready is not None
        assert json.loads(ready) == {**theirs, **mine}


@given(st.lists(st.tuples(st.sampled_from(HEADS), st.text(), st.sampled_from(["text", "usage"])), max_size=6))
def test_pieces_that_came_together_are_the_same_a_line_each(drawn: list[tuple[dict[str, Any], str, str]]) -> None:
    signature = Signature("completion", "ours")
    together, alone = (Splice(signature, keep_usage=False) for _ in range(2))
    tails = {"usage": {"choices": [], "usage": {"total_tokens": 3}}}
    pieces = [
        json.dumps({**head, **tails.get(kind, {"choices": [{"index": 0, "text": text}]})}).encode()
        for head, text, kind in drawn
    ]
    singly = [ready for piece in pieces if (ready := alone.take(piece)) is not None]
    assert together.take_all(pieces) == (b"\n".join(singly) or None)
    assert together.usage == alone.usage


@pytest.mark.parametrize("keep", [False, True])
def test_the_usage_is_kept_and_shown_to_those_who_asked(keep: bool) -> None:
    splice = Splice(Signature("chat", "ours"), keep_usage=keep)
    head = {"id": "x", "created": 5, "model": "theirs"}
    for _ in range(2):
        read(splice, json.dumps({**head, "choices": CHOICES, "usage": None}).encode())
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    last = splice.take(json.dumps({**head, "choices": [], "usage": usage}).encode())
    assert splice.usage == usage
    assert (last is not None) == keep
    if last is not None:
        assert json.loads(last)["usage"] == usage


def test_a_piece_without_choices_that_is_no_usage_goes_through() -> None:
    splice = Splice(Signature("chat", "ours"), keep_usage=False)
    assert read(splice, b'{"choices":[],"prompt_filter_results":[1]}')["prompt_filter_results"] == [1]
    assert splice.usage is None
