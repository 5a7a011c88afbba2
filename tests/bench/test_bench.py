"""What the benchmark's figures rest on: the same texts for all, ratios within pairs, tables that keep the rest."""

from __future__ import annotations

import json
from pathlib import Path

import inner
import pytest
import run
from results import Ratio, Row, alternate, percentile, write_table
from workload import LONGEST, SHORTEST, TEXTS, texts, windows, write_bodies

PAGE = "before\n<!-- measured: one, start -->\nold\n<!-- measured: one, end -->\nafter\n"
ORDER = ["first", "second"]


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


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_percentiles_are_values_that_were_measured(percent: float, expected: float) -> None:
    assert percentile([*range(100, 0, -1)], percent) == expected


def row(measure: str, ours: str) -> Row:
    return Row(measure, ours, "3 ms", "0.67", "≤ 1", met=True)


def test_what_was_measured_again_replaces_its_rows_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    write_table(page, "one", {"second": [row("c", "1 ms"), row("d", "2 ms")]}, order=ORDER, note="5 turns.")
    write_table(page, "one", {"first": [row("a", "4 ms"), row("b", "5 ms")]}, order=ORDER, note="5 turns.")
    write_table(page, "one", {"second": [row("c", "6 ms")]}, order=ORDER, note="1 turn.")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- measured: one, start -->")
    assert text.endswith("<!-- measured: one, end -->\nafter\n")
    assert "old" not in text
    lines = [line for line in text.splitlines() if "3 ms" in line]
    assert lines == [
        "| first | a | 4 ms | 3 ms | 0.67 | ≤ 1 | yes |",
        "| first | b | 5 ms | 3 ms | 0.67 | ≤ 1 | yes |",
        "| second | c | 6 ms | 3 ms | 0.67 | ≤ 1 | yes |",
    ]
    said = [line for line in text.splitlines() if line.startswith("- `")]
    assert [line.split(":")[0] for line in said] == ["- `first`", "- `second`"]
    assert [line.endswith(note) for line, note in zip(said, ("5 turns.", "1 turn."), strict=True)] == [True, True]


def test_measures_of_one_run_share_a_line_that_says_what_it_ran_on(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    found = {"first": [row("a", "1 ms")], "second": [row("b", "2 ms")], "gone": [row("z", "9 ms")]}
    write_table(page, "one", found, order=[*ORDER, "gone"], note="5 turns.")
    assert "- `first`, `second`, `gone`: 2" in page.read_text(encoding="utf-8")
    write_table(page, "one", {}, order=ORDER, note="")
    text = page.read_text(encoding="utf-8")
    assert "- `first`, `second`: 2" in text
    assert "gone" not in text and "9 ms" not in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    with pytest.raises(ValueError, match="measured: two, start"):
        write_table(page, "two", {}, order=ORDER, note="")
    assert page.read_text(encoding="utf-8") == PAGE


def test_the_real_page_has_a_table_of_every_part_and_no_measure_that_is_gone() -> None:
    text = run.PAGE.read_text(encoding="utf-8")
    for part in run.PARTS:
        table = text.partition(f"<!-- measured: {part}, start -->")[2].partition(f"<!-- measured: {part}, end -->")[0]
        names = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
        assert names - {"name"} <= set(run.PARTS[part])


def test_choosing_victims_and_leasing_can_be_timed() -> None:
    assert 0 < inner.lease_us() < 20_000
    assert 0 < inner.victims_us() < 200_000


def test_what_was_measured_is_on_the_page_although_a_later_measure_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: object) -> list[Row]:
        raise RuntimeError("no load generator")

    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("one", "tier"), encoding="utf-8")
    monkeypatch.setattr(run, "PAGE", page)
    monkeypatch.setattr(run, "PARTS", {"tier": {"first": lambda bench: [row("a", "4 ms")], "second": fails}})
    monkeypatch.setattr(run, "MEASURES", ORDER)
    with pytest.raises(RuntimeError, match="no load generator"):
        run.main([])
    written = page.read_text(encoding="utf-8")
    assert "| first | a | 4 ms |" in written
    assert run.main(["first", "--print"]) == 0
    assert page.read_text(encoding="utf-8") == written
