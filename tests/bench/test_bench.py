"""What the benchmark's figures rest on: the same texts for all, ratios within pairs, a table that is replaced whole."""

from __future__ import annotations

import json
from pathlib import Path

import inner
import pytest
from results import Ratio, Row, alternate, write_table
from workload import LONGEST, SHORTEST, TEXTS, texts, windows, write_bodies

PAGE = "before\n<!-- measured: start -->\nold\n<!-- measured: end -->\nafter\n"


def test_the_texts_are_the_same_every_time_and_as_long_as_promised() -> None:
    first = texts()
    assert first == texts()
    assert len(first) == TEXTS
    lengths = [len(text.split()) for text in first]
    assert (min(lengths), max(lengths)) == (SHORTEST, LONGEST)


def test_windows_keep_the_order_and_are_all_full() -> None:
    assert list(windows("abcdefg", 3)) == [["a", "b", "c"], ["d", "e", "f"]]


@pytest.mark.parametrize(("size", "kind"), [(1, str), (32, list)])
def test_bodies_are_embeddings_requests_of_all_the_texts(tmp_path: Path, size: int, kind: type) -> None:
    file = tmp_path / "bodies"
    assert write_bodies(file, model="m", texts_per_request=size) == TEXTS // size
    bodies = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {body["model"] for body in bodies} == {"m"}
    assert all(type(body["input"]) is kind for body in bodies)
    sent = [text for body in bodies for text in ([body["input"]] if size == 1 else body["input"])]
    assert sent == texts()


def test_a_ratio_is_taken_within_each_pair() -> None:
    # The machine was twice as slow in the second pair: the ratio of the medians would be wrong.
    ratio = Ratio.of([100, 50, 300], [50, 25, 100])
    assert (ratio.median, ratio.least, ratio.most) == (2.0, 2.0, 3.0)
    with pytest.raises(ValueError):
        Ratio.of([1.0], [1.0, 2.0])


def test_contestants_take_turns() -> None:
    order: list[str] = []
    found = alternate(2, lambda: order.append("a") or 1, lambda: order.append("b") or 2)
    assert order == ["a", "b", "a", "b"]
    assert found == [[1, 1], [2, 2]]


def test_the_table_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    for ours in ("1 ms", "2 ms"):
        write_table(page, [Row("latency", ours, "3 ms", "0.67", "≤ 1", met=True)], note="")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- measured: start -->")
    assert text.endswith("<!-- measured: end -->\nafter\n")
    assert "old" not in text
    assert "1 ms" not in text
    assert "| latency | 2 ms | 3 ms | 0.67 | ≤ 1 | yes |" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here", encoding="utf-8")
    with pytest.raises(ValueError, match="measured: start"):
        write_table(page, [], note="")
    assert page.read_text(encoding="utf-8") == "nothing here"


def test_choosing_victims_and_leasing_can_be_timed() -> None:
    assert 0 < inner.lease_us() < 20_000
    assert 0 < inner.victims_us() < 200_000
